"""The CPU backend: Triton's interpreter runs the kernels, a recorder stands in for device graphs."""

import importlib.util
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from weakref import WeakSet

import torch

from graphlin.backends.diagnostics import blame
from graphlin.backends.host import graph as host_graph
from graphlin.backends.host.launch import run_interpreted
from graphlin.backends.host.launches import LAUNCH_MARK, count_launches
from graphlin.backends.host.memory import KeepingPool
from graphlin.backends.host.tiles import launch_record
from graphlin.backends.interpreter import choose_interpreter, is_interpreting
from graphlin.backends.memory import alias
from graphlin.backends.protocol import GraphBackend, LaunchRecord
from graphlin.errors import ColdKernel


class HostBackend:
    """Runs, records and replays on CPU tensors. Streams do not exist here, and the one core keeps grids small."""

    device_type = "cpu"

    def __init__(self) -> None:
        self._ran: set[tuple] = set()
        self._pools: WeakSet[host_graph.HostPool] = WeakSet()

    def is_available(self) -> bool:
        choose_interpreter()
        return is_interpreting() and importlib.util.find_spec("triton") is not None

    def new_pool(self) -> host_graph.HostPool:
        pool = host_graph.HostPool()
        self._pools.add(pool)
        return pool

    def pool_bytes(self, pool: host_graph.HostPool, device: torch.device) -> int:
        return pool.nbytes()

    def pool_model(self) -> KeepingPool:
        return KeepingPool()

    def unowned(self, tensors: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """A host graph holds what it writes; tensors that do not, beside it, show who uses them after its reset."""
        made = {storage for pool in self._pools for graph in pool.graphs for storage in graph.storages}
        return [alias(t) if t is not None and t.untyped_storage()._cdata in made else t for t in tensors]

    def side_stream(self, device: torch.device) -> None:
        return None

    def stream(self, stream: None) -> AbstractContextManager:
        return nullcontext()

    def synchronize(self, device: torch.device) -> None:
        return None

    def syncs_refused(self) -> AbstractContextManager:
        return nullcontext()

    def is_capturing(self) -> bool:
        return host_graph.recorder() is not None

    @contextmanager
    def capture(self, *, pool: host_graph.HostPool, stream: None,
                error_mode: str = "thread_local") -> Iterator[host_graph.HostGraph]:
        with host_graph.record(pool) as graph:
            yield graph

    def arch(self, device: torch.device) -> str:
        return "host"

    def num_cores(self, device: torch.device) -> int:
        return 1

    def launch_record(self, kernel: str, *, arch: str, K: int, V: int, R: int, BT: int, dtype: torch.dtype) -> LaunchRecord:
        return launch_record(kernel, arch=arch, K=K, V=V, R=R, BT=BT, dtype=dtype)

    def launch(self, kernel: Any, grid: int, args: tuple, constexprs: Mapping[str, Any], record: LaunchRecord) -> None:
        variant = _variant(kernel, args, constexprs, record)

        def run(run_args: tuple) -> None:
            with torch.profiler.record_function(LAUNCH_MARK):
                run_interpreted(kernel, grid, run_args, constexprs, record)

        recorder = host_graph.recorder()
        if recorder is None:
            run(args)
            self._ran.add(variant)
        elif variant in self._ran:
            recorder.launch(run, args)
        else:
            raise ColdKernel(f"kernel {kernel.fn.__name__} would be compiled inside a capture, launched from "
                             f"{blame(traceback.extract_stack())}. Run the block once with the same shapes and options "
                             "before capturing (num_warmup_iters of at least 1).")

    compiling = GraphBackend.compiling
    prepare = GraphBackend.prepare
    allocator = GraphBackend.allocator

    def count_launches(self, events: Sequence[Any]) -> int:
        return count_launches(events)


def _variant(kernel: Any, args: tuple, constexprs: Mapping[str, Any], record: LaunchRecord) -> tuple:
    """What a device would compile separately: the kernel, its argument types and its constexprs."""
    types = tuple(a.dtype if isinstance(a, torch.Tensor) else type(a) for a in args)
    return kernel, types, tuple(sorted(constexprs.items())), tuple(sorted(record.tiles.items()))
