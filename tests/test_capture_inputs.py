"""Static input buffers, for a caller that writes its data there and pays no copy; and states carried from call to call."""

import pytest
import torch
from torch import nn

from graphlin.capture import capture
from graphlin.errors import TierOverflow
from graphlin.kernels import copy_rows
from graphlin.layers import GatedDeltaNet, KimiDeltaAttention
from graphlin.tier import Tier
from tests.blocks import Mixer, StateMixer, assert_equal, captured, gradients, pack
from tests.inputs import each_rule, gdn_inputs

TIERS = [Tier(tokens=24, seqs=4), Tier(tokens=8, seqs=2)]


def write(buffers, x, cu):
    """The arguments of a call, written into the static buffers in place."""
    rows, ends = buffers["x"][:, :x.shape[1]], buffers["cu_seqlens"][:cu.shape[0]]
    rows.copy_(x)
    ends.copy_(cu)
    return rows, ends


@torch.no_grad()
def test_data_written_in_place_is_read_in_every_tier(device):
    graphed = capture(Mixer().to(device), TIERS, num_warmup_iters=1)
    buffers = graphed.static_inputs(*pack((3,), device))
    assert {name: tuple(t.shape) for name, t in buffers.items()} == {"x": (1, 24, 8), "cu_seqlens": (5,)}
    captured(graphed, 0)
    for lengths in ((24,), (5, 3), (1, 1, 9), (2,), (6, 6, 6, 6), (0,)):
        x, cu = pack(lengths, device)
        rows, ends = write(buffers, x, cu)
        kept = rows.clone()
        assert_equal([graphed(rows, ends)], [graphed.block(x, cu)])
        assert torch.equal(rows, kept) and torch.equal(ends, cu)
        z, other = pack((4, 1), device)
        assert_equal([graphed(z, other)], [graphed.block(z, other)])   # from elsewhere, between
    captured(graphed, 12)


def test_no_row_is_copied_that_lies_there_already(device, monkeypatch):
    copied = []

    def noting(kernel, grid, y, *fixed, **options):
        launch = prepare(kernel, grid, y, *fixed, **options)

        def noted(tensors, integers):
            copied.append((tensors[0].data_ptr() == y.data_ptr(), integers[2]))    # the first row that is copied
            launch(tensors, integers)
        return noted
    prepare = copy_rows.prepare
    monkeypatch.setattr(copy_rows, "prepare", noting)
    graphed = capture(Mixer().to(device), TIERS, num_warmup_iters=1)
    x, cu = pack((5, 1), device)
    with torch.no_grad():
        rows, ends = write(graphed.static_inputs(x, cu), x, cu)
        copied.clear()
        graphed(rows, ends)
        graphed(x, cu)
    assert copied == [(True, 6), (False, 0)]
    captured(graphed, 2)


@torch.no_grad()
def test_rows_that_a_caller_left_behind_are_zeroed(device):
    class Total(nn.Module):
        def forward(self, x, cu_seqlens):
            return x + x.sum(1, keepdim=True)
    graphed = capture(Total(), TIERS, num_warmup_iters=1)
    x, cu = pack((3,), device)
    buffers = graphed.static_inputs(x, cu)
    for rows in (20, 7, 3):
        buffers["x"].fill_(100.0)                              # past the rows that it passes, too
        cu[-1] = rows
        part, ends = write(buffers, torch.ones(1, rows, 8, device=device), cu)
        assert torch.equal(graphed(part, ends), torch.full((1, rows, 8), 1.0 + rows, device=device))
    buffers["x"].fill_(100.0)
    assert torch.equal(graphed(x, torch.tensor([0, 3], device=device, dtype=torch.int32)), x + x.sum(1, keepdim=True))
    captured(graphed, 4)


def test_data_written_in_place_trains(device):
    graphed = capture(Mixer().to(device), TIERS, slots=2, num_warmup_iters=1)
    x, cu = pack((5, 8), device, requires_grad=True)
    scale = torch.randn(x.shape, device=device)
    expected = gradients(graphed.block, x, cu, scale)
    with torch.no_grad():
        rows, ends = write(graphed.static_inputs(x, cu), x, cu)
    assert_equal(gradients(graphed, rows.requires_grad_(), ends, scale), expected)
    waiting = graphed(x, cu)
    assert_equal(gradients(graphed, rows, ends, scale), expected)      # in the other slot: copied, and right
    del waiting
    captured(graphed, 3, backwards=2)


@torch.no_grad()
def test_states_written_in_place_are_read(device):
    graphed = capture(StateMixer().to(device), TIERS, num_warmup_iters=1)
    x, cu = pack((5, 3, 1), device)
    state = {"sum": torch.randn(3, 8, device=device)}
    buffers = graphed.static_inputs(x, cu, state)
    buffers["initial_state['sum']"].fill_(7.0)
    part = buffers["initial_state['sum']"][:3]
    part.copy_(state["sum"])
    assert_equal([graphed(x, cu, {"sum": part})], [graphed.block(x, cu, state)])
    assert not buffers["initial_state['sum']"][3:].any()
    captured(graphed, 1)


def test_static_inputs_of_a_call_that_cannot_be_replayed(device):
    graphed = capture(Mixer().to(device), TIERS)
    with pytest.raises(TierOverflow):
        graphed.static_inputs(*pack((25,), device))


def halves(x, cu, length):
    """The first and second `length` tokens of sequences of twice that, and their cu_seqlens."""
    parts = x.unflatten(1, (-1, 2, length))
    return parts[:, :, 0].flatten(1, 2), parts[:, :, 1].flatten(1, 2), cu // 2


class Op(nn.Module):
    """The op as a block, whose arguments are its own."""

    def __init__(self, problem):
        super().__init__()
        self.problem = problem

    def forward(self, q, k, v, g, beta, cu_seqlens, initial_state=None, chunk_indices=None):
        options = self.problem.op_options | {"output_final_state": True}
        return self.problem.op(q, k, v, g, beta, initial_state=initial_state, cu_seqlens=cu_seqlens,
                               chunk_indices=chunk_indices, **options)


@pytest.mark.parametrize("length", [16, pytest.param(2048, marks=pytest.mark.device_only)])
@each_rule
@torch.no_grad()
def test_prefill_chunk_by_chunk_has_the_bits_of_one_call(device, rule, length):
    """T = 4096 in one call equals 2 x 2048 with the carried state, replayed in tiers of their own."""
    chunk = 16 if length == 16 else 64
    problem = rule(lengths=(2 * length, 2 * length), states="none", chunk_size=chunk)
    tiers = [Tier(4 * length, 2, chunk), Tier(2 * length, 2, chunk)]
    graphed = capture(Op(problem), tiers, num_warmup_iters=1)
    inputs = gdn_inputs(problem, device)
    cu = inputs.pop("cu_seqlens")
    whole, state = graphed(**inputs, cu_seqlens=cu)
    first, second = ({name: halves(x, cu, length)[i] for name, x in inputs.items()} for i in (0, 1))
    o0, carried = graphed(**first, cu_seqlens=cu // 2)
    o1, final = graphed(**second, cu_seqlens=cu // 2, initial_state=carried)
    found = torch.stack([o.unflatten(1, (2, length)) for o in (o0, o1)], 2).flatten(1, 3)
    assert torch.equal(found, whole) and torch.equal(final, state)
    captured(graphed, 3)


@pytest.mark.parametrize("layer", [GatedDeltaNet, KimiDeltaAttention])
@torch.no_grad()
def test_a_layer_continues_from_convolution_and_delta_states_in_tiers(device, layer):
    """Bit for bit but for the matrix products, whose last bits follow the number of rows."""
    block = layer(hidden_size=16, head_dim=16, num_heads=1, expand_v=1, chunk_size=16).to(device)
    graphed = capture(block, [Tier(32, 2, 16), Tier(16, 1, 16)], num_warmup_iters=1)
    x, cu = pack((32,), device, width=16)
    whole, states = graphed(x, cu, output_final_state=True)
    y0, carried = graphed(x[:, :16], cu // 2, output_final_state=True)
    y1, final = graphed(x[:, 16:], cu // 2, initial_state=carried, output_final_state=True)
    torch.testing.assert_close(torch.cat([y0, y1], 1), whole, rtol=1e-5, atol=1e-6)
    for found, expected in zip(final, states, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    captured(graphed, 3)

