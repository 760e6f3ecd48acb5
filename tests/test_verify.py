"""verify() finds what differs, and counts launches by profiler events."""

import json

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
    assert "output 0: differs from eager at the tier's shapes (24 x 4, slot 0)" in report.mismatches
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


def test_what_is_no_captured_block_is_named(device):
    with pytest.raises(TypeError, match="graphed: expected what graphlin.capture returns, found Mixer"):
        verify(Mixer(), *pack((5, 3), device))


def test_every_tier_and_free_slot_is_replayed(device):
    tiers = Tier(16, 4), Tier(24, 4), Tier(40, 6)
    graphed = capture(Mixer().to(device), tiers, slots=3)
    x, cu = pack((5, 3, 9), device, requires_grad=True)
    report = verify(graphed, x, cu)
    assert report.ok and report.tiers == (Tier(40, 6), Tier(24, 4)) and report.tier == Tier(24, 4), str(report)
    assert (report.slots, report.busy) == ((0, 1, 2), 0) and report.launches["graph", "forward"] == 1
    assert "replayed at 40 x 6 and 24 x 4 in slots 0, 1, 2" in str(report)
    waiting = graphed(x, cu)
    report = verify(graphed, *pack((2,), device, requires_grad=True))
    assert report.ok and report.tiers == (Tier(40, 6), Tier(24, 4), Tier(16, 4)) and (report.slots, report.busy) == ((1, 2), 1)
    assert "1 busy slots" in str(report)
    waiting.sum().backward()                                   # whose memory verify left alone
    captured(graphed, 1, backwards=1)


@pytest.mark.parametrize("rung", [0, 1])
def test_one_wrong_tier_of_one_slot_is_named(device, rung):
    graphed = capture(Mixer().to(device), (Tier(16, 4), Tier(24, 4)), slots=2)
    x, cu = pack((5, 3), device, requires_grad=True)
    assert verify(graphed, x, cu).ok
    mode, = graphed._modes.values()
    pairs = list(mode.pairs.values())[1]
    forward = pairs[rung].forward

    class Wrong:
        def replay(self):
            forward.replay()
            pairs[rung].static_outputs[0][0, 3] += 1
    pairs[rung].forward = Wrong()
    report = verify(graphed, x, cu)
    where = ("24 x 4", "16 x 4")[rung]
    assert [line.partition(" (")[0] for line in report.mismatches] == [
        "output 0: differs from eager at the tier's shapes",
        f"output 0: relative difference {report.errors['output 0']:.1e} from eager at the call's shapes, expected at most 1e-04",
        "output 0: what the call is given is not what the graph computed"]
    assert all(line.endswith(f"({where}, slot 1)") for line in report.mismatches)


def test_gradients_of_inactive_rows_count_on_neither_side(device):
    class RowWise(nn.Sequential):
        def forward(self, x, cu_seqlens):
            return super().forward(x)
    graphed = capture(RowWise(nn.Linear(8, 8)).to(device), TIER)
    report = verify(graphed, *pack((5, 3), device, slack=4, poison=0.0, requires_grad=True))
    assert report.ok and report.tokens == 12, str(report)


def test_dropout_is_compared_at_the_tiers_shapes_alone(device):
    graphed = capture(Mixer(dropout=0.5).to(device), TIER)
    x, cu = pack((5, 3), device, requires_grad=True)
    state = torch.get_rng_state()
    report = verify(graphed, x, cu)
    assert report.ok and report.random and not report.errors and "other masks" in str(report), str(report)
    assert torch.equal(torch.get_rng_state(), state)
    graphed.block.dropout.p = 0.25                            # unseen by the graph, which drops half
    assert any("output 0" in line for line in verify(graphed, x, cu).mismatches)
    graphed.eval()
    report = verify(graphed, x, cu)
    assert report.ok and not report.random and len(report.errors) == 5


class Telling(nn.Module):
    """Returns floats, integers, booleans and a constant."""

    def __init__(self):
        super().__init__()
        self.constant = 3

    def forward(self, x, cu_seqlens):
        rows = torch.arange(x.shape[1], device=x.device)
        x = torch.where((rows < cu_seqlens[-1])[None, :, None], x, 0.0)
        return {"sum": x.sum(-1), "most": x.argmax(-1), "positive": x > 0, "wave": torch.fft.fft(x, dim=-1),
                "constant": self.constant}


def test_outputs_of_every_dtype_are_written_anew(device):
    graphed = capture(Telling().to(device), TIER)
    x, cu = pack((5, 3), device)
    with torch.no_grad():
        report = verify(graphed, x, cu)
        assert report.ok and len(report.errors) == 4, str(report)
        mode, = graphed._modes.values()
        pair, = next(iter(mode.pairs.values()))
        pair.forward = Idle(pair.forward)
        wrong = {line.partition(":")[0] for line in verify(graphed, x, cu).mismatches}
        assert wrong == {f"output {i}" for i in range(4)}
    assert verify(capture(Telling().to(device), TIER), x, cu).ok


def test_a_constant_that_eager_returns_otherwise_is_caught(device):
    graphed = capture(Telling().to(device), TIER)
    x, cu = pack((5, 3), device)
    with torch.no_grad():
        graphed(x, cu)
        graphed.block.constant = 4
        assert verify(graphed, x, cu).mismatches == [
            "what is returned beside tensors differs from eager at the tier's shapes (24 x 4, slot 0)"]


def test_a_block_that_moves_its_parameters_is_told(device):
    graphed = capture(Mixer().to(device), TIER)
    x, cu = pack((5, 3), device)
    forward = graphed.block.forward

    def moving(x, cu_seqlens=None):
        y = forward(x, cu_seqlens)
        graphed.block.leave.weight = nn.Parameter(graphed.block.leave.weight.detach().clone())
        return y
    with torch.no_grad():
        graphed(x, cu)
        graphed.block.forward = moving
        assert any("leave.weight was added, replaced or moved" in line for line in verify(graphed, x, cu).mismatches)


def test_a_report_as_json(device):
    graphed = capture(Mixer().to(device), TIER)
    found = json.loads(json.dumps(verify(graphed, *pack((5, 3), device)).as_json()))
    assert found["ok"] and found["tiers"] == [{"tokens": 24, "seqs": 4, "chunk_size": 64}] and found["slots"] == [0]
    assert found["launches"]["graph forward"] == 1 and found["mismatches"] == [] and found["addresses"] == 3


def test_launches_are_counted_once(device):
    x = torch.ones(4, 4, device=device)
    assert count_launches(lambda: None, device) == 0
    assert count_launches(lambda: x + 1, device) == 1
    if device.type == "cpu":                                   # views and allocations launch nothing
        assert count_launches(lambda: torch.empty_like(x.T[:1].unsqueeze(0)), device) == 0
        assert count_launches(lambda: torch.nn.functional.linear(x, x, x[0]).add_(1), device) == 2


def test_a_block_of_constant_shape_is_told_as_such(device):
    graphed = capture(torch.nn.Linear(8, 4).to(device), Tier(24, 4), num_warmup_iters=1)
    report = verify(graphed, torch.randn(2, 5, 8, device=device))
    assert report.ok and not report.varies
    assert str(report).startswith("ok: a call of constant shape, replayed in slot 0\n")
    report.mismatches.append("output 0: differs")
    assert "tokens" not in str(report)
