"""Records the ATen ops and Triton launches of a CPU run on fixed storage, and replays them.

A stand-in for a device graph: what it records it repeats on the same addresses without running the block's Python
again, and what a device capture would refuse it refuses.
"""

import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn
from weakref import WeakSet

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from graphlin.backends.diagnostics import blame
from graphlin.backends.host.launches import REPLAY_MARK
from graphlin.errors import CaptureError, HostSync

_HOST_READS = ("item", "tolist", "numpy", "__array__", "__bool__", "__int__", "__float__", "__index__", "__complex__")
_UNINITIALISED = {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"}
_open = threading.local()
_one_capture = threading.Lock()


class HostPool:
    """The graphs recorded under one pool; counts the storages that they keep."""

    def __init__(self) -> None:
        self.graphs: WeakSet[HostGraph] = WeakSet()

    def nbytes(self) -> int:
        storages = {key: size for graph in self.graphs for key, size in graph.storages.items()}
        return sum(storages.values())


class HostGraph:
    """Recorded steps. Tensors in them are aliases without history, so that no autograd graph is kept alive."""

    def __init__(self, pool: HostPool) -> None:
        self.storages: dict[int, int] = {}
        self.steps: list[Callable[[], Any]] = []
        self._pool = pool
        pool.graphs.add(self)

    def replay(self) -> None:
        if recorder() is not None:
            raise CaptureError("a host graph cannot be replayed inside a host capture; call the block itself there")
        with torch.no_grad(), torch.autocast("cpu", enabled=False), torch.profiler.record_function(REPLAY_MARK):
            for step in self.steps:
                step()

    def reset(self) -> None:
        self.steps.clear()
        self.storages.clear()

    def pool(self) -> HostPool:
        return self._pool


def recorder() -> "Recorder | None":
    """The capture that is open in this thread."""
    return getattr(_open, "recorder", None)


@contextmanager
def record(pool: HostPool) -> Iterator[HostGraph]:
    """Records what the body does. Raises HostSync from the line that reads a value; a failed graph is left empty."""
    if recorder() is not None:
        raise CaptureError("a host capture is already open in this thread; captures do not nest")
    graph = HostGraph(pool)
    with _one_capture:
        _open.recorder = Recorder(graph)
        try:
            with _host_reads_refused(), _open.recorder:
                yield graph
        except BaseException:
            graph.reset()
            raise
        finally:
            _open.recorder = None


class Recorder(TorchDispatchMode):
    """Sees every op below autograd, in forward and backward, and appends a step that repeats it in place."""

    def __init__(self, graph: HostGraph) -> None:
        super().__init__()
        self.paused = False
        self._graph = graph

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if _is_data_dependent(func, args, kwargs):
            _refuse_host_read(str(func))
        if _is_python_op(func):
            with self:  # the op's own kernel, so that what it does is recorded instead of its Python
                return func.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CPU), *args, **kwargs)
        fixed_args, fixed_kwargs = tree_map_only(torch.Tensor, torch.Tensor.detach, (args, kwargs))
        out = func(*args, **kwargs)
        self._append(func, fixed_args, fixed_kwargs, out)
        return out

    def launch(self, run: Callable[..., None], args: tuple) -> None:
        """Runs a Triton launch now and at every replay; the interpreter's own ops are no part of the record."""
        fixed = tuple(a.detach() if isinstance(a, torch.Tensor) else a for a in args)
        self.paused = True
        try:
            with _disable_current_modes():
                run(fixed)
        finally:
            self.paused = False
        self._graph.steps.append(lambda: run(fixed))

    def _append(self, func, args, kwargs, out) -> None:
        read = {_storage(t) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        outputs = tree_leaves(out)
        fresh = [(i, t.detach()) for i, t in enumerate(outputs)
                 if isinstance(t, torch.Tensor) and _storage(t) not in read]
        for _, tensor in fresh:
            self._graph.storages[_storage(tensor)] = tensor.untyped_storage().nbytes()
        if func._schema.name.removeprefix("aten::") in _UNINITIALISED:
            self._graph.steps.append(_keep(fresh))
        elif func._schema.is_mutable and torch.Tag.inplace_view not in func.tags or fresh:
            self._graph.steps.append(_repeat(func, args, kwargs, fresh))


def _repeat(func, args, kwargs, fresh) -> Callable[[], None]:
    def step() -> None:
        outputs = tree_leaves(func(*args, **kwargs))
        for i, fixed in fresh:
            fixed.copy_(outputs[i])
    return step


def _keep(fresh) -> Callable[[], Any]:
    return lambda: fresh


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _is_data_dependent(func, args, kwargs) -> bool:
    if func is torch.ops.aten.index.Tensor:  # tagged for its masks alone
        return any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
    if func is torch.ops.aten.repeat_interleave.Tensor:
        return kwargs.get("output_size") is None
    return torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags


def _is_python_op(func) -> bool:
    if func.namespace in ("aten", "prim", "prims"):
        return False
    name = func._schema.name.replace("::", "/")
    return any(f"{name}/{key}" in torch.library._impls for key in ("CPU", "CompositeExplicitAutograd"))


def _refuse_host_read(what: str) -> NoReturn:
    raise HostSync(f"{what} reads a tensor's value on the host at {blame(traceback.extract_stack())}: a graph cannot "
                   "repeat that. Keep the value on the device (masks, torch.where, bounded sizes) or compute it "
                   "outside the block.")


@contextmanager
def _host_reads_refused() -> Iterator[None]:
    """Some reads of CPU tensors are invisible to dispatch modes, so the methods themselves are replaced."""
    own = {name: vars(torch.Tensor).get(name) for name in _HOST_READS}
    for name in _HOST_READS:
        setattr(torch.Tensor, name, _refusing(name, getattr(torch.Tensor, name)))
    try:
        yield
    finally:
        for name, method in own.items():
            if method is None:
                delattr(torch.Tensor, name)
            else:
                setattr(torch.Tensor, name, method)


def _refusing(name: str, method: Callable) -> Callable:
    def read(self, *args, **kwargs):
        open_recorder = recorder()
        if open_recorder is not None and not open_recorder.paused:
            _refuse_host_read(f"Tensor.{name}")
        return method(self, *args, **kwargs)
    return read
