"""Small blocks to capture, and the calls and comparisons that the capture tests share."""

from time import monotonic, sleep

import torch
from torch import nn
from torch.nn import functional as F

from graphlin.graphed import GraphedBlock


class Mixer(nn.Module):
    """Linear, causal mean over each packed sequence, linear; inactive rows are zeroed on entry, as in graphlin.layers."""

    def __init__(self, width: int = 8, dropout: float = 0.0) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(width, width), nn.Linear(width, width, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, cu_seqlens=None):
        if cu_seqlens is None:
            ends = torch.arange(x.shape[0] + 1, device=x.device) * x.shape[1]
            return self.forward(x.reshape(1, -1, x.shape[2]), ends).reshape(x.shape)
        rows = torch.arange(x.shape[1], device=x.device)
        active = rows < cu_seqlens[-1]
        x = torch.where(active[None, :, None], x, 0.0)
        sequence = torch.searchsorted(cu_seqlens, rows.to(cu_seqlens.dtype), right=True)
        sees = (sequence[:, None] == sequence) & (rows[:, None] >= rows) & active
        weights = sees.to(x.dtype) / sees.sum(1, keepdim=True).clamp(min=1)
        return self.leave(self.dropout(weights.to(x.dtype) @ self.enter(x).tanh()))


class StateMixer(nn.Module):
    """Adds each sequence's initial state to its rows and returns new states, one for each sequence, in a tree."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.enter = nn.Linear(width, width)

    def forward(self, x, cu_seqlens, initial_state=None, output_final_state=False):
        rows = torch.arange(x.shape[1], device=x.device)
        active = (rows < cu_seqlens[-1])[None, :, None]
        seqs = cu_seqlens.shape[0] - 1
        sequence = (torch.searchsorted(cu_seqlens, rows.to(cu_seqlens.dtype), right=True) - 1).clamp(max=seqs - 1)
        member = ((sequence == torch.arange(seqs, device=x.device)[:, None]) & active[0, :, 0]).to(x.dtype)
        h = torch.where(active, self.enter(torch.where(active, x, 0.0)), 0.0)
        if initial_state is not None:
            h = h + torch.where(active, member.T @ initial_state["sum"], 0.0)
        if not output_final_state:
            return h
        return h, {"sum": member @ h[0], "parts": (member.sum(1),)}


class AtTier(nn.Module):
    """The block run eagerly at a tier's shapes, where it has the bits of a replay; at the call's own without a tier."""

    def __init__(self, block, tier):
        super().__init__()
        self.block, self.tier = block, tier

    def forward(self, x, cu):
        if self.tier is None:
            return self.block(x, cu)
        rows = x.shape[1]
        active = torch.arange(rows, device=x.device)[:, None] < cu[-1]
        padded = F.pad(torch.where(active, x, 0), (0, 0, 0, self.tier.tokens - rows))
        return self.block(padded, torch.cat([cu, cu[-1:].expand(self.tier.seqs + 1 - cu.shape[0])]))[:, :rows]


def pack(lengths, device, *, width=8, slack=0, dtype=torch.float32, poison=float("nan"), requires_grad=False):
    """x `[1, T, width]` with `slack` poisoned inactive rows, and its cu_seqlens."""
    cu = torch.tensor([0, *lengths], device=device, dtype=torch.int32).cumsum(0, dtype=torch.int32)
    x = torch.randn(1, sum(lengths) + slack, width).to(device, dtype)
    x[:, sum(lengths):] = poison
    return x.requires_grad_(requires_grad), cu


def gradients(block, x, cu, weight):
    """Output and gradients of (block(x) * weight).sum() with respect to x and the parameters, not accumulated."""
    y = block(x, cu)
    inner = block.block if isinstance(block, GraphedBlock) else block
    wanted = [*([x] if x.requires_grad else []), *inner.parameters()]
    return [y.detach(), *torch.autograd.grad((y * weight).sum(), wanted)]


def assert_equal(found, expected):
    """Equality up to the last bits, which differ where a matrix product met another number of rows."""
    for i, (f, e) in enumerate(zip(found, expected, strict=True)):
        torch.testing.assert_close(f, e, rtol=2e-5, atol=2e-6, msg=lambda m, i=i: f"result {i}: {m}")


def captured(graphed, replays, *, backwards=None, **eager):
    """Asserts how the calls of a graphed block ran, so that an always-eager one can't pass."""
    stats = graphed.stats
    assert (stats.replays, dict(stats.eager)) == (replays, eager), stats
    if backwards is not None:
        assert stats.backward_replays == backwards, stats


def until_slots_are_free(graphed):
    """Waits for autograd's thread of the device, which lets go of a backward that failed a moment after it raised the error."""
    deadline = monotonic() + 10
    while any(slot.busy for slot in graphed._slots):
        assert monotonic() < deadline, "a slot stays busy"
        sleep(0.001)
