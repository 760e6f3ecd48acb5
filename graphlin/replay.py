"""A captured forward with its backward, and the one autograd.Function that replays them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from graphlin.backends import Graph
from graphlin.errors import ReplayError
from graphlin.packing import Leaf, Output

# Its gradient is always None. Its node is in the autograd graph of every replayed call, and the engine will run it in a
# plain backward() but not for torch.autograd.grad or backward(inputs=...), where nobody asks for it.
_ANCHOR = torch.zeros(0, requires_grad=True)
_ANCHOR_NODE = torch.autograd.graph.get_gradient_edge(_ANCHOR).node


class Copy(Protocol):
    """Fills one static tensor from a call's tensor; `cu` tells the active rows."""

    static: torch.Tensor

    def __call__(self, x: torch.Tensor, cu: torch.Tensor | None, static_cu: torch.Tensor | None = None) -> None: ...

    def clear(self) -> None: ...


@dataclass
class Pair:
    """Graphs of one mode in one slot, and the static tensors that they read and write.

    `inputs` are (index of the call's tensor, its copy, static cu_seqlens to fill beside it or None); `grads` are the
    copies of output gradients, one for each differentiable output; `input_grads` and `param_grads` are what the
    backward graph writes (None where it writes nothing), in the order in which the tensors entered autograd. `params` and
    `frozen` are the block's parameters that require grad and the others: the backward reads both.
    """

    forward: Graph
    inputs: list[tuple[int, Copy, torch.Tensor | None]]
    cu: int | None
    static_cu: torch.Tensor | None
    outputs: list[Output]
    static_outputs: list[torch.Tensor]
    rebuild: Callable[[list[torch.Tensor]], Any]
    copy_outputs: bool
    backward: Graph | None = None
    grads: list[Copy] = field(default_factory=list)
    input_grads: list[tuple[Leaf, torch.Tensor | None]] = field(default_factory=list)
    param_grads: list[torch.Tensor | None] = field(default_factory=list)
    params: list[torch.nn.Parameter] = field(default_factory=list)
    frozen: list[torch.nn.Parameter] = field(default_factory=list)
    closed: bool = False

    def copy_in(self, leaves: Sequence[torch.Tensor]) -> None:
        cu = None if self.cu is None else leaves[self.cu].contiguous()
        for index, copy, static_cu in self.inputs:
            copy(leaves[index], cu, static_cu)

    def play(self, leaves: Sequence[torch.Tensor], tokens: int, seqs: int,
             batch: tuple[int, int] | None) -> list[torch.Tensor]:
        """One forward: copy in, replay, copy out."""
        self.copy_in(leaves)
        self.forward.replay()
        views = [output.take(static, tokens, seqs, batch)
                 for output, static in zip(self.outputs, self.static_outputs, strict=True)]
        return [view.clone() for view in views] if self.copy_outputs else views

    def version(self) -> int:
        """Grows whenever a parameter is written in place."""
        return sum([p._version for p in self.params]) + sum([p._version for p in self.frozen])

    def reset(self) -> None:
        self.closed = True
        self.forward.reset()
        if self.backward is not None:
            self.backward.reset()


class Run:
    """One forward that waits for its backward. It holds its slot until then, or until nobody can ask for it any more."""

    def __init__(self, pair: Pair, leaves: Sequence[torch.Tensor], sizes: tuple[int, int],
                 batch: tuple[int, int] | None, release: Callable[[], None],
                 count_backward: Callable[[], None]) -> None:
        self.pair = pair
        self._leaves = leaves
        self._sizes = sizes
        self._batch = batch
        self._release = release
        self._count_backward = count_backward
        self._version = pair.version()
        self._waits = True

    def forward(self) -> list[torch.Tensor]:
        leaves, self._leaves = self._leaves, ()
        return self.pair.play(leaves, *self._sizes, self._batch)

    def backward(self, grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        pair = self.pair
        if torch.is_grad_enabled():
            raise ReplayError("a captured backward has no derivative, so create_graph=True can't be replayed. Call the "
                              "block itself, graphed.block(...), where second derivatives are needed.")
        if not self._waits or pair.closed:
            raise ReplayError("a captured backward was asked for twice, or after reset(): the graph's memory holds the "
                              "forward's values for one backward only. Call the block itself, graphed.block(...), "
                              "where retain_graph=True is needed.")
        if pair.version() != self._version:
            raise ReplayError("a parameter was modified in place between the forward and its backward, which would use "
                              "the new values; step the optimizer after the backward")
        waiting = iter(pair.grads)
        for output, static, grad in zip(pair.outputs, pair.static_outputs, grads, strict=True):
            if output.differentiable:
                self._copy_grad(next(waiting), grad, output.holds_batch(static))
        pair.backward.replay()
        self._count_backward()
        inputs = [None if grad is None else self._part(leaf, grad).clone() for leaf, grad in pair.input_grads]
        params = pair.param_grads if _grads_are_accumulated(pair.params) else [
            None if grad is None else grad.clone() for grad in pair.param_grads]
        self.release()
        return [*inputs, *params]

    def _copy_grad(self, copy: Copy, grad: torch.Tensor | None, holds_batch: bool) -> None:
        if grad is None:
            copy.clear()
            return
        if self._batch is not None and holds_batch:
            grad = grad.reshape(1, -1, *grad.shape[2:])
        copy(grad, self.pair.static_cu)

    def _part(self, leaf: Leaf, grad: torch.Tensor) -> torch.Tensor:
        return grad if leaf.role is None else grad.narrow(leaf.role.dim, 0, leaf.role.size(*self._sizes))

    def release(self) -> None:
        if self._waits:
            self._waits = False
            self._release()

    def __del__(self) -> None:
        self.release()


def _grads_are_accumulated(params: Sequence[torch.nn.Parameter]) -> bool:
    """Whether the engine will hand parameter gradients to accumulation alone, which copies a tensor that is held here.

    torch.autograd.grad and hooks hand out the tensor itself, which the next replay would overwrite.
    """
    return torch._C._will_engine_execute_node(_ANCHOR_NODE) and not any(p._backward_hooks for p in params)


def replay_with_grad(run: Run, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Replays a forward so that its backward will be replayed too; `tensors` are all that require grad."""
    try:
        return _Replay.apply(run, _ANCHOR, *tensors)
    except BaseException:
        run.release()
        raise


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx, run: Run, anchor: torch.Tensor, *tensors: torch.Tensor):
        ctx.run = run
        ctx.set_materialize_grads(False)
        outs = run.forward()
        ctx.mark_non_differentiable(*(out for out, output in zip(outs, run.pair.outputs, strict=True)
                                      if not output.differentiable))
        return tuple(outs)

    @staticmethod
    def backward(ctx, *grads):
        return None, None, *ctx.run.backward(grads)
