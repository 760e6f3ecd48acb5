"""The NVIDIA backend: compiled Triton kernels and CUDA graphs."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, cached_property, partial
from typing import Any

import torch
from torch._C._dynamo.guards import _empty_strided_cuda

from graphlin.backends.accelerator import AcceleratorBackend
from graphlin.backends.caching_pool import CachingPool
from graphlin.backends.cuda.ahead import compiling
from graphlin.backends.cuda.graph import BREAKS, SYNCS, QuietGraph, abandon, start_autograd
from graphlin.backends.cuda.launch import PreparedLaunch, run_compiled
from graphlin.backends.cuda.node import UpdatableGraph, can_update
from graphlin.backends.cuda.tiles import launch_record
from graphlin.backends.protocol import Allocate


class CudaBackend(AcceleratorBackend):
    """A thin layer over `torch.cuda`."""

    device_type = "cuda"
    failures, sync_failures = BREAKS, SYNCS
    launch_calls = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch", "cudaMemcpyAsync", "cudaMemsetAsync")
    pool_model = CachingPool
    abandon = staticmethod(abandon)
    launch_record = staticmethod(launch_record)
    launch = staticmethod(run_compiled)
    compiling = staticmethod(compiling)
    prepare = PreparedLaunch

    @cached_property
    def graph_type(self) -> type[QuietGraph]:
        return UpdatableGraph if can_update() else QuietGraph

    def side_stream(self, device: torch.device) -> torch.cuda.Stream:
        start_autograd(self._index(device))
        return super().side_stream(device)

    @contextmanager
    def capture(self, *, pool: Any, stream: torch.cuda.Stream, error_mode: str = "thread_local") -> Iterator[QuietGraph]:
        """A host sync is refused before it could invalidate the capture."""
        with super().capture(pool=pool, stream=stream, error_mode=error_mode) as graph, self.syncs_refused():
            yield graph

    def arch(self, device: torch.device) -> str:
        return _arch(self._index(device))

    def num_cores(self, device: torch.device) -> int:
        return _multiprocessors(self._index(device))

    def allocator(self, dtype: torch.dtype, device: torch.device) -> Allocate:
        return partial(_empty_on, self._index(device), dtype)


def _empty_on(index: int, dtype: torch.dtype, sizes: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
    """Memory past PyTorch's dispatch, which takes the host half of the time; it comes from the current device."""
    if torch._C._cuda_getDevice() == index:
        return _empty_strided_cuda(sizes, strides, dtype)
    return torch.empty_strided(sizes, strides, dtype=dtype, device=torch.device("cuda", index))


@cache
def _arch(index: int) -> str:
    major, minor = torch.cuda.get_device_capability(index)
    return f"sm_{major}{minor}"


@cache
def _multiprocessors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count
