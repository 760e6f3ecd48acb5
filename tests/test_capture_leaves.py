"""A captured backward meets leaves of its own, not those of autograd graphs that are alive elsewhere."""

import pytest
import torch
from torch import nn

from graphlin.capture import capture
from graphlin.errors import HostSync, UnsupportedModule
from graphlin.tier import Tier
from tests.blocks import assert_equal, captured, gradients, pack

TIER = Tier(tokens=24, seqs=4)


class Tied(nn.Module):
    """Two linears of one weight. Notes the node that accumulates its gradient in each forward."""

    def __init__(self):
        super().__init__()
        self.enter, self.leave = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.leave.weight = self.enter.weight
        self.nodes = []

    def forward(self, x, cu_seqlens):
        self.nodes.append(torch.autograd.graph.get_gradient_edge(self.enter.weight).node)
        active = torch.arange(x.shape[1], device=x.device) < cu_seqlens[-1]
        return self.leave(self.enter(torch.where(active[:, None], x, 0.0)).tanh())


def test_a_live_autograd_graph_stays_out_of_the_capture(device):
    block = Tied().to(device)
    x, cu = pack((5, 3), device, requires_grad=True)
    wanted = [x, *block.parameters()]
    eager = block(x, cu)                                       # alive until the end
    graphed = capture(block, TIER)
    found = graphed(x, cu)
    own, *inside = block.nodes
    assert len(inside) >= 5 and all(node is not own for node in inside)
    assert_equal(torch.autograd.grad(found.square().sum(), wanted), torch.autograd.grad(eager.square().sum(), wanted))
    captured(graphed, 1, backwards=1)


def test_tied_weights_have_one_gradient_and_stay_tied(device):
    graphed = capture(Tied().to(device), TIER)
    weight = graphed.block.enter.weight
    for lengths in ((5, 3), (24,), (1, 0, 7, 2)):
        x, cu = pack(lengths, device, requires_grad=True)
        scale = torch.randn(x.shape, device=device)
        assert_equal(gradients(graphed, x, cu, scale), gradients(graphed.block, x, cu, scale))
    assert graphed.block.enter.weight is weight and graphed.block.leave.weight is weight
    captured(graphed, 3, backwards=3)


def test_the_block_has_its_own_parameters_again_after_a_failure(device):
    class Reads(Tied):
        def forward(self, x, cu_seqlens):
            return super().forward(x, cu_seqlens) * self.enter.weight.sum().item()
    block = Reads().to(device)
    before = dict(block.named_parameters(remove_duplicate=False))
    with pytest.raises(HostSync):
        capture(block, TIER)(*pack((5, 3), device))
    after = dict(block.named_parameters(remove_duplicate=False))
    assert list(after) == list(before) and all(after[name] is before[name] for name in before)


def test_hooks_see_the_gradients_of_replays_alone(device):
    block, seen = Tied().to(device), []
    block.enter.weight.register_hook(seen.append)
    x, cu = pack((5, 3), device)
    graphed = capture(block, TIER, (x, cu))
    assert not seen
    for calls in (1, 2):
        graphed(x, cu).sum().backward()
        assert len(seen) == calls
    captured(graphed, 2, backwards=2)


class Listed(nn.Module):
    """Reads its parameter from a list, beside reading it as an attribute."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8))
        self.weights = [self.weight]

    def forward(self, x, cu_seqlens):
        return x * self.weight + self.weights[0]


@pytest.mark.parametrize("registered, name", [(True, "weight"), (False, r"a tensor of shape \[1\]")],
                         ids=["listed", "unregistered"])
@pytest.mark.parametrize("warm_ups", [0, 1])
def test_a_leaf_that_a_replay_would_leave_out_is_refused(device, registered, name, warm_ups):
    block = Listed().to(device)
    if not registered:
        block.weights = [torch.ones(1, device=device, requires_grad=True)]
    x, cu = pack((5, 3), device)
    with pytest.raises(UnsupportedModule, match=f"reads {name} .*neither from its arguments nor .*nn.ParameterList"):
        capture(block, TIER, num_warmup_iters=warm_ups, allow_unused_input=True)(x, cu)
    graphed = capture(block, TIER)
    with torch.no_grad():
        assert_equal([graphed(x, cu)], [block(x, cu)])         # there is no gradient to lose
    captured(graphed, 1)


def test_a_parameter_given_other_memory_by_the_forward_is_refused(device):
    class Moves(nn.Linear):
        def forward(self, x, cu_seqlens):
            self.weight.data = self.weight.data.clone()
            return super().forward(x)
    with pytest.raises(UnsupportedModule, match=r"forward gives weight other memory .*in place"):
        capture(Moves(8, 8).to(device), TIER)(*pack((5, 3), device))


def test_a_graphed_block_inside_another_one_is_captured_with_its_gradients(device):
    class Outer(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner, self.linear = inner, nn.Linear(8, 8)

        def forward(self, x, cu_seqlens):
            return self.inner(self.linear(x), cu_seqlens)
    inner = capture(Tied().to(device), TIER, fallback="raise")
    outer = capture(Outer(inner).to(device), TIER)
    x, cu = pack((5, 3), device, requires_grad=True)
    scale = torch.randn(x.shape, device=device)
    found = gradients(outer, x, cu, scale)
    assert inner.stats.inlined >= 4 and inner.stats.captures == 0
    captured(outer, 1, backwards=1)
    assert_equal(found, gradients(outer.block, x, cu, scale))
    captured(inner, 1, backwards=1)
