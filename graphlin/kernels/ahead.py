"""What an op will launch is compiled beside what it launches now, in the first run of a capture."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch.autograd import Function

from graphlin.backends import CompileAhead, GraphBackend

_ahead: ContextVar[CompileAhead | None] = ContextVar("ahead", default=None)
# What `launch` then calls in place of launching.
played: ContextVar[CompileAhead | None] = ContextVar("played", default=None)


@contextmanager
def compiling_ahead(backend: GraphBackend) -> Iterator[None]:
    """Inside, in this thread, `apply` has the kernels of an op's forward and backward compiled side by side before the first of
    them runs; at the end all are. Nothing where the backend can't do that."""
    with backend.compiling() as compile_ahead:
        token = _ahead.set(compile_ahead)
        try:
            yield
        finally:
            _ahead.reset(token)


def apply(function: type[Function], *args: Any) -> tuple:
    """`function.apply(*args)` of a function with several outputs, whose forward and backward look at no value on the host and
    wait for no other rank: inside `compiling_ahead` they are played first for their launches alone.

    >>> y, final_state = apply(CausalConv1d, x, weight, None, None, None, False, True, packing, None)
    """
    compile_ahead = _ahead.get()
    if compile_ahead is not None:
        _play(function, args, compile_ahead, torch.is_grad_enabled())
    return function.apply(*args)


@torch.no_grad()
def _play(function: type[Function], args: tuple, compile_ahead: CompileAhead, grad: bool) -> None:
    """Forward and backward as autograd would call them; what they return is memory that nobody has written."""
    ctx = _Context([grad and isinstance(a, torch.Tensor) and a.requires_grad for a in args])
    token = played.set(compile_ahead)
    try:
        outs = function.forward(ctx, *args)
        if any(ctx.needs_input_grad):
            function.backward(ctx, *(None if out is None else torch.empty_like(out) for out in outs))
    finally:
        played.reset(token)


class _Context:
    """What a function's forward keeps for its backward."""

    def __init__(self, needs_input_grad: list[bool]) -> None:
        self.needs_input_grad = needs_input_grad

    def set_materialize_grads(self, value: bool) -> None:
        return None

    def save_for_backward(self, *tensors: torch.Tensor | None) -> None:
        self.saved_tensors = tensors
