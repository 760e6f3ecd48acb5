"""The Ascend backend: triton-ascend kernels and ACL graphs. The only part of the package that imports torch_npu."""

import importlib.util
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any

import torch

from graphlin.backends.cuda.memory import Block, CachingPool
from graphlin.backends.interpreter import is_interpreting
from graphlin.backends.memory import without_ownership
from graphlin.backends.npu.launch import cube_cores, run_compiled
from graphlin.backends.npu.tiles import launch_record
from graphlin.backends.protocol import GraphBackend, LaunchRecord
from graphlin.errors import BackendUnavailable

# Beginnings of ACL's calls that put work on a stream; that torch.profiler names them so on a device was not seen yet.
_LAUNCHES = ("aclrtLaunch", "rtKernelLaunch", "aclmdlRIExecute", "aclnn", "aclrtMemcpyAsync", "aclrtMemsetAsync")

_PADDING = 32


class PaddedPool(CachingPool):
    """torch_npu's allocator is made after PyTorch's for CUDA and pads every allocation (NPUCachingAllocator.cpp)."""

    def allocate(self, nbytes: int) -> Block:
        return super().allocate(nbytes + _PADDING)


class NpuBackend:
    """A thin layer over `torch.npu`."""

    device_type = "npu"

    def __init__(self) -> None:
        if importlib.util.find_spec("torch_npu") is None:
            raise BackendUnavailable("torch_npu is not installed. Install graphlin[npu] on a machine with an Ascend 910B.")
        try:
            from graphlin.backends.npu import graph
        except (ImportError, OSError) as error:
            raise BackendUnavailable(f"torch_npu can't be loaded ({error}). Install CANN and source its set_env.sh before Python "
                                     "starts.") from error
        self._graph = graph

    @cached_property
    def _available(self) -> bool:
        return torch.npu.is_available() and importlib.util.find_spec("triton") is not None and not is_interpreting()

    def is_available(self) -> bool:
        return self._available

    def new_pool(self) -> Any:
        return torch.npu.graph_pool_handle()

    def pool_bytes(self, pool: Any, device: torch.device) -> int:
        return self._graph.pool_bytes(pool, _index(device))

    def pool_model(self) -> PaddedPool:
        return PaddedPool()

    def unowned(self, tensors: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        return without_ownership(tensors, self._graph.alias)

    def side_stream(self, device: torch.device) -> Any:
        return torch.npu.Stream(device)

    def stream(self, stream: Any) -> AbstractContextManager:
        return torch.npu.stream(stream)

    def synchronize(self, device: torch.device) -> None:
        torch.npu.synchronize(device)

    def syncs_refused(self) -> AbstractContextManager:
        return self._graph.syncs_refused()

    def is_capturing(self) -> bool:
        return torch.npu.is_current_stream_capturing()

    def capture(self, *, pool: Any, stream: Any, error_mode: str = "thread_local") -> AbstractContextManager:
        return self._graph.record(pool, stream, error_mode)

    def arch(self, device: torch.device) -> str:
        return torch.npu.get_device_name(_index(device))

    def num_cores(self, device: torch.device) -> int:
        return cube_cores(_index(device))

    def launch_record(self, kernel: str, *, arch: str, K: int, V: int, R: int, BT: int, dtype: torch.dtype) -> LaunchRecord:
        return launch_record(kernel, arch=arch, K=K, V=V, R=R, BT=BT, dtype=dtype)

    def launch(self, kernel: Any, grid: int, args: tuple, constexprs: Mapping[str, Any], record: LaunchRecord) -> None:
        run_compiled(kernel, grid, args, constexprs, record)

    compiling = GraphBackend.compiling
    prepare = GraphBackend.prepare
    allocator = GraphBackend.allocator

    def count_launches(self, events: Sequence[Any]) -> int:
        return sum(event.name.startswith(_LAUNCHES) for event in events)


def _index(device: torch.device) -> int:
    return torch.npu.current_device() if device.index is None else device.index
