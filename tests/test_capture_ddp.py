"""DistributedDataParallel around a captured block: two processes, gradients averaged as in eager."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from graphlin.capture import capture
from graphlin.tier import Tier
from tests.blocks import Mixer, captured, pack
from tests.processes import end_process

TIERS = [Tier(tokens=16, seqs=3), Tier(tokens=24, seqs=4)]
PACKS = [(5, 3), (24,), (1, 0, 7), (6, 6, 6, 6), (2, 14), (13,)]
WORLD = 2


class Model(nn.Module):
    """A captured or eager block between layers that are not captured."""

    def __init__(self, block):
        super().__init__()
        self.before, self.block, self.after = nn.Linear(8, 8), block, nn.Linear(8, 1)

    def forward(self, x, cu):
        return self.after(self.block(self.before(x), cu))


def train(model, rank, device):
    """Two optimizer steps of three micro-batches each, of which the last averages over processes; returns all weights."""
    steps = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for first in (0, 3):
        for i in range(first, first + 3):
            torch.manual_seed(10 * i + rank)
            x, cu = pack(PACKS[(i + rank) % len(PACKS)], device)
            model.require_backward_grad_sync = i == first + 2
            model(x, cu).square().sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        steps.step()
        steps.zero_grad()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def worker(rank, device, store, options):
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    weights = []
    for is_captured in (True, False):
        torch.manual_seed(0)
        model = Model(Mixer()).to(device)
        if is_captured:
            graphed = model.block = capture(model.block, TIERS, num_warmup_iters=1)
        weights.append(train(DistributedDataParallel(model, **options), rank, device))
    captured(graphed, 6, backwards=6)
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-4, atol=1e-5)
    others = [torch.empty_like(weights[0]) for _ in range(WORLD)]
    torch.distributed.all_gather(others, weights[0])
    assert torch.equal(others[0], others[1])
    torch.distributed.destroy_process_group()
    end_process()


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}, {"bucket_cap_mb": 1e-4}],
                         ids=["default", "gradients in buckets", "many buckets"])
def test_captured_and_eager_processes_agree(device, tmp_path, options):
    torch.multiprocessing.spawn(worker, (device, tmp_path / "store", options), nprocs=WORLD)
