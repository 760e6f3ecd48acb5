"""Looks for faster launch records: each candidate is timed in the launches of real op calls."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import exp, log

import torch

from graphlin.backends import LaunchRecord
from graphlin.bench.candidates import Search, candidates
from graphlin.bench.clock import Clock
from graphlin.bench.kernel_times import describe_record, time_alone
from graphlin.bench.peers import check_alike
from graphlin.bench.problems import OUR_OPS, PROBLEMS, Problem, Sizes, random_cuts
from graphlin.bench.results import BOTH, Sample
from graphlin.bench.setting import Shape
from graphlin.bench.taps import Launch, Tap, tapped

FINALISTS = 4


@dataclass(frozen=True)
class Timed:
    """A candidate and its time, in microseconds, or why it can't be used."""

    record: LaunchRecord
    microseconds: float = float("inf")
    error: str | None = None


@dataclass(frozen=True)
class Found:
    """The outcome for one kernel in one call: the present record's time and the finalists', fastest first."""

    op: str
    kernel: str
    shape: Shape
    present: tuple[LaunchRecord, Sample]
    finalists: list[tuple[LaunchRecord, Sample]]
    all: list[Timed]

    @property
    def best(self) -> tuple[LaunchRecord, Sample]:
        return min([self.present, *self.finalists], key=lambda pair: pair[1].median)


class Tuning:
    """The kernels of one op at one shape, forward and backward."""

    def __init__(self, problem: Problem, shape: Shape, device: torch.device, clock: Clock, final_clock: Clock) -> None:
        self.problem, self.shape, self.device = problem, shape, device
        self.clock, self.final_clock = clock, final_clock
        self.work = problem.work(OUR_OPS[problem.op], BOTH)
        self.expected = self.work()
        self.present = self.launches({})
        self.kernels = list(dict.fromkeys(launch.asked for launch in self.present))
        self._times: dict[tuple, float] = {}

    def launches(self, records: dict[str, LaunchRecord]) -> list[Launch]:
        """What a call launches with these records. Raises PeerError where its results are not as expected."""
        with tapped(self.device, records) as tap:
            found = self.work()
        if records:
            check_alike(self.problem.names(BOTH), found, self.expected)
        return tap.launches

    def record(self, kernel: str) -> LaunchRecord:
        """The present record of a kernel."""
        return next(launch.record for launch in self.present if launch.asked == kernel)

    def search(self, kernel: str, records: Sequence[LaunchRecord], advance: Callable[[], None]) -> Found:
        """Times every candidate, then the fastest and the present one again, in turn and more often."""
        timed = []
        for record in records:
            timed.append(self._time(kernel, record))
            advance()
        present = self.record(kernel)
        fastest = sorted((t for t in timed if t.error is None and t.record != present), key=lambda t: t.microseconds)
        samples = self._final(kernel, [present, *(t.record for t in fastest[:FINALISTS])])
        finalists = sorted(samples[1:], key=lambda pair: pair[1].median)
        return Found(self.problem.op, kernel, self.shape, samples[0], finalists, timed)

    def _time(self, kernel: str, record: LaunchRecord) -> Timed:
        """The kernel's time plus what the record adds to other launches of the call, whose sizes may follow from it."""
        try:
            launches = self.launches({kernel: record})
            if all(launch.asked != kernel for launch in launches):
                raise ValueError("the call does not take this record, whose programs do not fit the cores")
            new, old = _differences(launches, self.present)
            own = [launch for launch in self.present if launch.asked == kernel]
            microseconds = sum(map(self._alone, own)) + sum(map(self._alone, new)) - sum(map(self._alone, old))
            return Timed(record, microseconds)
        except Exception as error:  # too much shared memory, a compiler's failure, wrong results: no candidate then
            return Timed(record, error=f"{type(error).__name__}: {error}")

    def _alone(self, launch: Launch) -> float:
        if launch.form not in self._times:
            self._times[launch.form] = time_alone(launch, self.clock).median
        return self._times[launch.form]

    def _final(self, kernel: str, records: list[LaunchRecord]) -> list[tuple[LaunchRecord, Sample]]:
        """All records' affected launches, interleaved: those of the kernel and whatever any of the records changes."""
        calls = [self.launches({kernel: record}) for record in records]
        affected = {kernel, *(launch.asked for call in calls for launch in _differences(call, self.present)[0])}
        works = {i: self.clock.captured(partial(_again, [launch for launch in call if launch.asked in affected]))
                 for i, call in enumerate(calls)}
        samples = self.final_clock.on_stream(works)
        return [(record, samples[i]) for i, record in enumerate(records)]


def _again(launches: Iterable[Launch]) -> None:
    for launch in launches:
        launch.again()


def _differences(new: Sequence[Launch], old: Sequence[Launch]) -> tuple[list[Launch], list[Launch]]:
    """Launches of each call that the other one lacks."""
    old_forms, new_forms = ({launch.form for launch in launches} for launches in (old, new))
    return ([launch for launch in new if launch.form not in old_forms],
            [launch for launch in old if launch.form not in new_forms])


def best_overall(found: Sequence[Found]) -> tuple[LaunchRecord, float]:
    """Of one kernel at several shapes: the record with the least geometric mean of its times over the present ones'."""
    gains: dict[str, float] = {}
    records = {describe_record(t.record): t.record for t in found[0].all}
    for name in records:
        times = [_microseconds(each, name) / _microseconds(each, describe_record(each.present[0])) for each in found]
        gains[name] = exp(sum(log(t) for t in times) / len(times))
    best = min(gains, key=gains.__getitem__)
    return records[best], gains[best]


def _microseconds(found: Found, name: str) -> float:
    return next(t.microseconds for t in found.all if describe_record(t.record) == name)


def compilations(op: str, kernels: Iterable[str], search: Search, shapes: Iterable[Shape], sizes: Sizes, device: torch.device,
                 processes: int) -> list[Callable[[], None]]:
    """Calls that compile all candidates between them, each to be run in a process of its own."""
    return [partial(_compile, op, list(kernels), search, list(shapes), sizes, str(device), part, processes)
            for part in range(processes)]


def _compile(op: str, kernels: list[str], search: Search, shapes: list[Shape], sizes: Sizes, device: str, part: int,
             parts: int) -> None:
    """Calls the op with every so many-th candidate of each form that it takes at some shape."""
    where, todo, seen = torch.device(device), [], set()
    for tokens, seqs in shapes:
        work = PROBLEMS[op](tokens, random_cuts(tokens, seqs, where), sizes).work(OUR_OPS[op], BOTH)
        with tapped(where) as tap:
            work()
        todo += [(work, {kernel: record}) for kernel, record in _variants(tap, kernels, search, seen)]
    for work, records in todo[part::parts]:
        with suppress(Exception), tapped(where, records):
            work()


def _variants(tap: Tap, kernels: list[str], search: Search, seen: set) -> Iterator[tuple[str, LaunchRecord]]:
    """Candidates that differ in more than the number of programs from each other, and from those seen."""
    for launch in tap.launches:
        for record in candidates(launch.asked, launch.record, search):
            form = (launch.asked, tuple(sorted(launch.constexprs.items())), tuple(record.tiles.items()), record.num_warps,
                    record.num_stages)
            if (not kernels or launch.asked in kernels) and form not in seen:
                seen.add(form)
                yield launch.asked, record
