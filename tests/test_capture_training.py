"""What training does around a captured block: autocast, dropout, accumulation, clipping, optimizers, hooks."""

import itertools

import pytest
import torch
from torch import nn

from graphlin.capture import capture
from graphlin.tier import Tier
from tests.blocks import Mixer, captured, gradients, pack

TIERS = [Tier(tokens=8, seqs=2), Tier(tokens=16, seqs=3), Tier(tokens=24, seqs=4)]
PACKS = [(5, 3), (24,), (1, 0, 7), (6, 6, 6, 6), (2, 14)]


def test_autocast_trains_in_bfloat16_with_gradients_of_the_parameters_dtype(device):
    graphed = capture(Mixer().to(device), TIERS, num_warmup_iters=1)
    for lengths in PACKS:
        x, cu = pack(lengths, device, requires_grad=True)
        weight = torch.randn(x.shape, device=device)
        found, expected = [], []
        for block, results in ((graphed, found), (graphed.block, expected)):
            with torch.autocast(device.type, dtype=torch.bfloat16):
                y = block(x, cu)
            assert y.dtype == torch.bfloat16
            results += [y, *torch.autograd.grad((y.float() * weight).sum(), [x, *graphed.parameters()])]
        for f, e in zip(found, expected, strict=True):
            assert f.dtype == e.dtype
            torch.testing.assert_close(f, e, rtol=5e-2, atol=5e-2)
    captured(graphed, len(PACKS), backwards=len(PACKS))
    assert graphed.stats.captures == 3


class Drops(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.dropout = nn.Parameter(torch.full((8,), 3.0)), nn.Dropout(0.5)

    def forward(self, x, cu_seqlens):
        return self.dropout(x) * self.weight


def test_dropout_draws_anew_for_each_replay_and_its_backward_has_the_same_mask(device):
    graphed = capture(Drops().to(device), TIERS, num_warmup_iters=1)
    x, cu = torch.ones(1, 12, 8, device=device, requires_grad=True), torch.tensor([0, 5, 12], device=device)

    def step():
        y = graphed(x, cu)
        dx, dw = torch.autograd.grad(y.sum(), [x, graphed.block.weight])
        assert torch.equal(y, dx) and torch.equal(dw * 3, y[0].sum(0))  # y = mask * x * 3, dx = mask * 3
        assert set(y.unique().tolist()) == {0.0, 6.0}
        return y
    step()
    torch.manual_seed(5)
    first, second = step(), step()
    torch.manual_seed(5)
    assert torch.equal(step(), first) and torch.equal(step(), second) and not torch.equal(first, second)
    captured(graphed, 5, backwards=5)


OPTIMIZERS = {
    "foreach": lambda params: torch.optim.AdamW(params, lr=1e-2, foreach=True),
    "fused": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
    "momentum": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9),
}


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_steps_of_accumulated_clipped_gradients_equal_eager_ones(device, optimizer, set_to_none):
    torch.manual_seed(1)
    block, twin = Mixer().to(device), Mixer().to(device)
    twin.load_state_dict(block.state_dict())
    graphed = capture(block, TIERS, num_warmup_iters=1)
    norms = {graphed: [], twin: []}
    for each in (graphed, twin):
        torch.manual_seed(2)
        steps = OPTIMIZERS[optimizer](each.parameters())
        packs = itertools.cycle(PACKS)
        for _ in range(4):
            for _ in range(3):
                x, cu = pack(next(packs), device)
                each(x, cu).square().sum().backward()
            norms[each].append(nn.utils.clip_grad_norm_(each.parameters(), 1.0).item())
            steps.step()
            steps.zero_grad(set_to_none=set_to_none)
    assert norms[graphed] == pytest.approx(norms[twin], rel=1e-4) and min(norms[twin]) > 1
    for found, expected in zip(block.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
    captured(graphed, 12, backwards=12)


def own_gradients(graphed):
    """Addresses of the gradients that the graphs write."""
    return {grad.data_ptr() for mode in graphed._modes.values() for pairs in mode.pairs.values() for pair in pairs
            for grad in pair.param_grads}


@pytest.mark.parametrize("accumulates", [False, True])
def test_no_gradient_that_a_parameter_is_given_is_the_graphs(device, accumulates):
    graphed = capture(Mixer().to(device), TIERS, num_warmup_iters=1)
    seen, params = [], list(graphed.parameters())
    nodes = [torch.autograd.graph.get_gradient_edge(p).node for p in params]
    handles = [node.register_prehook(lambda grads: seen.append(grads[0])) for node in nodes]
    handles += [p.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad)) for p in params]
    for lengths in PACKS:
        graphed(*pack(lengths, device)).square().sum().backward()
        seen += [p.grad for p in params]
        if not accumulates:
            for p in params:
                p.grad = None
    kept = [grad.clone() for grad in seen[-3:]]
    assert len(seen) == 3 * 3 * len(PACKS) and not own_gradients(graphed) & {grad.data_ptr() for grad in seen}
    with torch.no_grad():
        x, cu = pack((9,), device)
    torch.autograd.grad(graphed(x, cu).sum(), params)
    assert all(torch.equal(grad, before) for grad, before in zip(seen[-3:], kept, strict=True))
    for handle in handles:
        handle.remove()
    captured(graphed, len(PACKS) + 1, backwards=len(PACKS) + 1)


def test_a_first_gradient_is_taken_over_and_not_copied_again(device):
    graphed = capture(Mixer().to(device), TIERS, num_warmup_iters=1)
    handed = []
    nodes = [torch.autograd.graph.get_gradient_edge(p).node for p in graphed.parameters()]
    for node in nodes:
        node.register_prehook(lambda grads: handed.append(grads[0].data_ptr()))
    graphed(*pack((5, 3), device)).sum().backward()
    assert sorted(handed) == sorted(p.grad.data_ptr() for p in graphed.parameters())
    captured(graphed, 1, backwards=1)


def test_an_optimizer_that_steps_inside_the_backward(device):
    """Each parameter is updated in its hook, as its gradient arrives; the next forward reads the new weights."""
    torch.manual_seed(3)
    blocks = [Mixer().to(device), Mixer().to(device)]
    blocks[1].load_state_dict(blocks[0].state_dict())
    graphed = capture(blocks[0], TIERS, num_warmup_iters=1)

    @torch.no_grad()
    def step(p):
        p -= 0.01 * p.grad
        p.grad = None
    for p in [*blocks[0].parameters(), *blocks[1].parameters()]:
        p.register_post_accumulate_grad_hook(step)
    for lengths in PACKS:
        x, cu = pack(lengths, device)
        for block in (graphed, blocks[1]):
            block(x, cu).square().sum().backward()
    for found, expected in zip(blocks[0].parameters(), blocks[1].parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    captured(graphed, len(PACKS), backwards=len(PACKS))


def test_a_larger_eager_call_between_forward_and_backward(device):
    graphed = capture(Mixer().to(device), TIERS, num_warmup_iters=1)
    x, cu = pack((5, 3), device, requires_grad=True)
    weight = torch.ones((), device=device)
    expected = gradients(graphed.block, x, cu, weight)
    loss = graphed(x, cu).sum()
    large, ends = pack((30, 31), device, requires_grad=True)
    graphed(large, ends).square().sum().backward()
    found = torch.autograd.grad(loss, [x, *graphed.parameters()])
    for f, e in zip(found, expected[1:], strict=True):
        torch.testing.assert_close(f, e, rtol=2e-5, atol=2e-6)
    captured(graphed, 1, backwards=1, TierOverflow=1)
