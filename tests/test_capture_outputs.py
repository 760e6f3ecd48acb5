"""How a call gets its outputs: the graph writes one itself, into memory of the call's own; others are copied, or viewed."""

import pytest
import torch
from torch import nn

from graphlin.capture import capture
from graphlin.errors import ReplayError
from graphlin.tier import Tier
from graphlin.verify import count_launches, verify
from tests.blocks import Mixer, StateMixer, assert_equal, captured, pack

TIER = Tier(tokens=24, seqs=4)
PACKS = [(5, 3), (24,), (1, 0, 7, 2), (0,), (6, 6, 6, 6)]


class Several(nn.Module):
    """Returns a sum over rows, then two tensors of rows: integers, and floats."""

    def forward(self, x, cu_seqlens):
        active = (torch.arange(x.shape[1], device=x.device) < cu_seqlens[-1])[None, :, None]
        x = torch.where(active, x, 0.0)
        return x.sum(1), x.mul(9).int(), {"floats": x + 1}


def only_pair(graphed):
    (pair,), = next(iter(graphed._modes.values())).pairs.values()
    return pair


def delivers(graphed, index):
    """Whether the graphs of all modes, tiers and slots write output `index`, and no other, to the call's memory."""
    return {pair.delivery.index for mode in graphed._modes.values() for pairs in mode.pairs.values() for pair in pairs} == {index}


@pytest.mark.raw_memory                                        # what fills it would be counted
@pytest.mark.parametrize("width, options, launches", [(8, {}, 2), (6, {}, 3), (6, {"copy_outputs": False}, 2)],
                         ids=["delivered", "copied", "viewed"])
@torch.no_grad()
def test_launches_of_a_call(device, width, options, launches):
    graphed = capture(Mixer(width).to(device), TIER, **options)
    calls = [pack(lengths, device, width=width) for lengths in PACKS[:3]]
    for x, cu in calls:
        assert_equal([graphed(x, cu)], [graphed.block(x, cu)])
        copied_by_graph = only_pair(graphed).entry is not None
        assert count_launches(lambda x=x, cu=cu: graphed(x, cu), device) == launches - copied_by_graph
    captured(graphed, 6)


@torch.no_grad()
def test_outputs_that_are_kept_stay_as_they_were(device):
    graphed = capture(Several().to(device), [TIER, Tier(12, 4)], slots=2)
    calls = [pack(lengths, device) for lengths in PACKS * 3]
    kept = [graphed(x, cu) for x, cu in calls]
    assert delivers(graphed, 1)
    for (sums, integers, floats), (x, cu) in zip(kept, calls, strict=True):
        expected = graphed.block(x, cu)
        assert torch.allclose(sums, expected[0], atol=1e-5)
        assert torch.equal(integers, expected[1]) and torch.equal(floats["floats"], expected[2]["floats"])
    captured(graphed, len(calls))


def test_outputs_beside_states_and_of_dense_batches_are_delivered_too(device):
    graphed = capture(StateMixer().to(device), TIER)
    for lengths in PACKS:
        x, cu = pack(lengths, device, requires_grad=True)
        state = {"sum": torch.randn(len(lengths), 8, device=device)}
        y, states = graphed(x, cu, state, output_final_state=True)
        z, others = graphed.block(x, cu, state, output_final_state=True)
        assert_equal([y, states["sum"], *states["parts"]], [z, others["sum"], *others["parts"]])
        del y, states
    assert delivers(graphed, 0)
    captured(graphed, len(PACKS))
    dense = capture(Mixer().to(device), TIER)
    x = torch.randn(3, 5, 8, device=device)
    y = dense(x)
    assert y.shape == x.shape and delivers(dense, 0)
    assert_equal([y], [dense.block(x)])
    captured(dense, 1)


def test_two_forwards_wait_for_their_backwards(device):
    """Each slot has a mailbox of its own, which its modes, with gradients and without, use in turn."""
    graphed = capture(Mixer().to(device), TIER, slots=2)
    calls = [pack(lengths, device, requires_grad=True) for lengths in PACKS[:2]]
    outputs = [graphed(x, cu) for x, cu in calls]
    weights = [torch.randn_like(y) for y in outputs]
    for (x, cu), y, weight in [*zip(calls, outputs, weights, strict=True)][::-1]:
        z = graphed.block(x, cu)
        assert_equal([y, *torch.autograd.grad(y, [x, *graphed.parameters()], weight)],
                     [z, *torch.autograd.grad(z, [x, *graphed.parameters()], weight)])
    for lengths, grad in zip(PACKS, [False, True, False, True, False], strict=True):
        x, cu = pack(lengths, device)
        with torch.set_grad_enabled(grad):
            assert_equal([graphed(x, cu)], [graphed.block(x, cu)])
    assert delivers(graphed, 0)
    captured(graphed, 7, backwards=2)


@torch.no_grad()
def test_views_and_outputs_of_constant_shape_are_not_delivered(device):
    x, cu = pack((5, 3), device)
    viewing, constant = capture(Mixer().to(device), TIER, copy_outputs=False), capture(nn.Linear(8, 8).to(device), TIER)
    viewing(x, cu)
    constant(x)
    assert only_pair(viewing).delivery is None and only_pair(constant).delivery is None


class Undelivered:
    """Stands in for a graph, and takes the address out of the mailbox before a replay."""

    def __init__(self, graph, mailbox):
        self.graph, self.mailbox = graph, mailbox

    def replay(self):
        self.mailbox.zero_()
        self.graph.replay()


@torch.no_grad()
def test_verify_notices_what_was_not_delivered(device):
    graphed = capture(Mixer().to(device), TIER)
    x, cu = pack((5, 3), device)
    assert verify(graphed, x, cu).ok
    pair, (slot,) = only_pair(graphed), graphed._slots
    pair.forward = Undelivered(pair.forward, slot.mailbox)
    report = verify(graphed, x, cu)
    assert report.mismatches == ["output 0: what the call is given is not what the graph computed (24 x 4, slot 0)"]


@torch.no_grad()
@pytest.mark.parametrize("sizes", [(8,), (2, 4), (1, 8)])
def test_outputs_have_eager_strides_in_tiers_of_any_size(device, sizes):
    class Same(nn.Module):
        def forward(self, x, cu_seqlens):
            return x

    graphed = capture(Same().to(device), [TIER, Tier(8, 4), Tier(1, 1)])
    packs = [((5, 3), 8), ((5, 4), 9), ((0, 0), 0), ((1,), 1)]
    for lengths, tokens in packs:
        _, cu = pack(lengths, device)
        x = torch.randn(1, tokens, *sizes, device=device)
        y = graphed(x, cu)
        assert torch.equal(y, x) and y.stride() == x.stride() and y.is_contiguous()
    assert delivers(graphed, 0)
    captured(graphed, len(packs))


def test_gradients_of_inputs_have_eager_strides(device):
    graphed = capture(Mixer().to(device), TIER)
    for lengths in ((1,), (5, 3), (0,)):
        x, cu = pack(lengths, device, requires_grad=True)
        found, = torch.autograd.grad(graphed(x, cu).sum(), x)
        assert found.stride() == x.stride() and found.is_contiguous()
    captured(graphed, 3, backwards=3)


@torch.no_grad()
def test_one_element_of_any_stride(device):
    if device.type == "npu":
        return                                                   # has no numbers of 16 bytes

    class One(nn.Module):
        def forward(self, x, cu_seqlens):
            return x[..., 0]

    graphed = capture(One().to(device), Tier(1, 1))
    x, cu = torch.randn(1, 1, 8, dtype=torch.complex128, device=device), torch.tensor([0, 1], dtype=torch.int32, device=device)
    assert_equal([graphed(x, cu)], [x[..., 0]])
    assert delivers(graphed, 0)
    captured(graphed, 1)


@torch.no_grad()
def test_a_reset_by_another_thread_during_a_call_is_an_error(device, monkeypatch):
    """It used to give memory that nobody had written."""
    graphed = capture(Mixer().to(device), TIER)
    x, cu = pack((5, 3), device)
    graphed(x, cu)
    pair = only_pair(graphed)
    copy_in = pair.copy_in

    def interrupted(*args):
        copy_in(*args)
        graphed.reset()

    monkeypatch.setattr(pair, "copy_in", interrupted)
    monkeypatch.setattr(pair.forward, "replay", lambda: None)
    with pytest.raises(ReplayError, match="reset or refreshed by another thread during this call.*call it again"):
        graphed(x, cu)
    assert_equal([graphed(x, cu)], [graphed.block(x, cu)])


@torch.no_grad()
def test_cu_seqlens_without_an_entry_are_the_blocks_own_to_refuse(device):
    graphed = capture(Mixer().to(device), TIER)
    x, cu = pack((5, 3), device)
    graphed(x, cu)
    with pytest.raises(IndexError):
        graphed(x, cu[:0])
    captured(graphed, 1, StructureMismatch=1)
