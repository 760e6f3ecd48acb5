"""How a call gets its outputs: the graph writes one itself, into memory of the call's own; others are copied, or viewed."""

import pytest
import torch
from torch import nn

from graphlin.capture import capture
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


@pytest.mark.raw_memory                                        # what fills it would be counted
@pytest.mark.parametrize("width, options, launches", [(8, {}, 2), (6, {}, 3), (6, {"copy_outputs": False}, 2)],
                         ids=["delivered", "copied", "viewed"])
@torch.no_grad()
def test_launches_of_a_call(device, width, options, launches):
    graphed = capture(Mixer(width).to(device), TIER, **options)
    calls = [pack(lengths, device, width=width) for lengths in PACKS[:3]]
    for x, cu in calls:
        assert_equal([graphed(x, cu)], [graphed.block(x, cu)])
        assert count_launches(lambda x=x, cu=cu: graphed(x, cu), device) == launches
    captured(graphed, 6)


@torch.no_grad()
def test_outputs_that_are_kept_stay_as_they_were(device):
    graphed = capture(Several().to(device), [TIER, Tier(12, 4)], slots=2)
    calls = [pack(lengths, device) for lengths in PACKS * 3]
    kept = [graphed(x, cu) for x, cu in calls]
    assert only_pair_delivers(graphed, 1)
    for (sums, integers, floats), (x, cu) in zip(kept, calls, strict=True):
        expected = graphed.block(x, cu)
        assert torch.allclose(sums, expected[0], atol=1e-5)
        assert torch.equal(integers, expected[1]) and torch.equal(floats["floats"], expected[2]["floats"])
    captured(graphed, len(calls))


def only_pair_delivers(graphed, index):
    return {pair.delivery.index for mode in graphed._modes.values() for pairs in mode.pairs.values() for pair in pairs} == {index}


def test_outputs_beside_states_and_of_dense_batches_are_delivered_too(device):
    graphed = capture(StateMixer().to(device), TIER)
    for lengths in PACKS:
        x, cu = pack(lengths, device, requires_grad=True)
        state = {"sum": torch.randn(len(lengths), 8, device=device)}
        y, states = graphed(x, cu, state, output_final_state=True)
        z, others = graphed.block(x, cu, state, output_final_state=True)
        assert_equal([y, states["sum"], *states["parts"]], [z, others["sum"], *others["parts"]])
        del y, states
    assert only_pair_delivers(graphed, 0)
    dense = capture(Mixer().to(device), TIER)
    x = torch.randn(3, 5, 8, device=device)
    y = dense(x)
    assert y.shape == x.shape and only_pair_delivers(dense, 0)
    assert_equal([y], [dense.block(x)])
    captured(dense, 1)


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
