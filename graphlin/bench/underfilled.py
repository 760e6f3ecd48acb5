"""Does cost follow the work? A nearly empty tier against a capture of just the active rows."""

from collections.abc import Iterator
from functools import partial

from graphlin.bench.clock import Work
from graphlin.bench.peers import Peer, contender, describe, ours
from graphlin.bench.problems import PROBLEMS, Problem, random_cuts
from graphlin.bench.results import DIRECTIONS, EXACT, OURS, UNDERFILLED, Key, Row
from graphlin.bench.setting import Job, Setting


def jobs(setting: Setting) -> list[Job]:
    """One for each op."""
    return [Job(f"under-filled tier, {op}", partial(measure, setting, op)) for op in PROBLEMS]


def measure(setting: Setting, op: str) -> Iterator[Row]:
    """Replays of an op on the active rows alone, and on as many rows and sequences as the tier has."""
    (tokens, seqs), (tier_tokens, tier_seqs) = setting.scale.underfilled
    cuts = [random_cuts(tokens, seqs, setting.device, entries) for entries in (None, tier_seqs + 1)]
    problems = {measured: PROBLEMS[op](rows, cu, setting.scale.sizes)
                for measured, rows, cu in zip((EXACT, UNDERFILLED), (tokens, tier_tokens), cuts, strict=True)}
    for direction in DIRECTIONS:
        key = Key("underfilled", f"{op} in {tier_tokens}, {tier_seqs}", tokens, seqs, direction)
        works = {}
        for peer in (None, *(peer for peer in setting.peers if op in peer.tiered)):
            name = OURS if peer is None else peer.name
            for measured, problem in problems.items():
                try:
                    works[name, measured] = setting.clock.captured(_work(peer, problem, direction, tokens))
                except Exception as error:
                    yield Row(key, name, measured, error=describe(error))
        for (name, measured), sample in setting.clock.on_stream(works).items():
            yield Row(key, name, measured, sample)


def _work(peer: Peer | None, problem: Problem, direction: str, active: int) -> Work:
    own = ours(problem, direction)
    return own.graphed if peer is None else contender(peer, problem, direction, own.eager(), active=active).graphed


SECTIONS = {"underfilled": jobs}
