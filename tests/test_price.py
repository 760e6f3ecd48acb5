"""What a capture is said to hold, before it is made, is what it holds."""

import sys
from dataclasses import replace

import pytest
import torch
from torch import nn

from graphlin.backends import get_backend
from graphlin.capture import capture
from graphlin.errors import HostSync, Resource, UnsupportedModule
from graphlin.layers import GatedDeltaNet, KimiDeltaAttention
from graphlin.price import check_budget, price
from graphlin.tier import Tier
from tests.blocks import Mixer, StateMixer, captured, pack

pytestmark = pytest.mark.raw_memory
TIER = Tier(tokens=24, seqs=4)
MIB = 1 << 20
MAILBOX = 16  # of a slot


class Cast(nn.Module):
    """Keeps a tensor beside its parameters and buffers, casts, drops, and returns what is no tensor too."""

    def __init__(self):
        super().__init__()
        self.enter, self.norm = nn.Linear(8, 16), nn.BatchNorm1d(16)
        self.scale = torch.full((16,), 0.5)

    def _apply(self, fn, recurse=True):
        self.scale = fn(self.scale)
        return super()._apply(fn, recurse)

    def forward(self, x, cu_seqlens=None):
        h = torch.dropout(self.enter(x).relu() * self.scale, 0.5, True)
        return self.norm(h[0]).half()[None], {"rows": x.shape[1] > 3, "last": x[0, :, 0].long()}


BLOCKS = {
    "mixer": (Mixer, {}), "states": (StateMixer, {"output_final_state": True}), "cast": (Cast, {}),
    "gdn": (lambda: GatedDeltaNet(8, head_dim=16, num_heads=2, expand_v=1), {}),
    "kda": (lambda: KimiDeltaAttention(8, head_dim=16, num_heads=1), {"output_final_state": True}),
}


def close(priced: int, held: int) -> bool:
    """The bound that the price must keep: 10% or 40 MB, whichever is larger."""
    return abs(priced - held) <= max(held // 10, 40_000_000)


def exact(device, priced: int, held: int) -> bool:
    return priced == held if device.type == "cpu" else close(priced, held)


@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
@pytest.mark.parametrize("name", BLOCKS)
def test_the_price_is_what_the_capture_holds(device, name, grad):
    make, kwargs = BLOCKS[name]
    block = make().to(device)
    x, cu = pack((5, 3), device, requires_grad=True)
    with torch.set_grad_enabled(grad):
        found = price(block, TIER, (x, cu), kwargs)
        graphed = capture(block, TIER, (x, cu), kwargs)
    slot, = graphed._slots
    assert found.static == slot.static_bytes() > 0
    assert exact(device, found.pool, graphed.held_bytes() - slot.static_bytes()) and found.pool > 0
    assert found.total == found.per_slot == found.static + found.pool == sum(tier.total for tier in found.tiers)
    assert graphed.price == found


def test_the_parts_of_a_price(device):
    block = nn.Sequential(nn.Linear(8, 16, bias=False), nn.Tanh(), nn.Linear(16, 4, bias=False)).to(device)
    found, = price(block, TIER, (torch.zeros(1, 6, 8, requires_grad=True),)).tiers
    rows = 6
    assert found.tier == TIER and found.static == found.inputs == 4 * rows * (8 + 4)         # x, and the gradient of the output
    assert found.outputs == 4 * rows * 4
    assert found.gradients == 4 * (rows * 8 + 8 * 16 + 16 * 4)
    assert 4 * rows * 16 <= found.intermediates <= found.pool                          # what tanh returned, and more backward


def test_autocast_is_priced(device):
    block, x = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 8)).to(device), torch.randn(6, 8, device=device)
    with torch.autocast(device.type, torch.bfloat16):
        found = price(block, TIER, (x,))
        graphed = capture(block, TIER, (x,))
        assert exact(device, found.total, graphed.held_bytes())
    assert graphed.price == found                                                            # the mode is the sample's
    assert price(block, TIER, (x,)) != found


@pytest.mark.parametrize("grad", [True, False])
def test_every_graph_counts(device, grad, monkeypatch):
    backend, begun = get_backend(device), []
    capture_of_device = backend.capture
    monkeypatch.setattr(backend, "capture", lambda **options: begun.append(options) or capture_of_device(**options))
    block, (x, cu) = Mixer().to(device), pack((5, 3), device)
    with torch.set_grad_enabled(grad):
        found = price(block, [TIER, Tier(8, 2)], (x, cu))
        assert not begun
        capture(block, [TIER, Tier(8, 2)])(x, cu)
    assert found.graphs == found.as_json()["graphs"] == len(begun) == (4 if grad else 2) == replace(found, slots=2).graphs / 2
    assert f"in {found.graphs} graphs" in str(found)


def test_every_mode_and_slot_counts(device):
    block = Mixer(dropout=0.5).to(device)
    x, cu = pack((5, 3), device)
    graphed = capture(block, TIER, slots=2)
    assert graphed.price.total == 0 and graphed.price.tiers == ()
    graphed(x, cu).sum().backward()
    one = graphed.price
    assert one.slots == 2 and one.total == 2 * one.per_slot == 2 * price(block, TIER, (x, cu)).total
    graphed.eval()(x, cu).sum().backward()
    assert len(graphed.price.tiers) == 2 * len(one.tiers)
    assert exact(device, graphed.price.total, graphed.held_bytes())
    captured(graphed, 2, backwards=2)


LADDER = (Tier(12, 4), Tier(24, 4), Tier(48, 6))


@pytest.mark.parametrize("copy_outputs", [True, False])
def test_a_ladder_is_priced_tier_by_tier(device, copy_outputs):
    block, (x, cu) = Mixer().to(device), pack((5, 3), device, requires_grad=True)
    graphed = capture(block, LADDER, (x, cu), copy_outputs=copy_outputs)
    found = graphed.price
    assert [tier.tier for tier in found.tiers] == [Tier(48, 6), Tier(24, 4), Tier(12, 4)]
    assert [tier.static for tier in found.tiers] == [held.static_bytes for held in graphed.memory()]
    assert all(exact(device, tier.pool, held.pool_bytes) for tier, held in zip(found.tiers, graphed.memory(), strict=True))
    assert [tier.inputs for tier in found.tiers] == [4 * (2 * 8 * rows + seqs + 1) for rows, seqs in ((48, 6), (24, 4), (12, 4))]
    assert found.static == found.tiers[0].inputs + MAILBOX                                     # which the others share
    if copy_outputs:
        assert found == price(block, LADDER, (x, cu))


def test_smaller_tiers_of_a_layer_add_next_to_nothing():
    with torch.device("meta"):
        layer = GatedDeltaNet(2048, head_dim=128, num_heads=16, num_v_heads=32, expand_v=1).to(torch.bfloat16)
    found = price(layer, (Tier(512, 8), Tier(4096, 32), Tier(8192, 64)))
    assert found.tiers[0] == price(layer, Tier(8192, 64)).tiers[0]
    assert sum(tier.total for tier in found.tiers[1:]) <= 40 * MIB
    assert [tier.outputs for tier in found.tiers] == [2 * 2048 * rows for rows in (8192, 4096, 512)]


def test_inference_mode_compiled_blocks_and_blocks_without_parameters(device):
    block, x = nn.Sequential(nn.Linear(8, 16), nn.Tanh()).to(device), torch.ones(4, 8, device=device)
    with torch.no_grad():
        plain = price(block, TIER, (x,))
    with torch.inference_mode():
        assert price(block, TIER, (x,)) == plain
        block.compile(backend="eager")
        assert price(block, TIER, (x,)) == plain
    found = price(nn.Tanh(), TIER, (x,))
    assert found.static == x.nbytes and found.tiers[0].outputs == x.nbytes and found.tiers[0].gradients == 0


def test_every_slot_holds_the_same(device):
    """A slot whose stream had met no matrix product would have cuBLAS's workspace in its pool."""
    graphed = capture(nn.Linear(64, 64).to(device), TIER, (torch.ones(4, 64, device=device),), slots=3)
    held = graphed.memory()
    assert [h.slot for h in held] == [0, 1, 2] and len({(h.pool_bytes, h.static_bytes) for h in held}) == 1
    assert exact(device, graphed.price.total, graphed.held_bytes())


def test_pricing_leaves_the_block_as_it_was(device):
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.cache = nn.Linear(8, 8), None
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            if self.cache is None:
                self.cache = x.new_ones(8)
            self.calls += 1
            return self.linear(x) * self.cache * torch.rand_like(x)
    block = Counting().to(device).eval()
    before = {name: (t, t._version) for name, t in [*block.named_parameters(), *block.named_buffers()]}
    random = torch.get_rng_state()
    x = torch.ones(4, 8, device=device)
    found = price(block, TIER, (x,))
    assert found.total > 0 and price(block, TIER, (x,)) == found
    assert block.cache is None and block.calls == 0 and not block.training
    assert {name: (t, t._version) for name, t in [*block.named_parameters(), *block.named_buffers()]} == before
    assert torch.equal(torch.get_rng_state(), random) and torch.is_autocast_cache_enabled()
    assert torch.is_grad_enabled() and not isinstance(torch.ones(1, device=device) + 1, torch._subclasses.FakeTensor)


def test_a_layer_without_memory_is_priced_by_its_own_width():
    with torch.device("meta"):
        layer = GatedDeltaNet(hidden_size=2048, head_dim=128, num_heads=16, expand_v=1).to(torch.bfloat16)
    found, = price(layer, Tier(8192, 64)).tiers
    assert found.inputs == 2 * 8192 * 2048 * 2 + 65 * 4 and found.outputs == 8192 * 2048 * 2
    assert found.gradients == found.outputs + sum(2 * p.numel() for p in layer.parameters())
    assert found.pool > found.outputs + found.gradients and found.pool % (2 * MIB) == 0
    with torch.no_grad():
        assert price(layer, Tier(8192, 64)).total < found.total // 2
    x, cu = torch.empty(1, 9, 2048, dtype=torch.bfloat16, requires_grad=True), torch.empty(4, dtype=torch.int32)
    assert price(layer, Tier(8192, 64), (x,), {"cu_seqlens": cu}).tiers == (found,)         # whatever device the sample is on


def test_a_call_must_be_told_where_it_can_not_be_guessed(device):
    with pytest.raises(ValueError, match="sample_args: expected a call.*no hidden_size"):
        price(Mixer().to(device), TIER)
    with pytest.raises(TypeError, match="tier: expected a graphlin.Tier"):
        price(Mixer().to(device), 24)


class Reading(nn.Module):
    def __init__(self, read):
        super().__init__()
        self.read, self.weight = read, nn.Parameter(torch.ones(8))

    def forward(self, x):
        self.read(x)
        return x * self.weight


@pytest.mark.parametrize(("read", "error", "message"), [
    (lambda x: x.sum().item(), HostSync, "reads a tensor's value on the host at .*test_price.py"),
    (lambda x: x[x > 0], HostSync, "reads a tensor's value on the host at .*test_price.py"),
    (lambda x: x.data_ptr(), UnsupportedModule, "can't be priced: at .*test_price.py.*register_fake"),
])
def test_a_block_that_needs_values_is_told_where(device, read, error, message):
    block = Reading(read).to(device)
    with pytest.raises(error, match=message):
        price(block, TIER, (torch.ones(4, 8, device=device),))
    assert torch.is_autocast_cache_enabled()
    assert (block(torch.ones(4, 8, device=device)) == 1).all()                               # which works as before


def test_a_budget_is_kept_before_anything_is_captured(device):
    block, (x, cu) = Mixer().to(device), pack((5, 3), device)
    needed = price(block, TIER, (x, cu)).total
    for budget in (needed - 1, 0):
        with pytest.raises(Resource, match="over the budget of .* No tier of these fits.* Nothing was captured"):
            capture(block, TIER, (x, cu), budget=budget)
    assert capture(block, TIER, (x, cu), budget=needed).stats.captures == 1
    with pytest.raises(Resource, match="or fewer slots: each of the 2 holds"):
        capture(block, TIER, (x, cu), budget=needed, slots=2)


def test_a_budget_names_the_tiers_to_drop():
    with torch.device("meta"):
        layer = GatedDeltaNet(512, head_dim=128, num_heads=4, expand_v=1).to(torch.bfloat16)
    tiers = Tier(8192, 64), Tier(4096, 32), Tier(512, 8)
    middle, small = (price(layer, tiers[i:]).total for i in (1, 2))
    for budget, named in ((middle, "Drop 8192 x 64: the others hold"), (small, "Drop 8192 x 64, 4096 x 32: the others hold"),
                          (small - 1, "No tier of these fits")):
        with pytest.raises(Resource, match=named):
            check_budget(budget, tiers, lambda some: price(layer, some))
    check_budget(price(layer, tiers).total, tiers, lambda some: price(layer, some))


@pytest.mark.parametrize("slots", [1, 2])
def test_a_refused_ladder_names_the_tiers_whose_absence_would_do(device, slots, monkeypatch):
    backend, begun = get_backend(device), []
    capture_of_device = backend.capture
    monkeypatch.setattr(backend, "capture", lambda **options: begun.append(options) or capture_of_device(**options))
    block, (x, cu) = Mixer().to(device), pack((5, 3), device)
    tiers = sorted(LADDER, key=lambda tier: -tier.tokens)
    for dropped, named in ((1, "Drop 48 x 6: the others hold"), (2, "Drop 48 x 6, 24 x 4: the others hold")):
        budget = slots * price(block, tiers[dropped:], (x, cu)).total
        graphed = capture(block, LADDER, budget=budget, slots=slots)
        with pytest.raises(Resource, match=named):
            graphed(x, cu)
        assert not begun and graphed.held_bytes() == 0 and graphed.stats.captures == 0
        advised = capture(block, tiers[dropped:], (x, cu), budget=budget, slots=slots)
        assert advised.held_bytes() > 0 and exact(device, budget, advised.held_bytes())
        advised(x, cu).sum().backward()
        captured(advised, 1, backwards=1)
        begun.clear()


def test_a_mode_that_passes_the_budget_is_refused_at_its_first_call(device):
    block, (x, cu) = Mixer().to(device), pack((5, 3), device)
    with torch.no_grad():
        budget = price(block, TIER, (x, cu)).total
        graphed = capture(block, TIER, budget=budget)
        graphed(x, cu)
        held = graphed.held_bytes()
    with pytest.raises(Resource, match="over the budget"):
        graphed(x, cu)
    with torch.no_grad():
        graphed(x, cu)
    assert graphed.held_bytes() == held and graphed.stats.captures == 1
    captured(graphed, 2)


@pytest.mark.parametrize("budget", [-1, 1.5, "1 GB"])
def test_a_budget_is_a_number_of_bytes(budget):
    with pytest.raises(ValueError, match="budget: expected a number of bytes"):
        capture(Mixer(), TIER, budget=budget)


def test_a_price_is_shown_as_a_table(device):
    text = str(price(nn.Linear(256, 512).to(device), TIER, (torch.zeros(1, 1024, 256),)))
    assert "MiB" in text and "24 x 4" in text and "a slot" in text and max(map(len, text.splitlines())) <= 80
    for number in ("3.0", "2.0", "0.5"):                     # x and the output's gradient, the output, the weight's gradient
        assert f" {number} " in text, text


LAYERS = {
    "gdn": lambda: GatedDeltaNet(2048, head_dim=128, num_heads=16, num_v_heads=32, expand_v=1),
    "kda": lambda: KimiDeltaAttention(2048, head_dim=128, num_heads=32),
}


@pytest.mark.device_only
@pytest.mark.parametrize("tier", [Tier(512, 8), Tier(4096, 32), Tier(8192, 64)], ids=lambda t: f"{t.tokens}x{t.seqs}")
@pytest.mark.parametrize("name", LAYERS)
def test_layers_of_a_model_hold_their_price(device, name, tier):
    """Writes both sides (seen with -s), and of a miss every segment, so that one run tells what is off."""
    layer = LAYERS[name]().to(device, torch.bfloat16)
    x, cu = pack((40, 24), device, width=2048, dtype=torch.bfloat16, requires_grad=True)
    found = price(layer, tier, (x, cu))
    graphed = capture(layer, tier, (x, cu))
    static = sum(slot.static_bytes() for slot in graphed._slots)
    pool = graphed.held_bytes() - static
    told = (f"{name} {tier}: priced {found.static / MIB:.1f} + {found.pool / MIB:.1f} MiB, held {static / MIB:.1f} + "
            f"{pool / MIB:.1f} MiB ({found.total / (static + pool) - 1:+.1%})")
    sys.stderr.write(f"\n{told}")
    assert found.static == static and close(found.total, static + pool), f"{told}\n{found}\n{segments(graphed)}"


def segments(graphed) -> str:
    """The sizes of the pool's segments and of the blocks in them, largest first."""
    pools = {tuple(slot.pool) for slot in graphed._slots}
    found = [s for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) in pools]
    return "\n".join(f"{s['total_size'] / MIB:8.1f} MiB, {s['allocated_size'] / MIB:.1f} allocated: "
                     + " ".join(f"{b['size'] / MIB:.1f}{'' if b['state'] == 'inactive' else '*'}" for b in s["blocks"])
                     for s in sorted(found, key=lambda s: -s["total_size"]))

