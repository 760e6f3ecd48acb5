"""verify() finds what differs, and counts launches by profiler events."""

import pytest
import torch
from torch import nn

from graphlin.capture import capture
from graphlin.errors import TierOverflow
from graphlin.tier import Tier
from graphlin.verify import count_launches, verify
from tests.blocks import Mixer, StateMixer, captured, pack

TIER = Tier(tokens=24, seqs=4)
pytestmark = pytest.mark.raw_memory


class Idle:
    """Stands in for a graph, whose memory it keeps, and does nothing."""

    def __init__(self, graph):
        self.graph = graph

    def replay(self):
        pass


@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
def test_a_good_capture_passes(device, grad):
    graphed = capture(Mixer().to(device), TIER)
    x, cu = pack((5, 3), device, requires_grad=True)
    with torch.set_grad_enabled(grad):
        report = verify(graphed, x, cu)
    assert report.ok and not report.mismatches, str(report)
    wanted = ["x", *(name for name, _ in graphed.block.named_parameters())] if grad else []
    expected = {"output 0", *(f"gradient of {name}" for name in wanted)}
    assert set(report.errors) == expected and max(report.errors.values()) < 1e-5
    assert (report.tokens, report.seqs, report.tier, report.addresses) == (8, 2, TIER, 3)
    captured(graphed, 0)                                       # its runs are no calls
    assert x.grad is None


def test_one_launch_a_direction(device):
    graphed = capture(Mixer().to(device), TIER)
    report = verify(graphed, *pack((5, 3), device, requires_grad=True))
    launches = report.launches
    assert launches["graph", "forward"] == launches["graph", "backward"] == 1
    assert launches["copy in", "forward"] == launches["copy in", "backward"] == 1
    assert launches["eager", "forward"] > 8 and launches["eager", "backward"] > 5
    assert "host launches, graph forward: 1" in str(report) and str(report).startswith("ok: 8 tokens in 2 sequences")


def test_trees_states_dropout_and_buffers(device):
    graphed = capture(StateMixer().to(device), TIER)
    x, cu = pack((5, 0, 3), device)
    state = {"sum": torch.randn(3, 8, device=device, requires_grad=True)}
    assert verify(graphed, x, cu, initial_state=state, output_final_state=True).ok
    block = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).to(device)
    before = [b.clone() for b in block.buffers()]
    assert verify(capture(block, TIER), torch.randn(6, 8, device=device)).ok
    for buffer, old in zip(block.buffers(), before, strict=True):
        assert torch.equal(buffer, old)


@pytest.mark.parametrize("grad", [True, False], ids=["gradient", "output"])
def test_a_graph_of_other_weights_is_caught(device, grad):
    graphed = capture(Mixer().to(device), TIER)
    x, cu = pack((5, 3), device)
    with torch.set_grad_enabled(grad):
        graphed(x, cu)
        forward = graphed.block.forward
        graphed.block.forward = lambda x, cu_seqlens=None: 2 * forward(x, cu_seqlens)
        report = verify(graphed, x, cu)
    assert not report.ok and str(report).startswith("MISMATCH")
    assert "output 0: differs from eager at the tier's shapes" in report.mismatches
    assert any(line.startswith("output 0: relative difference 5.0e-01 from eager") for line in report.mismatches)
    assert grad == any(line.startswith("gradient of leave.weight") for line in report.mismatches)


def test_an_output_that_the_replay_leaves_out_is_caught(device):
    graphed = capture(Mixer().to(device), TIER)
    x, cu = pack((5, 3), device)
    with torch.no_grad():
        graphed(x, cu)
        (pair,), = next(iter(graphed._modes.values())).pairs.values()
        pair.forward = Idle(pair.forward)
        assert not verify(graphed, x, cu).ok


def test_a_call_that_cannot_be_replayed_says_why(device):
    graphed = capture(Mixer().to(device), TIER)
    with pytest.raises(TierOverflow):
        verify(graphed, *pack((25,), device))


def test_launches_are_counted_once(device):
    x = torch.ones(4, 4, device=device)
    assert count_launches(lambda: None, device) == 0
    assert count_launches(lambda: x + 1, device) == 1
    if device.type == "cpu":                                   # views and allocations launch nothing
        assert count_launches(lambda: torch.empty_like(x.T[:1].unsqueeze(0)), device) == 0
        assert count_launches(lambda: torch.nn.functional.linear(x, x, x[0]).add_(1), device) == 2
