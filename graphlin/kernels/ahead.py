"""In a capture's first runs, compiles an op's kernels, forward and backward, side by side before the first one is launched."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import Function
from torch.compiler import is_dynamo_compiling

from graphlin.backends import CompileAhead, GraphBackend


@dataclass(frozen=True)
class _Ahead:
    compile: CompileAhead
    runs: bool


_ahead: ContextVar[_Ahead | None] = ContextVar("ahead", default=None)
# Set while an op is played: what `launch` calls in place of launching.
played: ContextVar[CompileAhead | None] = ContextVar("played", default=None)


@contextmanager
def compiling_ahead(backend: GraphBackend, *, runs: bool = True) -> Iterator[bool]:
    """Inside, in this thread, `apply` has the kernels of an op's forward and backward compiled side by side before the first of
    them runs; at the end all are. Nothing where the backend can't do that.

    Where it can and the block is called for the shapes of its outputs alone (not `runs`), none of them runs: the op waits for
    no kernel and returns zeros. Yields whether ops run.
    """
    with backend.compiling() as compile_ahead:
        token = _ahead.set(None if compile_ahead is None else _Ahead(compile_ahead, runs))
        try:
            yield runs or compile_ahead is None
        finally:
            _ahead.reset(token)


def apply(function: type[Function], *args: Any) -> tuple:
    """`function.apply(*args)` of a function that returns a tuple, whose forward and backward look at no value on the host and
    wait for no other rank: inside `compiling_ahead` they are played first for their launches alone. torch.compile runs it as a
    whole beside its graphs.

    >>> y, final_state = apply(CausalConv1d, x, weight, None, None, None, False, True, packing, None)
    """
    if is_dynamo_compiling():
        return torch.compiler.disable(function.apply)(*args)
    ahead = _ahead.get()
    if ahead is None:
        return function.apply(*args)
    _play(ahead.compile, _forward_and_backward, function, args)
    return function.apply(*args) if ahead.runs else _play(_launch_nothing, _zeros, function, args)


def _play(compile_ahead: CompileAhead, work: Callable, function: type[Function], args: tuple) -> Any:
    token = played.set(compile_ahead)
    try:
        return work(function, args)
    finally:
        played.reset(token)


def _forward_and_backward(function: type[Function], args: tuple) -> None:
    """As autograd would call them; what they return is memory that nobody has written."""
    ctx = _Context([torch.is_grad_enabled() and isinstance(a, torch.Tensor) and a.requires_grad for a in args])
    with torch.no_grad():
        outs = function.forward(ctx, *args)
        if any(ctx.needs_input_grad):
            function.backward(ctx, *(None if out is None else torch.empty_like(out) for out in outs))


def _zeros(function: type[Function], args: tuple) -> tuple:
    outs = function.apply(*args)
    with torch.no_grad():
        for out in outs:
            if out is not None:
                out.zero_()
    return outs


def _launch_nothing(*launch: Any) -> None:
    return None


class _Context:
    """In the place of autograd's own ctx, which nobody can make: what a function's forward keeps for its backward."""

    def __init__(self, needs_input_grad: list[bool]) -> None:
        self.needs_input_grad = needs_input_grad

    def set_materialize_grads(self, value: bool) -> None:
        return None

    def save_for_backward(self, *tensors: torch.Tensor | None) -> None:
        self.saved_tensors = tensors
