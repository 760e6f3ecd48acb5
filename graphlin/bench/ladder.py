"""Does tiering pay? Ragged batches through one tier that holds them all, and through a ladder of tiers."""

from collections.abc import Callable, Iterator
from functools import partial

import graphlin
from graphlin.bench.layers import LAYERS, LayerCall, LayerKind
from graphlin.bench.results import BOTH, EAGER, LADDER, ONE_TIER, OURS, Key, Row
from graphlin.bench.setting import Job, Setting


def jobs(setting: Setting) -> list[Job]:
    """One for each kind of layer."""
    return [Job(f"tier ladder, {kind.name}", partial(measure, setting, kind)) for kind in LAYERS]


def measure(setting: Setting, kind: LayerKind) -> Iterator[Row]:
    """Forward and backward of all batches of `ragged_shapes`, one after the other; microseconds for all of them."""
    (tokens, seqs), sizes = setting.scale.ladder, setting.scale.sizes
    layer = kind.build(sizes, setting.device)
    calls = [LayerCall(layer, *shape, sizes, setting.device) for shape in ragged_shapes(tokens, seqs)]
    ladder = graphlin.ladder(tokens, seqs, smallest=tokens // 8)
    blocks = {EAGER: layer, ONE_TIER: graphlin.capture(layer, graphlin.Tier(tokens, seqs), fallback="raise"),
              LADDER: graphlin.capture(layer, ladder, fallback="raise")}
    key = Key("ladder", f"{kind.name}, {len(calls)} ragged batches, {len(ladder)} tiers", tokens, seqs, BOTH)
    works = {measured: _all([call.work(block, BOTH) for call in calls]) for measured, block in blocks.items()}
    for work in works.values():
        work()      # captures
    for measured, sample in setting.clock.on_stream(works).items():
        yield Row(key, OURS, measured, sample)


def ragged_shapes(tokens: int, seqs: int, batches: int = 16) -> list[tuple[int, int]]:
    """Tokens and sequences of batches, spread evenly on a logarithmic scale from an eighth of the largest to it.

    >>> ragged_shapes(4096, 32, batches=4)
    [(512, 4), (1024, 8), (2048, 16), (4096, 32)]
    """
    parts = [8 ** (i / (batches - 1) - 1) for i in range(batches)]
    return [(round(tokens * part), max(1, round(seqs * part))) for part in parts]


def _all(works: list[Callable]) -> Callable[[], None]:
    def run() -> None:
        for work in works:
            work()

    return run


SECTIONS = {"ladder": jobs}
