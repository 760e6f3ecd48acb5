"""The NVIDIA backend: compiled Triton kernels and CUDA graphs."""

import importlib.util
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache, cached_property, partial
from typing import Any

import torch
from torch._C._dynamo.guards import _empty_strided_cuda

from graphlin.backends.cuda import graph as cuda_graph
from graphlin.backends.cuda.ahead import compiling
from graphlin.backends.cuda.launch import PreparedLaunch, run_compiled
from graphlin.backends.cuda.memory import CachingPool
from graphlin.backends.cuda.tiles import launch_record
from graphlin.backends.interpreter import is_interpreting
from graphlin.backends.memory import without_ownership
from graphlin.backends.protocol import Allocate, CompileAhead, LaunchRecord

# Beginnings of the runtime and driver calls that put work on a stream, as the profiler names them.
_LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch", "cudaMemcpyAsync", "cudaMemsetAsync")


class CudaBackend:
    """A thin layer over `torch.cuda`."""

    device_type = "cuda"

    @cached_property
    def _available(self) -> bool:
        return (torch.cuda.is_available() and importlib.util.find_spec("triton") is not None
                and not is_interpreting())

    def is_available(self) -> bool:
        return self._available

    def new_pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    def pool_bytes(self, pool: Any, device: torch.device) -> int:
        return cuda_graph.pool_bytes(pool, device)

    def pool_model(self) -> CachingPool:
        return CachingPool()

    def unowned(self, tensors: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        return without_ownership(tensors)

    def side_stream(self, device: torch.device) -> torch.cuda.Stream:
        cuda_graph.start_autograd(_index(device))
        return torch.cuda.Stream(device)

    def stream(self, stream: torch.cuda.Stream) -> AbstractContextManager:
        return torch.cuda.stream(stream)

    def synchronize(self, device: torch.device) -> None:
        torch.cuda.synchronize(device)

    def syncs_refused(self) -> AbstractContextManager:
        return cuda_graph.syncs_refused()

    def is_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def capture(self, *, pool: Any, stream: torch.cuda.Stream,
                error_mode: str = "thread_local") -> AbstractContextManager[torch.cuda.CUDAGraph]:
        return cuda_graph.record(pool, stream, error_mode)

    def arch(self, device: torch.device) -> str:
        return _arch(_index(device))

    def num_cores(self, device: torch.device) -> int:
        return _multiprocessors(_index(device))

    def launch_record(self, kernel: str, *, arch: str, K: int, V: int, R: int, BT: int, dtype: torch.dtype) -> LaunchRecord:
        return launch_record(kernel, arch=arch, K=K, V=V, R=R, BT=BT, dtype=dtype)

    def launch(self, kernel: Any, grid: int, args: tuple, constexprs: Mapping[str, Any], record: LaunchRecord) -> None:
        run_compiled(kernel, grid, args, constexprs, record)

    def compiling(self) -> AbstractContextManager[CompileAhead | None]:
        return compiling()

    def prepare(self, kernel: Any, grid: int, fixed: tuple, constexprs: Mapping[str, Any],
                record: LaunchRecord) -> PreparedLaunch:
        return PreparedLaunch(kernel, grid, fixed, constexprs, record)

    def allocator(self, dtype: torch.dtype, device: torch.device) -> Allocate:
        return partial(_empty_on, _index(device), dtype)

    def count_launches(self, events: Sequence[Any]) -> int:
        return sum(event.name.startswith(_LAUNCHES) for event in events)


def _empty_on(index: int, dtype: torch.dtype, sizes: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
    """Memory past PyTorch's dispatch, which takes the host half of the time; it comes from the current device."""
    if torch._C._cuda_getDevice() == index:
        return _empty_strided_cuda(sizes, strides, dtype)
    return torch.empty_strided(sizes, strides, dtype=dtype, device=torch.device("cuda", index))


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


@cache
def _arch(index: int) -> str:
    major, minor = torch.cuda.get_device_capability(index)
    return f"sm_{major}{minor}"


@cache
def _multiprocessors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count
