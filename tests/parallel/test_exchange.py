"""Ranks that disagree, fail, stay away or can't capture give an error on every rank, and none waits for ever."""

import time
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

import graphlin
from graphlin.errors import ExchangeFailed, UnsupportedModule
from graphlin.parallel import context_parallel
from tests.blocks import Mixer, captured, pack
from tests.ops.op_cases import OP_CASES, OpCase
from tests.parallel.layouts import TWO, own_part, run_part
from tests.parallel.world import assert_fine, run_world

CONV, _, GDN, *_, KDA = OP_CASES
LAYOUT = TWO[0]
FEW = torch.tensor([0, 5, 12]), torch.tensor([0, 8, 12])


def told_by(error: type[BaseException], call: Callable, *words: str) -> None:
    with pytest.raises(error) as raised:
        call()
    for word in words:
        assert word in str(raised.value)


def other_shapes(rank: int, device: torch.device) -> None:
    x, weight = torch.zeros(1, 6 + rank, 4 + 4 * rank, device=device), torch.zeros(4 + 4 * rank, 3, device=device)
    cp = context_parallel(None, *FEW)
    told_by(ValueError, lambda: graphlin.causal_conv1d(x, weight, cp_context=cp), "cp_context",
            "rank 0: rows of a convolution [3, 4] torch.float32", "rank 1: rows of a convolution [3, 8] torch.float32")


def other_dtypes(rank: int, device: torch.device) -> None:
    x = torch.zeros(1, 8, 4, device=device, dtype=(torch.float32, torch.float16)[rank])
    told_by(ValueError, lambda: graphlin.causal_conv1d(x, x[0, :4, :3], cp_context=context_parallel(None, *FEW)), "float16")


def other_ops(rank: int, device: torch.device) -> None:
    run_differently((CONV, GDN)[rank], rank, device, "rows of a convolution", "states of head decays")


def other_rules(rank: int, device: torch.device) -> None:
    run_differently((KDA, GDN)[rank], rank, device, "states of channel decays", "states of head decays")


def run_differently(case: OpCase, rank: int, device: torch.device, *words: str) -> None:
    part = own_part(case, LAYOUT, case.draw(sum(LAYOUT.lengths), len(LAYOUT.lengths), device), rank)
    told_by(ValueError, lambda: run_part(case, part, LAYOUT.context(device)), *words)


class Convolution(nn.Module):
    """A block that builds its context inside."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3))

    def forward(self, x, cu_seqlens, token_offsets):
        return graphlin.causal_conv1d(x, self.weight, cp_context=context_parallel(None, cu_seqlens, token_offsets))[0]


def capture_over_gloo(rank: int, device: torch.device) -> None:
    block, x = Convolution(), torch.randn(1, 8 - 4 * rank, 4)
    graphed = graphlin.capture(block, graphlin.Tier(tokens=16, seqs=4), group=dist.group.WORLD)
    told_by(UnsupportedModule, lambda: graphed(x, *FEW), "gloo", "nccl")
    assert torch.equal(block(x, *FEW), graphed.block(x, *FEW))
    price = graphlin.price(block, graphlin.Tier(tokens=16, seqs=4), (x, *FEW))
    assert price.total > 0


def ranks_capture_together(rank: int, device: torch.device) -> None:
    graphed = graphlin.capture(Mixer().to(device), graphlin.Tier(tokens=16, seqs=3), num_warmup_iters=2, group=dist.group.WORLD)
    for lengths in ((24,), (5, 3)) if rank else ((5, 3), (5, 3)):
        x, cu = pack(lengths, device)
        graphed(x, cu).sum().backward()
    assert graphed.stats.captures == 1 and graphed.stats.replays == 1
    assert graphed.stats.eager == ({"TierOverflow": 1} if rank else {"RanksDiffer": 1})
    x, cu = pack((24,) if rank else (4, 4), device)        # of a captured mode each rank decides alone
    graphed(x, cu).sum().backward()
    replays, eager = (1, {"TierOverflow": 2}) if rank else (2, {"RanksDiffer": 1})
    captured(graphed, replays, backwards=replays, **eager)


CHECKS = {check.__name__: check for check in (other_shapes, other_dtypes, other_ops, other_rules, capture_over_gloo,
                                              ranks_capture_together)}


def checks(world: int) -> dict:
    return CHECKS


def only(check: Callable, world: int) -> dict:
    return {check.__name__: check}


@pytest.fixture(scope="module")
def gloo(request) -> torch.device:
    """The device whose tensors gloo exchanges, where its kernels run."""
    if request.config.option.device != "host":
        pytest.skip("kernels of the CPU need Triton's interpreter")
    return torch.device("cpu")


@pytest.fixture(scope="module")
def told(gloo, tmp_path_factory):
    return run_world(2, checks, tmp_path_factory.mktemp("world"), gloo)


@pytest.mark.parametrize("name", CHECKS)
def test_every_rank_is_told(told, name):
    assert_fine(told, name)


def one_fails(rank: int, device: torch.device) -> None:
    """Rank 1 fails before its exchange and lives on; rank 0 is told when the group's time is up."""
    begin, block = time.monotonic(), Convolution()
    if rank == 0:
        told_by(ExchangeFailed, lambda: block(torch.randn(1, 8, 4), *FEW), "rank 0 of 2", "another rank failed")
        assert time.monotonic() - begin < 30
    else:
        told_by(ValueError, lambda: block(torch.randn(1, 4, 5), *FEW), "weight: expected shape [5, W]")
        time.sleep(6)


def one_stays_away(rank: int, device: torch.device) -> None:
    """Rank 1 does not come to the call that rank 0 would capture."""
    if rank == 0:
        graphed = graphlin.capture(Mixer(), graphlin.Tier(tokens=16, seqs=3), num_warmup_iters=2, group=dist.group.WORLD)
        told_by(ExchangeFailed, lambda: graphed(*pack((5, 3), device)), "rank 0 of 2", "whether to capture")
        assert graphed.stats.captures == 0
    else:
        time.sleep(6)


@pytest.mark.parametrize("check", [one_fails, one_stays_away], ids=lambda check: check.__name__)
def test_a_rank_that_the_others_wait_for(check, gloo, tmp_path):
    assert_fine(run_world(2, partial(only, check), tmp_path, gloo, timeout=2), check.__name__)
