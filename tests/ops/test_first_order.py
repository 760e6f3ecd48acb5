"""Gradients of the ops' gradients: there are none, and whoever asks for one is told."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from graphlin.errors import GraphlinError
from graphlin.ops.first_order import first_order
from graphlin.ops.gated_rms_norm import gated_rms_norm
from tests.inputs import cu_of
from tests.ops.op_cases import assert_bitwise, each_op

REFUSED = "the gradients of graphlin's ops have no derivatives of their own.*create_graph=True"
LENGTHS = (3, 0, 6)


def norm_arguments(device):
    x, gate = (torch.randn(3, 8, device=device).requires_grad_() for _ in range(2))
    return x, torch.ones(8, device=device).requires_grad_(), gate


@pytest.mark.parametrize("loss", [torch.sum, lambda y: y.square().sum()], ids=["dy is a constant", "dy depends on x"])
def test_a_penalty_on_a_gradient_is_refused_and_no_constant(device, loss):
    arguments = norm_arguments(device)
    y = gated_rms_norm(*arguments)
    for i, dx in enumerate(torch.autograd.grad(loss(y), arguments, create_graph=True, retain_graph=True)):
        assert dx.requires_grad, f"the gradient of argument {i} has no history"
        with pytest.raises(GraphlinError, match=REFUSED):
            torch.autograd.grad(dx.square().sum() + arguments[0].sum(), arguments, allow_unused=True)


@each_op
def test_every_op_refuses_and_first_gradients_are_the_same(case, device):
    drawn, cu = case.draw(sum(LENGTHS), len(LENGTHS), device), cu_of(LENGTHS, device)
    inputs = {name: x.requires_grad_() for name, x in drawn.items() if name not in ("do", "dht")}
    o, ht = case.op(**inputs, cu_seqlens=cu, output_final_state=True, **case.options)
    leaves, dy = list(inputs.values()), (drawn["do"], drawn["dht"])
    grads = [torch.autograd.grad((o, ht), leaves, dy, retain_graph=True, create_graph=create) for create in (False, True)]
    first, again = (dict(zip(inputs, each, strict=True)) for each in grads)
    assert_bitwise({name: x.detach() for name, x in again.items()}, first, "with create_graph=True")
    for x in again.values():
        with pytest.raises(GraphlinError, match=REFUSED):
            torch.autograd.grad(x.sum(), leaves, retain_graph=True, allow_unused=True)


def test_under_activation_checkpointing_tensors_are_unpacked_once(device):
    arguments = norm_arguments(device)
    expected = torch.autograd.grad(gated_rms_norm(*arguments).sum(), arguments)
    y = checkpoint(gated_rms_norm, *arguments, use_reentrant=False)
    grads = torch.autograd.grad(y.sum(), arguments, create_graph=True)
    for found, x in zip(grads, expected, strict=True):
        assert torch.equal(found, x)
    with pytest.raises(GraphlinError, match=REFUSED):
        grads[0].sum().backward()


def test_what_is_not_wanted_stays_absent(device):
    """And a gradient of no source is left as it is."""
    class Halved(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, y):
            ctx.save_for_backward(None)
            return x / 2

        backward = staticmethod(first_order(lambda ctx, dy: (dy / 2, None)))

    x = torch.ones(3, device=device, requires_grad=True)
    grad, = torch.autograd.grad(Halved.apply(x, None).sum(), x, create_graph=True)
    assert torch.equal(grad, torch.full_like(x, 0.5)) and not grad.requires_grad
