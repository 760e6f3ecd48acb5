"""Batches split over ranks: what each rank holds of them, and the comparison with one process that holds all."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from graphlin.ops import reference
from graphlin.ops.causal_conv1d import causal_conv1d
from graphlin.ops.gated_delta_rule import chunk_gated_delta_rule
from graphlin.ops.kda import chunk_kda
from graphlin.parallel import ContextParallel, context_parallel
from tests.inputs import cu_of, in_float64, run
from tests.ops.op_cases import OpCase, Tensors
from tests.tolerances import assert_close_rms

REFERENCES = {causal_conv1d: reference.causal_conv1d_reference, chunk_kda: reference.kda_reference,
              chunk_gated_delta_rule: reference.gated_delta_rule_reference}
SLACK = 3    # rows of NaN after a rank's tokens


@dataclass(frozen=True)
class Layout:
    """Sequences of these lengths, one after another, cut before the tokens of these numbers."""

    name: str
    lengths: tuple[int, ...]
    cuts: tuple[int, ...]
    slack: int = SLACK

    @property
    def world(self) -> int:
        return len(self.cuts) + 1

    @property
    def offsets(self) -> list[int]:
        return [0, *self.cuts, sum(self.lengths)]

    def context(self, device: torch.device, group: dist.ProcessGroup | None = None) -> ContextParallel:
        return context_parallel(group, cu_of(self.lengths, device), torch.tensor(self.offsets, device=device))

    def rank_of(self, token: int) -> int:
        return sum(cut <= token for cut in self.cuts)

    def starts(self) -> list[int]:
        """The rank that holds the first token of each sequence; an empty one lies where its place is."""
        return [self.rank_of(first) for first in cu_of(self.lengths, torch.device("cpu")).tolist()[:-1]]

    def ends(self) -> list[int]:
        cu = cu_of(self.lengths, torch.device("cpu")).tolist()
        return [self.rank_of(max(first, last - 1)) for first, last in zip(cu, cu[1:], strict=False)]

    def __str__(self) -> str:
        return self.name


TWO = [
    Layout("crossing", (10, 21, 5), (20,)),
    Layout("whole", (37,), (17,)),
    Layout("on the edge", (9, 11, 8), (20,)),
    Layout("one token before", (16, 14), (17,)),
    Layout("one token after", (18, 9), (17,)),
    Layout("two tokens before", (15, 14), (17,)),
    Layout("two tokens after", (19, 9), (17,)),
    Layout("W-1 tokens before", (14, 14), (17,)),
    Layout("W-1 tokens after", (20, 9), (17,)),
    Layout("empty ones at the edge", (17, 0, 0, 8), (17,)),
    Layout("empty ones around", (0, 17, 0, 20, 0), (20,)),
    Layout("nothing on the first", (7, 20), (0,)),
    Layout("nothing on the last", (7, 20), (27,), slack=0),
]
THREE = [
    Layout("whole", (50,), (17, 33)),
    Layout("two crossings", (10, 21, 12), (20, 36)),
    Layout("middle of one token", (10, 30, 4), (20, 21)),
    Layout("middle of two tokens", (10, 30, 4), (20, 22)),
    Layout("middle of W-1 tokens", (10, 30, 4), (20, 23)),
    Layout("nothing in the middle", (10, 30, 4), (20, 20), slack=0),
    Layout("nothing on the last two", (20, 10), (30, 30)),
    Layout("a few tokens on each", (2, 5, 0), (3, 4)),
    Layout("a token on each", (3,), (1, 2)),
    Layout("others in the middle", (20, 8, 20), (17, 30)),
    Layout("an edge in the middle", (20, 8, 20), (20, 31)),
]


def own_part(case: OpCase, layout: Layout, drawn: Mapping[str, torch.Tensor], rank: int) -> Tensors:
    """What a rank passes to the op: its tokens with slack after them, and all states and parameters."""
    first, last = layout.offsets[rank:rank + 2]
    part = dict(drawn)
    for name, x in drawn.items():
        if case.by_token(name):
            part[name] = torch.full_like(x[:, :1], float("nan")).repeat(1, last - first + layout.slack, *[1] * (x.dim() - 2))
            part[name][:, :last - first] = x[:, first:last]
    return part


def run_part(case: OpCase, part: Tensors, cp: ContextParallel, **options) -> Tensors:
    """Forward and backward on a rank."""
    inputs = {name: x for name, x in part.items() if name not in ("do", "dht")}
    return run(case.op, inputs, {"o": part["do"], "ht": part["dht"]}, cp_context=cp, output_final_state=True, **case.options,
               **options)


def expected_results(case: OpCase, layout: Layout, drawn: Tensors) -> Tensors:
    """Those of one process, token by token in float64."""
    options = {name: value for name, value in case.options.items() if name not in ("chunk_size", "safe_gate")}
    inputs = in_float64({name: x for name, x in drawn.items() if name not in ("do", "dht")})
    return run(REFERENCES[case.op], {**inputs, "cu_seqlens": cu_of(layout.lengths, drawn["do"].device)},
               {"o": drawn["do"].double(), "ht": drawn["dht"].double()}, output_final_state=True, **options)


def check_part(case: OpCase, layout: Layout, results: Tensors, expected: Tensors, rank: int) -> None:
    """Asserts that a rank's results are its part of those of one process; sums over all ranks are those of parameters."""
    first, last = layout.offsets[rank:rank + 2]
    summed = {name: x.double() for name, x in results.items() if not case.by_token(name) and not case.by_sequence(name)}
    for x in summed.values():
        dist.all_reduce(x)
    for name, x in (results | summed).items():
        e = expected[name]
        if case.by_token(name):
            assert not x[:, last - first:].any(), f"{name} is not 0 in inactive rows"
            x, e = x[:, :last - first], e[:, first:last]
        elif case.by_sequence(name):
            held_by = layout.ends() if name == "ht" else layout.starts()
            mine = torch.tensor([holder == rank for holder in held_by], device=x.device)
            assert not x[~mine].any(), f"{name} is not 0 for sequences of other ranks"
            x, e = x[mine], e[mine]
        assert_close_rms(name, x, e, torch.float32)
