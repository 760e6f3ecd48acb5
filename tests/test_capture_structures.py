"""Calls of another structure than the one that was captured first, and structures of every kind."""

from collections import namedtuple

import pytest
import torch
from torch import nn

from graphlin.capture import capture
from graphlin.errors import StructureMismatch
from graphlin.layers import GatedDeltaNet
from graphlin.tier import Tier
from tests.blocks import Mixer, captured, pack

pytestmark = pytest.mark.raw_memory


def test_states_may_come_after_a_capture_without_them(device):
    """Warmed up and captured on a sample without an initial state; a call with one is eager, and the capture still works."""
    layer = GatedDeltaNet(hidden_size=16, head_dim=16, num_heads=1, expand_v=1, chunk_size=16).to(device)
    x, cu = pack((9, 7), device, width=16)
    with torch.no_grad():
        graphed = capture(layer, Tier(tokens=16, seqs=2, chunk_size=16), (x, cu), num_warmup_iters=1)
        plain, (_, states) = layer(x, cu), layer(x, cu, output_final_state=True)
        expected, expected_states = layer(x, cu, initial_state=states, output_final_state=True)
        found, found_states = graphed(x, cu, initial_state=states, output_final_state=True)
        assert torch.equal(found, expected)
        for ours, theirs in zip(found_states, expected_states, strict=True):
            assert torch.equal(ours, theirs)
        assert torch.equal(graphed(x, cu), plain)
    captured(graphed, 1, StructureMismatch=1)


Pair = namedtuple("Pair", "left right")


class Trees(nn.Module):
    """Takes and returns tensors in lists, tuples, dicts and named tuples."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8))

    def forward(self, x, cu_seqlens, *, more, flags=("a", None), **rest):
        (y, z), bias = more["rows"], rest["bias"]
        return Pair({"sum": [x * self.weight + y, z.left - bias[0]]}, (x * z.right, flags))


def test_arguments_in_trees_and_by_keyword_are_replayed_with_their_gradients(device):
    graphed = capture(Trees().to(device), Tier(24, 4), num_warmup_iters=1)
    for lengths in ((5, 3), (24,), (1, 0, 7)):
        x, cu = pack(lengths, device, requires_grad=True)
        y, left, right = (torch.randn_like(x).requires_grad_() for _ in range(3))
        bias = torch.randn(8, device=device, requires_grad=True)
        kwargs = {"bias": [bias], "more": {"rows": [y, Pair(left, right)]}}
        wanted, results = [x, y, left, right, bias, graphed.block.weight], []
        for block in (graphed, graphed.block):
            out = block(x, cu, **kwargs)
            assert type(out) is Pair and out.right[1] == ("a", None)
            outs = [*out.left["sum"], out.right[0]]
            results.append([*outs, *torch.autograd.grad(sum(i * out.sum() for i, out in enumerate(outs, 1)), wanted)])
        assert [t.shape for t in results[0]] == [t.shape for t in results[1]]
        for found, expected in zip(*results, strict=True):
            torch.testing.assert_close(found, expected)
    captured(graphed, 3, backwards=3)
    assert graphed.stats.captures == 1


@torch.no_grad()
def test_one_call_written_in_several_ways_is_one_mode(device):
    graphed = capture(Mixer().to(device), Tier(24, 4), num_warmup_iters=1)
    x, cu = pack((5, 3), device)
    expected = graphed(x, cu)
    for found in (graphed(x, cu_seqlens=cu), graphed(cu_seqlens=cu, x=x)):
        assert torch.equal(found, expected)
    captured(graphed, 3)
    assert graphed.stats.captures == 1


class Scale(nn.Module):
    def forward(self, x, cu_seqlens, factor=1, table=None):
        return x * factor if table is None else x * table[0, 0]


@torch.no_grad()
def test_a_call_of_another_structure_says_what_differs_and_what_to_do(device):
    x, cu = pack((5, 3), device)
    sampled = capture(Scale(), Tier(24, 4), (x, cu), fallback="raise", num_warmup_iters=1)
    with pytest.raises(StructureMismatch, match="differs from the captured sample in structure, .* a constant, .*"
                                                "capture without a sample takes each mode at its first call"):
        sampled(x, cu, 2)
    captured(sampled, 0)
    graphed = capture(Scale(), Tier(24, 4), fallback="raise", num_warmup_iters=1)
    for factor in range(16):
        assert torch.equal(graphed(x, cu, factor), x * factor)
    with pytest.raises(StructureMismatch, match="16 modes are captured already; an argument that changes at each call should be "
                                                "a tensor"):
        graphed(x, cu, 16)
    captured(graphed, 16)
    shaped = capture(Scale(), Tier(24, 4), fallback="raise", num_warmup_iters=1)
    table = torch.full((2, 3), 5.0, device=device)
    assert torch.equal(shaped(x, cu, table=table), 5 * x)
    with pytest.raises(StructureMismatch, match=r"table: expected shape \[2, 3\] as captured, found \[3, 3\]; other shapes run "
                                                "eagerly, or need their own capture"):
        shaped(x, cu, table=torch.ones(3, 3, device=device))
    captured(shaped, 1)


def test_a_call_without_any_tensor_is_named():
    with pytest.raises(ValueError, match="expected a block with parameters, or a tensor among its arguments; found neither"):
        capture(Scale(), Tier(24, 4))(1, None)
