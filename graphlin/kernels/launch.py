"""The one place where a kernel is launched, and where its launch record is looked up."""

from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from graphlin.backends import LaunchRecord, Prepared, get_backend
from graphlin.errors import GraphlinError
from graphlin.kernels.ahead import played


def launch(kernel: Any, grid: int, *args: Any, record: LaunchRecord, **constexprs: Any) -> None:
    """Launches `grid` programs of a kernel on the device of its first tensor argument; an empty grid launches nothing.

    Absent tensors are None and guarded by a constexpr in the kernel. The record's tiles are constexprs too. Tensors without
    memory (fake ones, with which captures are priced, or of the meta device) have shapes alone, so nothing is launched; nor is
    it where an op is played for its launches (`ahead`), which are compiled. torch.compile runs it beside its graphs. Raises
    GraphlinError where a graph is traced that would lack the launch.
    """
    if is_dynamo_compiling():
        torch.compiler.disable(launch)(kernel, grid, *args, record=record, **constexprs)
        return
    if grid == 0:
        return
    for tensor in args:
        if isinstance(tensor, torch.Tensor):
            if (compile_ahead := played.get()) is not None:
                compile_ahead(kernel, args, constexprs, record)
            elif _has_memory(tensor):
                get_backend(tensor.device).launch(kernel, grid, args, constexprs, record)
            elif _is_traced():
                raise GraphlinError(f"kernel {kernel.fn.__name__} is launched while PyTorch traces a graph of its operations "
                                    "(torch.export, make_fx), which has no launches: what is exported would return memory that "
                                    "nobody has written. Export the parts around the op; torch.compile calls it between its "
                                    "graphs.")
            return


def prepare(kernel: Any, grid: int, *fixed: Any, record: LaunchRecord, **constexprs: Any) -> Prepared:
    """`launch` for a kernel that is launched again and again, on the device of the first tensor among its last arguments.

    >>> copy = prepare(copy_active_rows, grid, y, None, None, 4096, 64, 1, record=record, N_MAX=0, HAS_CU=True, FILL_CU=False,
    ...                HAS_MAIL=False)
    >>> copy((x, cu), (N, T, 0, 0, 0, 0))
    """
    tensor = next(a for a in fixed if isinstance(a, torch.Tensor))
    if grid == 0 or not _has_memory(tensor):
        return lambda tensors, integers: None
    return get_backend(tensor.device).prepare(kernel, grid, fixed, constexprs, record)


def _has_memory(tensor: torch.Tensor) -> bool:
    return tensor.untyped_storage().device.type != "meta"


def _is_traced() -> bool:
    """Whether operations on tensors without memory are noted for a graph of PyTorch's."""
    proxies = torch._C._TorchDispatchModeKey.PROXY
    return (torch._C._get_dispatch_mode(proxies) or torch._ops._get_dispatch_mode_pre_dispatch(proxies)) is not None


def record_for(kernel: str, device: torch.device, *, K: int = 0, V: int = 0, R: int = 1, BT: int = 64,
               dtype: torch.dtype = torch.float32) -> LaunchRecord:
    """The launch record of a kernel, by name, for this device and problem."""
    backend = get_backend(device)
    return backend.launch_record(kernel, arch=backend.arch(device), K=K, V=V, R=R, BT=BT, dtype=dtype)


def grid_stride(tasks: int, record: LaunchRecord, device: torch.device) -> int:
    """Programs of a kernel that strides over `tasks`: the record's `waves` a core, no more than there are tasks, at least one
    (which zeroes the inactive rows where there is no chunk)."""
    return max(1, min(tasks, record.waves * get_backend(device).num_cores(device)))


def programs_of(tasks: int, record: LaunchRecord, device: torch.device) -> int:
    """Programs of a kernel whose record says by PERSISTENT whether it strides over its tasks or has a program for each."""
    return grid_stride(tasks, record, device) if record.tiles["PERSISTENT"] else tasks


def is_crowded(programs: int, device: torch.device) -> bool:
    """Whether there are more programs than cores."""
    return programs > get_backend(device).num_cores(device)
