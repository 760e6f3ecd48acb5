"""The ops against peers: eager host time, eager device time, graph replay."""

from collections.abc import Callable, Iterator
from functools import partial

from graphlin.bench.kernel_times import kernel_microseconds
from graphlin.bench.peers import Contestant, contender, describe, ours
from graphlin.bench.problems import PROBLEMS
from graphlin.bench.results import DIRECTIONS, EAGER_DEVICE, EAGER_HOST, REPLAY, Key, Row, Sample
from graphlin.bench.setting import Job, Setting


def jobs(op: str, setting: Setting) -> list[Job]:
    """One for each shape."""
    return [Job(f"{op} T={tokens} N={seqs}", partial(measure, setting, op, tokens, seqs))
            for tokens, seqs in setting.shapes_of(op)]


def measure(setting: Setting, op: str, tokens: int, seqs: int) -> Iterator[Row]:
    """Forward, and forward+backward, of graphlin and of every peer on the same tensors, interleaved."""
    problem = setting.problem(op, tokens, seqs)
    for direction in DIRECTIONS:
        key = Key(op, op, tokens, seqs, direction)
        contestants = [ours(problem, direction)]
        expected = contestants[0].eager()
        for peer in setting.peers:
            try:
                contestants.append(contender(peer, problem, direction, expected))
            except Exception as error:
                yield Row(key, peer.name, REPLAY, error=str(error))
        del expected
        yield from times(setting, key, contestants)


def times(setting: Setting, key: Key, contestants: list[Contestant]) -> Iterator[Row]:
    """The rows of contestants who all do the same work."""
    replays = {}
    for contestant in contestants:
        try:
            replays[contestant.name] = setting.clock.captured(contestant.graphed)
        except Exception as error:
            yield Row(key, contestant.name, REPLAY, error=f"cannot be captured: {describe(error)}")
    for name, sample in setting.clock.on_stream(replays).items():
        yield Row(key, name, REPLAY, sample)
    replays.clear()
    eager = {contestant.name: contestant.eager for contestant in contestants}
    for name, sample in setting.clock.on_host(eager).items():
        yield Row(key, name, EAGER_HOST, sample)
    if setting.clock.on_device and not setting.quick:
        for name, work in eager.items():
            yield attempt(key, name, EAGER_DEVICE, lambda work=work: kernel_microseconds(work, setting.device))


def attempt(key: Key, who: str, measure: str, sample: Callable[[], Sample]) -> Row:
    """A row with what `sample` returns, or with its error."""
    try:
        return Row(key, who, measure, sample())
    except Exception as error:
        return Row(key, who, measure, error=describe(error))


SECTIONS = {op: partial(jobs, op) for op in PROBLEMS}
