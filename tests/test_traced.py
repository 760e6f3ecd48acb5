"""What PyTorch's tracers make of ops and captured blocks: torch.compile runs them beside its graphs, export refuses them."""

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from graphlin.capture import capture
from graphlin.errors import GraphlinError
from graphlin.layers import GatedDeltaNet
from graphlin.ops.gated_rms_norm import gated_rms_norm
from graphlin.tier import Tier
from tests.blocks import Mixer, captured, gradients, pack

pytestmark = [pytest.mark.raw_memory,                                                      # Dynamo would trace the fill
              pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),      # of what Dynamo imports
              pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),   # Dynamo reads it
              pytest.mark.filterwarnings("ignore:Dynamo d:UserWarning")]                  # what it traces or not


@pytest.fixture(autouse=True)
def nothing_compiled_before():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(block):
    return torch.compile(block, backend="aot_eager")


def test_a_compiled_layer_is_the_layer(device):
    layer = GatedDeltaNet(32, head_dim=16, num_heads=2, expand_v=1, chunk_size=16).to(device)
    x, cu = pack((4, 5), device, width=32, requires_grad=True)
    weight = torch.randn_like(x)
    found, expected = gradients_of(compiled(layer), layer, x, cu, weight), gradients(layer, x, cu, weight)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-6)


def gradients_of(run, layer, x, cu, weight):
    y = run(x, cu)
    return [y.detach(), *torch.autograd.grad((y * weight).sum(), [x, *layer.parameters()])]


def test_a_captured_block_is_replayed_in_a_compiled_model(device):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.mixer, self.last = nn.Linear(8, 8), capture(Mixer().to(device), Tier(24, 4)), nn.Linear(8, 8)

        def forward(self, x, cu):
            return self.last(self.mixer(self.first(x), cu))

    model = Model().to(device)
    run = compiled(model)
    for replays in (1, 2):
        x, cu = pack((5, 3), device, requires_grad=True)
        weight = torch.randn_like(x)
        found = gradients_of(run, model, x, cu, weight)
        captured(model.mixer, 2 * replays - 1, backwards=2 * replays - 1)
        for one, expected in zip(found, gradients_of(model, model, x, cu, weight), strict=True):
            torch.testing.assert_close(one, expected, rtol=2e-5, atol=2e-6)


def test_a_compiled_part_of_a_captured_block_is_captured_in_both_modes(device):
    block = Mixer().to(device)
    block.leave = compiled(block.leave)
    graphed = capture(block, Tier(24, 4))
    for training in (True, False, True):
        graphed.train(training)
        x, cu = pack((5, 3), device, requires_grad=True)
        found, = torch.autograd.grad(graphed(x, cu).sum(), x)
        torch.testing.assert_close(found, torch.autograd.grad(block(x, cu).sum(), x)[0], rtol=2e-5, atol=2e-6)
    captured(graphed, 3, backwards=3)
    assert graphed.stats.captures == 2


@pytest.mark.parametrize("trace", [
    lambda block, x: torch.export.export(block, (x,), strict=False),
    lambda block, x: make_fx(block, tracing_mode="fake", _allow_non_fake_inputs=True)(x),
], ids=["export", "make_fx"])
def test_a_graph_that_would_lack_a_launch_is_refused(device, trace):
    class Norm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))

        def forward(self, x):
            return gated_rms_norm(x, self.weight)

    block, x = Norm().to(device), torch.randn(3, 8, device=device)
    with pytest.raises(GraphlinError, match="kernel norm_forward is launched while PyTorch traces .*nobody has written"):
        trace(block, x)
    assert block(x).isfinite().all()
