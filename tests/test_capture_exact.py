"""Gradients of calls that are woven together: the very bits that eager accumulates at the tier's shapes."""

import pytest
import torch
from torch import nn

from graphlin.capture import capture
from graphlin.tier import Tier
from tests.blocks import AtTier, Mixer, captured, pack

TIER = Tier(tokens=24, seqs=4)
CALLS = [(5, 3), (24,), (1, 0, 7, 2)]


def make_calls(device):
    return [pack(lengths, device, requires_grad=True) for lengths in CALLS]


def accumulated(blocks, calls, weave):
    """What `.grad` of all parameters and inputs is after weave(*blocks), which calls them and runs backward itself."""
    leaves = [*(p for block in blocks for p in block.parameters()), *(x for x, _ in calls)]
    for leaf in leaves:
        leaf.grad = None
    weave(*blocks)
    return [leaf.grad for leaf in leaves if leaf.grad is not None]


def assert_same_bits(graphed, calls, weave):
    found = accumulated(graphed, calls, weave)
    expected = accumulated([AtTier(each.block, TIER) for each in graphed], calls, weave)
    assert len(found) == len(expected) > 3 and all(grad.any() for grad in found)
    for i, (f, e) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(f, e), f"gradient {i}"


def test_three_micro_batches_are_the_sum_of_their_gradients_to_the_bit(device):
    graphed = capture(Mixer().to(device), TIER, num_warmup_iters=1)
    params, calls = list(graphed.parameters()), make_calls(device)
    g1, g2, g3 = (torch.autograd.grad(graphed(*call).square().sum(), params) for call in calls)
    for call in calls:
        graphed(*call).square().sum().backward()
    for p, *grads in zip(params, g1, g2, g3, strict=True):
        assert torch.equal(p.grad, grads[0] + grads[1] + grads[2]) and all(grad.any() for grad in grads)
    captured(graphed, 6, backwards=6)


WEAVES = {
    "f(x) + f(x)": lambda f, calls: (f(*calls[0]) + f(*calls[0])).sum().backward(),
    "in order": lambda f, calls: [loss.backward() for loss in [f(*call).square().sum() for call in calls[:2]]],
    "reversed": lambda f, calls: [loss.backward() for loss in [f(*call).square().sum() for call in calls[:2]][::-1]],
}


@pytest.mark.parametrize("weave", WEAVES)
def test_two_forwards_before_their_backwards_have_the_bits_of_eager(device, weave):
    graphed = capture(Mixer().to(device), TIER, slots=2, num_warmup_iters=1)
    calls = make_calls(device)
    assert_same_bits([graphed], calls, lambda f: WEAVES[weave](f, calls))
    captured(graphed, 2, backwards=2)


def test_two_blocks_captured_one_after_the_other_train_interleaved(device):
    a, b = (capture(Mixer().to(device), TIER, num_warmup_iters=1) for _ in range(2))
    calls = make_calls(device)
    for each in (a, b):
        each(*calls[0]).sum().backward()

    def weave(f, g):
        f(*calls[1]).square().sum().backward()
        first, second = f(*calls[0]).square().sum(), g(*calls[2]).square().sum()
        first.backward()
        third = f(*calls[2]).square().sum()
        second.backward()
        (third + g(*calls[0]).square().sum()).backward()
    assert_same_bits([a, b], calls, weave)
    captured(a, 4, backwards=4)
    captured(b, 3, backwards=3)


class Times(nn.Module):
    def forward(self, x, cu_seqlens, factor=1.0):
        return x * factor


@pytest.mark.parametrize("slots", [1, 2])
def test_contributions_of_1_and_10_to_one_tensor_are_11(device, slots):
    x, cu = pack((5, 3), device, requires_grad=True)
    one, ten = (capture(Times().to(device), TIER, slots=slots, num_warmup_iters=1) for _ in range(2))
    for first, second in ((one, ten), (one, one)):                     # two blocks, and two modes of one block
        x.grad = None
        (first(x, cu) + second(x, cu, factor=10.0)).sum().backward()
        assert torch.equal(x.grad, torch.full_like(x, 11.0))
    captured(one, 1 + slots, backwards=1 + slots, **({} if slots == 2 else {"SlotInUse": 1}))
    captured(ten, 1, backwards=1)
