"""What two accelerators must hold: replays bitwise equal to eager calls on the same ranks, and two ranks equal to one."""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

import graphlin
from graphlin.layers import GatedDeltaNet, KimiDeltaAttention
from graphlin.parallel import context_parallel
from tests.tolerances import assert_close_rms

WORLD, TOKENS, SEQS = 2, 512, 8                      # tokens of each rank
# Ends of the sequences, and the cut between the ranks: crossing it, on it, short pieces, one long sequence, none on a rank.
BATCHES = [([1024], 512), ([100, 300, 700, 1024], 512), ([5, 511, 800, 801, 1000], 510), ([512, 513, 514, 900], 512),
           ([3, 300, 301], 300)]


class Rule(nn.Module):
    """A delta rule of the ops over this rank's part of the batch."""

    def __init__(self, op: Callable, **options) -> None:
        super().__init__()
        self.op, self.options = op, options

    def forward(self, q, k, v, g, beta, cu_seqlens, token_offsets):
        cp = context_parallel(None, cu_seqlens, token_offsets)
        return self.op(q, k, v, g, beta, use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True, cp_context=cp,
                       **self.options)[0]


class Convolution(nn.Module):
    """The convolution over this rank's part of the batch."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, 4))

    def forward(self, x, cu_seqlens, token_offsets):
        cp = context_parallel(None, cu_seqlens, token_offsets)
        return graphlin.causal_conv1d(x, self.weight, activation="silu", cp_context=cp)[0]


class Layer(nn.Module):
    """A layer over this rank's part of the batch."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x, cu_seqlens, token_offsets):
        return self.layer(x, cp_context=context_parallel(None, cu_seqlens, token_offsets))


def rule_inputs(device: torch.device, tokens: int, per_channel: bool) -> list[torch.Tensor]:
    """bf16 q to beta of one rank, with log decays in float32."""
    H, HV, K = 2, 4, 128
    q, k = (torch.randn(1, tokens, H, K, device=device, dtype=torch.bfloat16) for _ in range(2))
    v = torch.randn(1, tokens, HV, K, device=device, dtype=torch.bfloat16)
    g = -torch.rand(1, tokens, HV, *([K] if per_channel else []), device=device) * 0.1
    return [q, k, v, g, torch.randn(1, tokens, HV, device=device, dtype=torch.bfloat16)]


def _blocks(device: torch.device) -> dict[str, tuple[nn.Module, Callable[[], list[torch.Tensor]]]]:
    """Each block, and what draws its inputs at the tier's size, where products of matrices have the bits of a replay."""
    def rows(width: int) -> list[torch.Tensor]:
        return [torch.randn(1, TOKENS, width, device=device, dtype=torch.bfloat16)]
    sizes = dict(hidden_size=256, head_dim=64, num_heads=2, num_v_heads=4, expand_v=1)
    return {
        "gdn": (Rule(graphlin.chunk_gated_delta_rule), partial(rule_inputs, device, TOKENS, False)),
        "kda": (Rule(graphlin.chunk_kda), partial(rule_inputs, device, TOKENS, True)),
        "conv": (Convolution(512).to(device, torch.bfloat16), partial(rows, 512)),
        "GatedDeltaNet": (Layer(GatedDeltaNet(**sizes)).to(device, torch.bfloat16), partial(rows, 256)),
        "KimiDeltaAttention": (Layer(KimiDeltaAttention(**sizes)).to(device, torch.bfloat16), partial(rows, 256)),
    }


def _batch(ends: list[int], cut: int, device: torch.device) -> list[torch.Tensor]:
    padded = [0, *ends, *[ends[-1]] * (SEQS - len(ends))]
    return [torch.tensor(values, dtype=torch.int32, device=device) for values in (padded, [0, cut, ends[-1]])]


def _step(block: nn.Module, tensors: list[torch.Tensor], batch: list[torch.Tensor]) -> list[torch.Tensor]:
    leaves = [x.detach().requires_grad_() for x in tensors]
    out = block(*leaves, *batch)
    torch.manual_seed(3)
    return [out.detach(), *torch.autograd.grad(out, [*leaves, *block.parameters()], torch.randn_like(out))]


def replays_equal_eager(name: str, rank: int, device: torch.device) -> None:
    """Five batches through one capture, forward and backward."""
    torch.manual_seed(0)
    block, draw = _blocks(device)[name]
    graphed = graphlin.capture(block, graphlin.Tier(tokens=TOKENS, seqs=SEQS), group=dist.group.WORLD, fallback="raise")
    wrong = []
    for i, (ends, cut) in enumerate(BATCHES):
        torch.manual_seed(10 * i + rank)
        tensors, batch = draw(), _batch(ends, cut, device)
        eager, replayed = _step(block, tensors, batch), _step(graphed, tensors, batch)
        wrong += [f"batch {i}, result {j}: {(a.float() - b.float()).abs().max():.2e} apart"
                  for j, (a, b) in enumerate(zip(eager, replayed, strict=True)) if not torch.equal(a, b)]
        wrong += [f"batch {i}, result {j} is not finite" for j, a in enumerate(replayed) if not a.isfinite().all()]
    replays, backward_replays = graphed.stats.replays, graphed.stats.backward_replays
    graphed.reset()                                  # a communicator waits for graphs that hold its work
    assert not wrong, "; ".join(wrong)
    assert (replays, backward_replays) == (len(BATCHES), len(BATCHES))


def two_ranks_equal_one(name: str, cut: int, ends: list[int], rank: int, device: torch.device) -> None:
    """Outputs and gradients of a long batch on two ranks, and on rank 0 alone."""
    op = {"gdn": graphlin.chunk_gated_delta_rule, "kda": graphlin.chunk_kda}[name]
    torch.manual_seed(0)
    inputs = rule_inputs(device, ends[-1], name == "kda")
    do = torch.randn_like(inputs[2])
    cu, offsets = _batch(ends, cut, device)
    first, last = offsets[rank:rank + 2].tolist()
    found = _gradients(op, [x[:, first:last] for x in inputs], do[:, first:last], cp_context=context_parallel(None, cu, offsets))
    expected = _gradients(op, inputs, do, cu_seqlens=cu)
    for each, a, e in zip(("o", "dq", "dk", "dv", "dg", "dbeta"), found, expected, strict=True):
        assert_close_rms(each, a, e[:, first:last], torch.bfloat16)


def _gradients(op: Callable, inputs: list[torch.Tensor], do: torch.Tensor, **packing) -> list[torch.Tensor]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    o, _ = op(*leaves, use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True, **packing)
    return [o.detach(), *torch.autograd.grad(o, leaves, do.contiguous())]


def checks(world: int) -> dict[str, Callable]:
    """By name, for `tests.parallel.world`."""
    long = 131_072
    return {
        **{f"replays of {name}": partial(replays_equal_eager, name)
           for name in ("gdn", "kda", "conv", "GatedDeltaNet", "KimiDeltaAttention")},
        **{f"{name}, {long} tokens, cut at {cut}": partial(two_ranks_equal_one, name, cut, [long // 8, long])
           for name in ("gdn", "kda") for cut in (long // 2, long // 2 + 13)},
    }
