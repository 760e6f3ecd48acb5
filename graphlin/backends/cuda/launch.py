"""Launches compiled Triton kernels on the current CUDA stream."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton

from graphlin.backends.cuda.node import NodeLaunch, UpdatableGraph
from graphlin.backends.protocol import LaunchRecord


def run_compiled(kernel: Any, grid: int, args: tuple, constexprs: Mapping[str, Any], record: LaunchRecord) -> Any:
    """Launches on the device of the first tensor, which Triton does not choose by itself; returns the compiled kernel."""
    with _device_of(args):
        return kernel[(grid,)](*args, **constexprs, **record.tiles, num_warps=record.num_warps, num_stages=record.num_stages)


def compile_only(kernel: Any, args: tuple, constexprs: Mapping[str, Any], record: LaunchRecord) -> None:
    """Lets Triton compile, or load, what `run_compiled` would launch; under its AsyncCompileMode it waits for nothing."""
    with _device_of(args):
        kernel.warmup(*args, grid=(1,), **constexprs, **record.tiles, num_warps=record.num_warps, num_stages=record.num_stages)


def _device_of(args: tuple) -> AbstractContextManager:
    index = next(a.get_device() for a in args if isinstance(a, torch.Tensor))
    return nullcontext() if index == torch.cuda.current_device() else torch.cuda.device(index)


class PreparedLaunch:
    """Launches of one kernel that pass by Triton's own dispatch, which takes the host longer than everything else in them.

    Triton compiles a kernel anew for other dtypes, absent tensors and pointers that are not aligned to 16 bytes. The first
    launch of each such form is Triton's own; what it compiled is launched from then on. Triton's are also those that a
    profiler's hook watches, and those while another device is current.
    """

    def __init__(self, kernel: Any, grid: int, fixed: tuple, constexprs: Mapping[str, Any], record: LaunchRecord) -> None:
        self._kernel, self._grid, self._fixed, self._constexprs, self._record = kernel, grid, fixed, constexprs, record
        self._index = next(a.get_device() for a in fixed if isinstance(a, torch.Tensor))
        named = {**constexprs, **record.tiles}
        self._rest = (*(a.data_ptr() if isinstance(a, torch.Tensor) else a for a in fixed),
                      *(named[name] for name in kernel.arg_names[-len(named):]))
        self._forms: dict[tuple, tuple] = {}

    def __call__(self, tensors: tuple[torch.Tensor | None, ...], integers: tuple[int, ...]) -> None:
        pointers, form = [], []
        for tensor in tensors:
            pointers.append(pointer := 0 if tensor is None else tensor.data_ptr())
            form.append(None if tensor is None else (tensor.dtype, pointer % 16))
        compiled = self._forms.get(form := tuple(form))
        if compiled is None or torch._C._cuda_getDevice() != self._index or _is_watched():
            self._run_by_triton(form, (*tensors, *integers, *self._fixed))
            return
        run, options = compiled
        run(self._grid, 1, 1, torch._C._cuda_getCurrentRawStream(self._index), *options, *pointers, *integers, *self._rest)

    def record(self, graph: Any, tensors: tuple[torch.Tensor, ...], integers: tuple[int, ...]) -> NodeLaunch | None:
        """Launches into a graph that is being captured. What is returned gives the launch other arguments, of the forms of these;
        None, and no launch, where that can't be."""
        if not isinstance(graph, UpdatableGraph):
            return None
        self(tensors, integers)
        return NodeLaunch(graph, self._index, tensors, len(integers))

    def _run_by_triton(self, form: tuple, args: tuple) -> None:
        kernel = run_compiled(self._kernel, self._grid, args, self._constexprs, self._record)
        if hasattr(triton, "knobs"):  # before, the launcher took other arguments
            self._forms[form] = _launcher_of(kernel)


def _launcher_of(kernel: Any) -> tuple[Callable[..., None], tuple]:
    """What launches a compiled kernel, without hooks, and its arguments between the stream and the kernel's own."""
    run, options = kernel.run, (kernel.packed_metadata, None, None, None)
    if triton.__version__.startswith("3.6.") and not run.global_scratch_size and not run.profile_scratch_size:
        # There it is Python that only adds these; what it calls takes others in other versions.
        return run.launch, (kernel.function, run.launch_cooperative_grid, run.launch_pdl, None, None, *options)
    return run, (kernel.function, *options)


def _is_watched() -> bool:
    """Whether a profiler has hooks on launches; Triton's have been a list since 3.5, one function or None before."""
    hooks = triton.knobs.runtime
    return bool(getattr(hooks.launch_enter_hook, "calls", hooks.launch_enter_hook)
                or getattr(hooks.launch_exit_hook, "calls", hooks.launch_exit_hook))
