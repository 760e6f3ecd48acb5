"""Tensors without memory, of torch's meta device: shapes as an NVIDIA device of compute capability 9.0 has them, no work."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import torch

from graphlin.backends.caching_pool import CachingPool
from graphlin.backends.cuda.tiles import launch_record
from graphlin.backends.protocol import Graph, GraphBackend, LaunchRecord
from graphlin.errors import BackendUnavailable


class MetaBackend:
    """Lets a block on the meta device run, for its shapes, and be priced where no GPU is; it records no graph."""

    device_type = "meta"

    def is_available(self) -> bool:
        return True

    def new_pool(self) -> NoReturn:
        raise BackendUnavailable("a block on the meta device has no memory to capture; move it to a device, or ask "
                                 "graphlin.price what a capture would hold")

    def pool_bytes(self, pool: Any, device: torch.device) -> int:
        return 0

    def pool_model(self) -> CachingPool:
        return CachingPool()

    def side_stream(self, device: torch.device) -> None:
        return None

    def stream(self, stream: None) -> NoReturn:
        self.new_pool()

    def synchronize(self, device: torch.device) -> None:
        return None

    def syncs_refused(self) -> NoReturn:
        self.new_pool()

    def is_capturing(self) -> bool:
        return False

    def capture(self, *, pool: Any, stream: None, error_mode: str = "thread_local") -> AbstractContextManager[Graph]:
        return self.new_pool()

    def arch(self, device: torch.device) -> str:
        return "sm_90"

    def num_cores(self, device: torch.device) -> int:
        return 132

    def launch_record(self, kernel: str, **problem: Any) -> LaunchRecord:
        return launch_record(kernel, **problem)

    def launch(self, kernel: Any, grid: int, args: tuple, constexprs: Mapping[str, Any], record: LaunchRecord) -> None:
        return None

    compiling = GraphBackend.compiling
    prepare = GraphBackend.prepare
    allocator = GraphBackend.allocator

    def count_launches(self, events: Sequence[Any]) -> int:
        return 0
