"""The Ascend backend: triton-ascend kernels and ACL graphs. The only part of the package that imports torch_npu."""

import importlib.util
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch

from graphlin.backends.accelerator import AcceleratorBackend
from graphlin.backends.caching_pool import Block, CachingPool
from graphlin.backends.npu.failures import FAILURES
from graphlin.backends.npu.tiles import launch_record
from graphlin.backends.protocol import LaunchRecord
from graphlin.errors import BackendUnavailable

_PADDING = 32


class PaddedPool(CachingPool):
    """torch_npu's allocator is made after PyTorch's for CUDA and pads every allocation (NPUCachingAllocator.cpp)."""

    def allocate(self, nbytes: int) -> Block:
        return super().allocate(nbytes + _PADDING)


class NpuBackend(AcceleratorBackend):
    """A thin layer over `torch.npu`."""

    device_type = "npu"
    failures = sync_failures = FAILURES
    # ACL's; that torch.profiler names them so on a device was not seen yet.
    launch_calls = ("aclrtLaunch", "rtKernelLaunch", "aclmdlRIExecute", "aclnn", "aclrtMemcpyAsync", "aclrtMemsetAsync")
    pool_model = PaddedPool
    launch_record = staticmethod(launch_record)

    def __init__(self) -> None:
        if importlib.util.find_spec("torch_npu") is None:
            raise BackendUnavailable("torch_npu is not installed. Install graphlin[npu] on a machine with an Ascend 910B.")
        try:
            from graphlin.backends.npu.graph import AclGraph, alias
        except (ImportError, OSError) as error:
            raise BackendUnavailable(f"torch_npu can't be loaded ({error}). Install CANN and source its set_env.sh before Python "
                                     "starts.") from error
        super().__init__()
        self.graph_type, self.alias = AclGraph, alias

    def arch(self, device: torch.device) -> str:
        return torch.npu.get_device_name(self._index(device))

    def num_cores(self, device: torch.device) -> int:
        return _cube_cores(self._index(device))

    def launch(self, kernel: Any, grid: int, args: tuple, constexprs: Mapping[str, Any], record: LaunchRecord) -> None:
        """Launches on the device of the first tensor. A record of more than one stage has its loads double-buffered; warps don't
        exist here."""
        with torch.npu.device(next(a.device for a in args if isinstance(a, torch.Tensor))):
            kernel[(grid,)](*args, **constexprs, **record.tiles, multibuffer=record.num_stages > 1)


@cache
def _cube_cores(index: int) -> int:
    """Cores that multiply matrices; each has two vector cores."""
    from triton.runtime import driver
    return driver.active.utils.get_device_properties(index)["num_aicore"]
