"""graphlin's own layers, captured whole: bitwise equal to eager at the tier's shapes, forward and backward."""

from collections import Counter

import pytest
import torch

from graphlin.backends import get_backend
from graphlin.capture import capture
from graphlin.demo.model import Blocks
from graphlin.layers import GatedDeltaNet, KimiDeltaAttention
from graphlin.tier import Tier
from graphlin.verify import verify
from tests.blocks import captured, gradients, pack

pytestmark = pytest.mark.raw_memory
TIER = Tier(tokens=16, seqs=2, chunk_size=16)
SIZES = {"hidden_size": 16, "head_dim": 16, "num_heads": 1, "expand_v": 1, "chunk_size": 16}

LAYERS = [GatedDeltaNet, KimiDeltaAttention]


def make(layer, device):
    torch.manual_seed(0)
    return layer(**SIZES).to(device)


def mixed_stack(**sizes):
    """Two blocks, each a layer and a perceptron: one of either kind."""
    return Blocks(("gdn", "kda"), *(sizes[name] for name in ("hidden_size", "num_heads", "head_dim", "chunk_size")))


@pytest.fixture
def captured_launches(device, monkeypatch):
    """How often each kernel is launched while a capture is open."""
    backend, counts = get_backend(device), Counter()
    launch = backend.launch

    def counted(kernel, *args, **kwargs):
        if backend.is_capturing():
            counts[kernel.__name__] += 1
        return launch(kernel, *args, **kwargs)

    monkeypatch.setattr(backend, "launch", counted)
    return counts


@pytest.mark.parametrize("layer", [*LAYERS, mixed_stack])
def test_replays_equal_eager_with_one_launch_a_direction(device, layer):
    graphed = capture(make(layer, device), TIER, num_warmup_iters=1)
    x, cu = pack((5, 8), device, width=16, slack=2, requires_grad=True)
    report = verify(graphed, x, cu)
    assert report.ok, str(report)
    assert len(report.errors) == 2 + len(list(graphed.parameters()))
    assert report.launches["graph", "forward"] == report.launches["graph", "backward"] == 1


@pytest.mark.parametrize("layer", LAYERS)
def test_prefill_continues_from_its_states(device, layer):
    graphed = capture(make(layer, device), TIER, num_warmup_iters=1)
    x, cu = pack((8, 8), device, width=16)
    first, second = (x.unflatten(1, (2, 8))[:, :, part].flatten(1, 2) for part in (slice(0, 5), slice(5, 8)))
    with torch.no_grad():
        whole = graphed(x, cu)
        y0, states = graphed(first, torch.tensor([0, 5, 10], device=device, dtype=torch.int32), output_final_state=True)
        y1, _ = graphed(second, torch.tensor([0, 3, 6], device=device, dtype=torch.int32), initial_state=states,
                        output_final_state=True)
    captured(graphed, 3)
    parts = torch.cat([y0.unflatten(1, (2, 5)), y1.unflatten(1, (2, 3))], 2).flatten(1, 2)
    torch.testing.assert_close(parts, whole, rtol=1e-4, atol=1e-5)


def test_a_mixed_stack_shares_one_table_and_equals_eager_bit_for_bit(device, captured_launches):
    graphed = capture(make(mixed_stack, device), TIER, num_warmup_iters=1)
    packs = [(5, 8), (16,), (1, 15), (0, 7), (9, 2)]
    for lengths in packs:
        x, cu = pack((*lengths, 0)[:2], device, width=16, slack=TIER.tokens - sum(lengths), requires_grad=True)
        weight = torch.randn(1, TIER.tokens, 16).to(device)
        weight[:, sum(lengths):] = 0                       # no loss reads a row that is nobody's
        found, expected = (gradients(block, x, cu, weight) for block in (graphed, graphed.block))
        assert len(found) == 2 + len(list(graphed.parameters()))
        for i, (f, e) in enumerate(zip(found, expected, strict=True)):
            assert f.isfinite().all() and torch.equal(f, e), f"result {i} at lengths {lengths}"
    captured(graphed, len(packs), backwards=len(packs))
    assert captured_launches["chunk_table_rows"] == 1
    assert captured_launches["gdn_prep"] == captured_launches["kda_prep"] == 1
    assert captured_launches["delta_recurrence"] == 2


def test_a_layer_under_autocast_equals_eager_in_each_tier(device):
    graphed = capture(make(GatedDeltaNet, device), [TIER, Tier(tokens=8, seqs=1, chunk_size=16)], num_warmup_iters=1)
    for lengths in ((5, 8), (7,)):
        x, cu = pack(lengths, device, width=16, requires_grad=True)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            report = verify(graphed, x, cu)
            assert graphed(x, cu).dtype == torch.bfloat16
        assert report.ok and report.tier.tokens == (16 if sum(lengths) > 8 else 8), str(report)
    captured(graphed, 2)
