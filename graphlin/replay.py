"""A captured forward with its backward, and the one autograd.Function that replays them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from typing import Any, Protocol

import torch
from torch._C._functorch import is_batchedtensor, is_legacy_batchedtensor

from graphlin.backends import Allocate, Entry, Graph
from graphlin.errors import ReplayError
from graphlin.packing import Leaf, Output

_version = attrgetter("_version")


class Copy(Protocol):
    """Fills one static tensor from a call's tensor; `cu` tells the active rows. The one that fills static_cu too takes, beside
    that, where the graph is to deliver and the Entry of its copy, if it has one."""

    static: torch.Tensor

    def __call__(self, x: torch.Tensor, cu: torch.Tensor | None, *told: Any) -> None: ...

    def clear(self) -> None: ...


@dataclass(frozen=True)
class Delivery:
    """The output that a forward graph writes into memory of the call's own: which of them it is, its shape, and what makes
    memory."""

    index: int
    leaf: Leaf
    allocate: Allocate

    def memory(self, tokens: int) -> torch.Tensor:
        """Uninitialised memory for `tokens` rows of the output, contiguous; with strides it costs the host less than without."""
        before, after, row, strides = self._form
        return self.allocate((*before, tokens, *after), (row * (tokens or 1),) * len(before) + strides)

    @cached_property
    def _form(self) -> tuple[tuple[int, ...], tuple[int, ...], int, tuple[int, ...]]:
        """Sizes around the dim of rows (those before it are 1, or no graph could deliver), and strides from that dim on."""
        strides = torch.empty((1, *self.leaf.after), device="meta").stride()
        return self.leaf.before, self.leaf.after, strides[0], strides


@dataclass
class Pair:
    """Graphs of one mode in one slot, and the static tensors that they read and write.

    `inputs` are (index of the call's tensor, its copy, static cu_seqlens to fill beside it or None); `delivery` is the
    output that the graph copies to where the copy-in has told it to, None where there is none; `entry` is the copy-in of what
    fills static_cu as a launch of the forward graph, None where no graph's launches can be given other tensors; `grads` are the
    copies of output gradients, one for each differentiable output; `input_grads` and `param_grads` are what the
    backward graph writes (None where it writes nothing), in the order in which the tensors entered autograd; `params` are
    those that require grad, and `reads` what the backward may read of the caller's: all parameters, the buffers that the
    forward does not write itself, the static inputs with cu_seqlens, and static outputs of which the caller has views.
    `keeps` are the plain tensors of the block (a cached table), which the graphs may read after the block has let go of them.

    Once recorded, the tensors that the graphs alone write (`static_outputs`, unless a caller may hold views of them, and the
    gradients) do not keep their memory: the graphs do, and later captures in the slot's pool use it again.
    """

    forward: Graph
    inputs: list[tuple[int, Copy, torch.Tensor | None]]
    cu: int | None
    static_cu: torch.Tensor | None
    outputs: list[Output]
    static_outputs: list[torch.Tensor]
    rebuild: Callable[[list[torch.Tensor]], Any]
    copy_outputs: bool
    delivery: Delivery | None = None
    entry: Entry | None = None
    backward: Graph | None = None
    grads: list[Copy] = field(default_factory=list)
    input_grads: list[tuple[Leaf, torch.Tensor | None]] = field(default_factory=list)
    param_grads: list[torch.Tensor | None] = field(default_factory=list)
    params: list[torch.nn.Parameter] = field(default_factory=list)
    reads: list[torch.Tensor] = field(default_factory=list)
    keeps: list[torch.Tensor] = field(default_factory=list)
    closed: bool = False

    def copy_in(self, leaves: Sequence[torch.Tensor], fresh: torch.Tensor | None = None, entry: Entry | None = None) -> None:
        """Fills the static inputs, and tells the graph to deliver its output to `fresh`, if given, and else nowhere.

        Before every replay, since a graph that is told nothing new delivers to where it did before. With `entry` the next replay
        does what it can of it; the tensors must live until that is enqueued.
        """
        cu = None if self.cu is None else leaves[self.cu].contiguous()
        if self.entry is not None and (entry is None or cu is not leaves[self.cu]):
            self.entry.enable(False)
            entry = None
        offset = 0 if fresh is None else fresh.data_ptr() - self._delivered_from
        for index, copy, static_cu in self.inputs:
            if static_cu is None:
                copy(leaves[index], cu)
            else:
                copy(leaves[index], cu, static_cu, offset, entry)

    def play(self, leaves: Sequence[torch.Tensor], tokens: int, seqs: int,
             batch: tuple[int, int] | None) -> list[torch.Tensor]:
        """One forward: copy in, replay, copy out what the graph has not delivered."""
        if self.closed:
            raise _reset_during_call()
        fresh = self.fresh(tokens)
        try:
            self.copy_in(leaves, fresh, self.entry)
            self.forward.replay()
        except BaseException:  # what the static inputs hold now is not known
            for left in self._left:
                left.lent = True
            raise
        if self.closed:
            raise _reset_during_call()
        outs = [fresh] * len(self.outputs)
        for i in self._taken:
            outs[i] = self.outputs[i].take(self.static_outputs[i], tokens, seqs, batch, self.copy_outputs)
        if batch is not None and fresh is not None:
            outs[self.delivery.index] = self.outputs[self.delivery.index].batched(fresh, batch)
        return outs

    @property
    def _left(self) -> list[Any]:
        return [copy.left for _, copy, _ in self.inputs if hasattr(copy, "left")]

    @cached_property
    def _delivered_from(self) -> int:
        """Where the graph has its own copy of what it delivers."""
        return self.static_outputs[self.delivery.index].data_ptr()

    @cached_property
    def _taken(self) -> list[int]:
        """The outputs that are copied or viewed after the replay."""
        return [i for i in range(len(self.outputs)) if self.delivery is None or i != self.delivery.index]

    @cached_property
    def constant_outputs(self) -> list[int]:
        """The outputs that take no gradient."""
        return [i for i, output in enumerate(self.outputs) if not output.differentiable]

    def fresh(self, tokens: int) -> torch.Tensor | None:
        """Memory of the call's own for what the graph delivers."""
        return None if self.delivery is None else self.delivery.memory(tokens)

    def version(self) -> int:
        """Grows whenever something that the backward reads is written in place."""
        return sum(map(_version, self.reads))

    def copies_of_param_grads(self) -> list[torch.Tensor | None]:
        """The parameters' gradients in memory of their own, which accumulation takes over where there was no gradient.

        What a hook, torch.autograd.grad or a reducer is handed is never the graph's memory, that the next replay overwrites.
        """
        copies: list[torch.Tensor | None] = [None] * len(self.param_grads)
        for places in self._places_by_dtype:
            same = [self.param_grads[i] for i in places]
            for i, copy in zip(places, torch._foreach_mul(same, 1.0), strict=True):  # exact, in one launch
                copies[i] = copy
        return copies

    @cached_property
    def _places_by_dtype(self) -> list[list[int]]:
        places: dict[torch.dtype, list[int]] = {}
        for i, grad in enumerate(self.param_grads):
            if grad is not None:
                places.setdefault(grad.dtype, []).append(i)
        return list(places.values())

    def reset(self) -> None:
        """Lets go of the graphs, and of tensors whose memory goes with them."""
        self.closed = True
        self.static_outputs, self.input_grads, self.param_grads, self.keeps = [], [], [], []
        self.forward.reset()
        if self.backward is not None:
            self.backward.reset()


def _reset_during_call() -> ReplayError:
    return ReplayError("the captured block was reset or refreshed by another thread during this call, so that there is no "
                       "result; call it again, and reset or refresh it between calls")


class Run:
    """One forward that waits for its backward. It holds its slot until then, or until nobody can ask for it any more."""

    __slots__ = ("pair", "_batch", "_count_backward", "_leaves", "_release", "_sizes", "_version", "_waits")

    def __init__(self, pair: Pair, leaves: Sequence[torch.Tensor], sizes: tuple[int, int],
                 batch: tuple[int, int] | None, release: Callable[[], None],
                 count_backward: Callable[[], None]) -> None:
        self.pair = pair
        self._leaves = leaves
        self._sizes = sizes
        self._batch = batch
        self._release = release
        self._count_backward = count_backward
        self._version = 0
        self._waits = True

    def forward(self) -> list[torch.Tensor]:
        leaves, self._leaves = self._leaves, ()
        outs = self.pair.play(leaves, *self._sizes, self._batch)
        self._version = self.pair.version()  # copy-in writes too
        return outs

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
            raise ReplayError("a parameter, buffer, static input or view of an output was modified in place between the forward "
                              "and its backward, which would use the new values; step the optimizer, or write the next batch, "
                              "after the backward")
        try:
            self._copy_grads(grads)
        except RuntimeError as error:
            if any(map(_has_no_rows, grads)):
                raise ReplayError("a captured backward reads one dense gradient of each output, and was given a sparse one, or "
                                  "many at once (is_grads_batched=True, vectorize=True, vmap). Take them one by one, each from a "
                                  "call of its own, or call the block itself, graphed.block(...), there.") from error
            raise
        pair.backward.replay()
        self._count_backward()
        inputs = [None if grad is None else leaf.cut(grad, *self._sizes).clone(memory_format=torch.contiguous_format)
                  for leaf, grad in pair.input_grads]
        params = pair.copies_of_param_grads()
        self.release()
        return [*inputs, *params]

    def _copy_grads(self, grads: Sequence[torch.Tensor | None]) -> None:
        pair, waiting = self.pair, iter(self.pair.grads)
        for output, static, grad in zip(pair.outputs, pair.static_outputs, grads, strict=True):
            if output.differentiable:
                self._copy_grad(next(waiting), grad, output.holds_batch(static))

    def _copy_grad(self, copy: Copy, grad: torch.Tensor | None, holds_batch: bool) -> None:
        if grad is None:
            copy.clear()
            return
        if self._batch is not None and holds_batch:
            grad = grad.reshape(1, -1, *grad.shape[2:])
        copy(grad, self.pair.static_cu)

    def release(self) -> None:
        if self._waits:
            self._waits = False
            self._release()

    def __del__(self) -> None:
        self.release()


def _has_no_rows(grad: torch.Tensor | None) -> bool:
    """Whether a gradient has no memory of rows that could be copied."""
    return grad is not None and (grad.layout is not torch.strided or is_batchedtensor(grad) or is_legacy_batchedtensor(grad))


def replay_with_grad(run: Run, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Replays a forward so that its backward will be replayed too; `tensors` are all that require grad."""
    try:
        return _apply(run, *tensors)
    except BaseException:
        run.release()
        raise


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx, run: Run, *tensors: torch.Tensor):
        ctx.run = run
        ctx.set_materialize_grads(False)
        outs = run.forward()
        if constants := run.pair.constant_outputs:
            ctx.mark_non_differentiable(*[outs[i] for i in constants])
        return tuple(outs)

    @staticmethod
    def backward(ctx, *grads):
        return None, *ctx.run.backward(grads)


# Function.apply itself asks whether a transform of torch.func is active, which GraphedBlock has refused by then, and of each
# tensor whether one has left it behind, which costs the host as much as all the rest of it. The parameters of a block are no such
# tensors, and a call's own are copied by address: they can't be either. So this is the apply in C++ that it calls at last.
_apply = super(torch.autograd.Function, _Replay).apply
