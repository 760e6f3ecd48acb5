"""Captured blocks on two devices of one kind, called while either is current."""

import pytest
import torch

from graphlin.capture import capture
from graphlin.layers import GatedDeltaNet
from graphlin.tier import Tier
from tests.blocks import captured, gradients


@pytest.fixture
def devices(request):
    if request.config.option.device != "cuda" or torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    return [torch.device("cuda", i) for i in range(2)]


@pytest.mark.parametrize("current", [0, 1])
def test_blocks_on_two_devices_are_interleaved_whichever_is_current(devices, current):
    torch.manual_seed(0)
    layers = [GatedDeltaNet(64, head_dim=32, num_heads=2, expand_v=1).to(device) for device in devices]
    graphed = [capture(layer, Tier(64, 4), num_warmup_iters=1) for layer in layers]
    with torch.cuda.device(devices[current]):
        for lengths in ((40, 24), (5, 0, 17), (64,)):
            for each, device in zip(graphed, devices, strict=True):
                cu = torch.tensor([0, *lengths], device=device).cumsum(0, dtype=torch.int32)
                x = torch.randn(1, sum(lengths), 64, device=device, requires_grad=True)
                weight = torch.randn_like(x)
                found = gradients(each, x, cu, weight)
                assert {t.device for t in found} == {device}
                for f, e in zip(found, gradients(each.block, x, cu, weight), strict=True):
                    torch.testing.assert_close(f, e, rtol=1e-3, atol=1e-4)
    for each in graphed:
        captured(each, 3, backwards=3)
