"""Backwards that are kernels, of which nobody has written a derivative."""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, NoReturn

import torch

from graphlin.errors import GraphlinError


def first_order(backward: Callable[..., tuple]) -> Callable[..., tuple]:
    """An op's `backward`, whose results refuse a derivative of their own (`create_graph=True`) and serve for all else.

    PyTorch's `once_differentiable` refuses where a gradient that comes in requires one, and leaves the results unconnected to
    the op's inputs: a penalty on the gradient of a sum was a constant, and had no gradient without a word.

    >>> backward = staticmethod(first_order(lambda ctx, dy: (dy * ctx.saved_tensors[0],)))
    """
    @wraps(backward)
    def run(ctx: Any, *grads: torch.Tensor | None) -> tuple:
        if not torch.is_grad_enabled():
            return backward(ctx, *grads)
        ctx = _Unpacked(ctx)
        with torch.no_grad():
            results = backward(ctx, *grads)
        sources = [t for t in (*ctx.saved_tensors, *grads) if t is not None and t.requires_grad]
        return _refusing(results, sources)
    return run


class _Unpacked:
    """A context whose saved tensors are unpacked once, which is all that activation checkpointing allows."""

    def __init__(self, ctx: Any) -> None:
        self._ctx = ctx
        self.saved_tensors = ctx.saved_tensors

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)


def _refusing(results: tuple, sources: Sequence[torch.Tensor]) -> tuple:
    """The results, as functions of the sources that can't be differentiated."""
    present = [t for t in results if t is not None]
    tied = iter(_Refusing.apply(len(present), *present, *sources))
    return tuple([None if t is None else next(tied) for t in results])


class _Refusing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, count: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tensors[:count]

    @staticmethod
    def backward(ctx, *grads: torch.Tensor) -> NoReturn:
        raise GraphlinError("the gradients of graphlin's ops have no derivatives of their own, and this backward asks for one: a "
                            "gradient was taken with create_graph=True (for a penalty on it, a Hessian) and differentiated. "
                            "Detach it, or compute this part of the model with operations of PyTorch.")
