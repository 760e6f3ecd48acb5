"""Tickets: a call like one before is matched by what that was matched with, and nothing else is."""

import pytest
import torch
from torch import nn

from graphlin.capture import capture
from graphlin.errors import StaleAddress
from graphlin.graphed import GraphedBlock
from graphlin.tier import Tier
from tests.blocks import Mixer, StateMixer, assert_equal, captured, pack

TIERS = [Tier(tokens=16, seqs=3), Tier(tokens=8, seqs=2)]


@pytest.fixture
def looked_up(monkeypatch):
    """The calls that no ticket admitted."""
    calls, look_up = [], GraphedBlock._look_up
    monkeypatch.setattr(GraphedBlock, "_look_up", lambda self, *call: calls.append(call) or look_up(self, *call))
    return calls


class Parts(nn.Module):
    """Reads two tensors of tokens, one of constant shape, and a constant."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x, gate, cu_seqlens, scale, factor=2, name=None):
        y = self.inner(x) * gate * scale * factor
        return torch.where(torch.arange(x.shape[1], device=x.device)[:, None] < cu_seqlens[-1], y, 0.0)


def check(graphed, *args, **kwargs):
    assert_equal([graphed(*args, **kwargs)], [graphed.block(*args, **kwargs)])


@torch.no_grad()
def test_calls_of_any_size_that_are_alike_are_looked_up_once_after_the_capture(device, looked_up):
    graphed = capture(Mixer().to(device), TIERS)
    for lengths in [(5, 3), (5, 3), (2,), (16,), (0, 1), (1, 1, 1), (9, 4)]:
        x, cu = pack(lengths, device)
        check(graphed, x, cu_seqlens=cu)
        captured(graphed, graphed.stats.replays)
    assert graphed.stats.replays == 7 and len(looked_up) == 2


@torch.no_grad()
def test_arguments_in_any_order_find_their_places(device, looked_up):
    graphed = capture(Parts().to(device), TIERS)
    scale = torch.tensor(3.0, device=device)
    for by_place, by_name in [(0, ("x", "gate", "cu_seqlens", "scale")), (0, ("scale", "cu_seqlens", "gate", "x", "factor")),
                              (2, ("scale", "cu_seqlens"))]:
        for lengths in [(5, 3), (2, 4), (7,), (11, 2)]:
            x, cu = pack(lengths, device)
            values = {"x": x, "gate": torch.randn_like(x), "cu_seqlens": cu, "scale": scale, "factor": 2}
            check(graphed, *[*values.values()][:by_place], **{name: values[name] for name in by_name})
    captured(graphed, 12)
    assert len(looked_up) == 4 and graphed.stats.captures == 2


@torch.no_grad()
def test_one_tensor_in_two_places_is_read_in_both(device):
    graphed = capture(Parts().to(device), TIERS)
    scale = torch.ones((), device=device)
    for lengths in [(5, 3), (6,), (2, 2)]:
        x, cu = pack(lengths, device)
        check(graphed, x, x, cu, scale)
        check(graphed, x, torch.randn_like(x), cu, scale)
    captured(graphed, 6)


def changes(device):
    """Calls that differ from the first one in what is part of a key, and what they are to be run in."""
    def call(width=8, tokens=(5, 3), dtype=torch.float32, integer=torch.int32, **rest):
        x, cu = pack(tokens, device, width=width, dtype=dtype)
        return {"x": x, "gate": torch.randn_like(x), "cu_seqlens": cu.to(integer), "scale": torch.tensor(2.0, device=device),
                "factor": 2} | rest
    plain, no_grad, trains = call(), torch.no_grad(), call()
    trains["gate"].requires_grad_()
    return plain, {
        "a constant": (no_grad, call(factor=3)), "an equal constant": (no_grad, call(factor=2.0)),
        "a truth": (no_grad, call(factor=True)), "the grad mode": (torch.enable_grad(), call()),
        "requires_grad": (torch.enable_grad(), trains), "other lengths": (no_grad, call(integer=torch.int64)),
        "a dtype": (no_grad, call(scale=torch.tensor(2, device=device))),
        "a shape": (no_grad, call(scale=torch.tensor([2.0], device=device))),
        "autocast": (torch.autocast(device.type, torch.bfloat16), call()), "inference": (torch.inference_mode(), call())}


@pytest.mark.parametrize("what", ["a constant", "an equal constant", "a truth", "the grad mode", "requires_grad", "other lengths",
                                  "a dtype", "a shape", "autocast", "inference"])
def test_what_is_part_of_a_key_is_looked_up(device, looked_up, what):
    graphed = capture(Parts().to(device), TIERS)
    plain, others = changes(device)
    with torch.no_grad():
        for _ in range(3):
            check(graphed, **plain)
    count = len(looked_up)
    context, other = others[what]
    with context:
        found, wanted = graphed(**other), graphed.block(**other)
        near = {"rtol": 2e-2, "atol": 1e-2} if what == "autocast" else {"rtol": 2e-5, "atol": 2e-6}
        torch.testing.assert_close(found, wanted, **near)
        assert found.requires_grad == wanted.requires_grad and found.dtype == wanted.dtype
    assert len(looked_up) == count + 1
    with torch.no_grad():
        check(graphed, **plain)


@torch.no_grad()
def test_another_dtype_of_autocast_is_looked_up(device, looked_up):
    """The guards know only whether there is autocast."""
    graphed = capture(nn.Linear(8, 8).to(device), TIERS)
    x = torch.randn(4, 8, device=device)
    for dtype in (torch.bfloat16, torch.bfloat16, torch.float16, torch.bfloat16):
        with torch.autocast(device.type, dtype):
            assert graphed(x).dtype == dtype
    captured(graphed, 4)


@torch.no_grad()
def test_flags_of_modules_and_parameters_are_looked_up(device, looked_up):
    graphed = capture(Mixer(dropout=0.5).to(device).eval(), TIERS)
    x, cu = pack((5, 3), device)
    for _ in range(2):
        check(graphed, x, cu)
    graphed.train()
    assert not torch.equal(graphed(x, cu), graphed(x, cu)) and graphed.stats.captures == 4
    graphed.eval()
    check(graphed, x, cu)
    with torch.enable_grad():
        for flag in (True, True, False):
            graphed.block.enter.bias.requires_grad_(flag)
            graphed(x, cu).sum().backward()
            assert (graphed.block.enter.bias.grad is not None) == flag
            graphed.zero_grad(set_to_none=True)


@torch.no_grad()
def test_tensors_of_other_sizes_than_the_first_are_refused(device):
    graphed = capture(Parts().to(device), TIERS, fallback="eager")
    scale = torch.ones((), device=device)
    x, cu = pack((5, 3), device)
    for _ in range(3):
        check(graphed, x, torch.randn_like(x), cu, scale)
    check(graphed, x, torch.randn(1, 1, 8, device=device), cu, scale)
    captured(graphed, 3, StructureMismatch=1)


@torch.no_grad()
@pytest.mark.parametrize("lengths, reason", [((17,), "TierOverflow"), ((1, 1, 1, 1), "TierOverflow"), ((9,), "TierUnderflow")])
def test_sizes_that_no_tier_takes_run_eagerly(device, lengths, reason):
    graphed = capture(Mixer().to(device), TIERS, max_padding=0.3)
    for some in [(5, 3), (6,), lengths]:
        check(graphed, *pack(some, device))
    captured(graphed, 2, **{reason: 1})


@torch.no_grad()
def test_a_stale_block_is_noticed(device, looked_up):
    graphed = capture(Mixer().to(device), TIERS, fallback="raise")
    x, cu = pack((5, 3), device)
    for _ in range(3):
        graphed(x, cu)
    count = len(looked_up)
    graphed.block.enter.weight = nn.Parameter(graphed.block.enter.weight.clone())
    with pytest.raises(StaleAddress, match="enter.weight was added, replaced or moved"):
        graphed(x, cu)
    assert len(looked_up) == count                               # it was the ticket that admitted the call
    graphed.refresh()
    check(graphed, x, cu)
    assert graphed.stats.captures == 4


@torch.no_grad()
def test_a_reset_ends_tickets(device):
    graphed = capture(Mixer().to(device), TIERS)
    x, cu = pack((5, 3), device)
    for _ in range(2):
        check(graphed, x, cu)
        check(graphed, x, cu)
        graphed.reset()
    captured(graphed, 4)
    assert graphed.stats.captures == 4


@torch.no_grad()
def test_containers_are_looked_up_each_time(device, looked_up):
    graphed = capture(StateMixer().to(device), TIERS)
    x, cu = pack((5, 3), device)
    state = {"sum": torch.randn(2, 8, device=device)}
    for _ in range(3):
        check(graphed, x, cu, state)
        state["sum"] = torch.randn(2, 8, device=device)
    check(graphed, x, cu, None)
    captured(graphed, 4)
    assert len(looked_up) == 4
