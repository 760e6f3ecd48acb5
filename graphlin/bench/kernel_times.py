"""Where the time of a call goes: its kernels' times, by the profiler or one launch after the other."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.autograd import DeviceType

from graphlin.backends import LaunchRecord
from graphlin.bench.clock import Clock
from graphlin.bench.peers import ours
from graphlin.bench.problems import PROBLEMS
from graphlin.bench.results import BOTH, Key, Row, Sample
from graphlin.bench.setting import Job, Setting
from graphlin.bench.taps import Launch, tapped
from graphlin.verify import profiled

PROFILED, REPEATS = 5, 4
ALONE = "alone, in a graph"


def kernel_microseconds(work: Callable[[], Any], device: torch.device) -> Sample:
    """Sum of the times of all kernels, copies and fills of a call, by the profiler's device events; the mean of several calls.

    Raises RuntimeError where the profiler tells of none.
    """
    work()
    with profiled(device) as profile:
        for _ in range(PROFILED):
            work()
    total = sum(event.time_range.elapsed_us() for event in profile.events()
                if event.device_type != DeviceType.CPU and not event.is_user_annotation)
    if not total:
        raise RuntimeError("the profiler reports no kernel of this device")
    return Sample.of([total / PROFILED])


def jobs(setting: Setting) -> list[Job]:
    """One for each op and shape."""
    return [Job(f"stages of {op} T={tokens} N={seqs}", partial(measure, setting, op, tokens, seqs))
            for tokens, seqs in setting.shapes_of("stages") for op in PROBLEMS]


def measure(setting: Setting, op: str, tokens: int, seqs: int) -> Iterator[Row]:
    """A row for each launch of a forward and backward, in order, with its launch record; a kernel launched twice has two."""
    problem = setting.problem(op, tokens, seqs)
    key = Key("stages", op, tokens, seqs, BOTH)
    for launch in launches_of(ours(problem, BOTH).eager, setting.device):
        yield Row(key, launch.name, ALONE, time_alone(launch, setting.clock),
                  note=f"{launch.grid} programs; {describe_record(launch.record)}")


def launches_of(work: Callable[[], Any], device: torch.device) -> list[Launch]:
    """The launches of graphlin's kernels in one call, in order."""
    with tapped(device) as tap:
        work()
    return tap.launches


def time_alone(launch: Launch, clock: Clock) -> Sample:
    """Microseconds of one launch among several of the same in a graph."""
    def repeated() -> None:
        for _ in range(REPEATS):
            launch.again()

    sample = clock.on_stream({launch.name: clock.captured(repeated)})[launch.name]
    return Sample(sample.median / REPEATS, sample.low / REPEATS, sample.high / REPEATS, sample.count)


def describe_record(record: LaunchRecord) -> str:
    """A launch record in one line: `BK=64 BV=32, 4 warps, 2 stages, 4 waves`."""
    tiles = " ".join(f"{name}={value}" for name, value in record.tiles.items())
    return f"{tiles + ', ' if tiles else ''}{record.num_warps} warps, {record.num_stages} stages, {record.waves} waves"


SECTIONS = {"stages": jobs}
