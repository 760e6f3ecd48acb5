"""graphlin's own layer, captured whole: bitwise equal to eager at the tier's shapes, forward and backward."""

import pytest
import torch

from graphlin.capture import capture
from graphlin.layers import GatedDeltaNet
from graphlin.tier import Tier
from graphlin.verify import verify
from tests.blocks import captured, pack

pytestmark = pytest.mark.raw_memory
TIER = Tier(tokens=16, seqs=2, chunk_size=16)


def gated_delta_net(device, **options):
    torch.manual_seed(0)
    return GatedDeltaNet(hidden_size=16, head_dim=16, num_heads=1, expand_v=1, chunk_size=16, **options).to(device)


def test_replays_equal_eager_with_one_launch_a_direction(device):
    graphed = capture(gated_delta_net(device), TIER, num_warmup_iters=1)
    x, cu = pack((5, 8), device, width=16, slack=2, requires_grad=True)
    report = verify(graphed, x, cu)
    assert report.ok, str(report)
    assert len(report.errors) == 2 + len(list(graphed.parameters()))
    assert report.launches["graph", "forward"] == report.launches["graph", "backward"] == 1


def test_prefill_continues_from_its_states(device):
    graphed = capture(gated_delta_net(device), TIER, num_warmup_iters=1)
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
