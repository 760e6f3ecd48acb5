"""What backends share whose PyTorch module has torch.cuda's names: streams, pools, and captures that end clean."""

import importlib.util
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cached_property
from typing import Any

import torch

from graphlin.backends.diagnostics import Meaning, compiles_refused, failures_typed
from graphlin.backends.interpreter import is_interpreting
from graphlin.backends.memory import alias, without_ownership
from graphlin.backends.protocol import Graph, GraphBackend


class AcceleratorBackend:
    """A thin layer over `torch.<device_type>`. A device adds what is named here and, of GraphBackend, its facts and launches."""

    device_type: str
    graph_type: type[Graph]                  # with torch.cuda.CUDAGraph's capture_begin and capture_end
    failures: Sequence[Meaning]              # what errors of a capture mean
    sync_failures: Sequence[Meaning]         # and those of a host sync outside captures
    launch_calls: tuple[str, ...]            # beginnings of the calls that put work on a stream, as the profiler names them

    alias = staticmethod(alias)
    compiling = GraphBackend.compiling
    prepare = GraphBackend.prepare
    allocator = GraphBackend.allocator

    def __init__(self) -> None:
        self._module = torch.get_device_module(self.device_type)

    @cached_property
    def _available(self) -> bool:
        return self._module.is_available() and importlib.util.find_spec("triton") is not None and not is_interpreting()

    def is_available(self) -> bool:
        return self._available

    def new_pool(self) -> Any:
        return self._module.graph_pool_handle()

    def pool_bytes(self, pool: Any, device: torch.device) -> int:
        """Bytes of the allocator's segments that belong to the pool."""
        index = self._index(device)
        return sum(segment["total_size"] for segment in self._module.memory_snapshot()
                   if tuple(segment["segment_pool_id"]) == tuple(pool) and segment["device"] == index)

    def unowned(self, tensors: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        return without_ownership(tensors, self.alias)

    def side_stream(self, device: torch.device) -> torch.Stream:
        return self._module.Stream(device)

    def stream(self, stream: torch.Stream) -> AbstractContextManager:
        return self._module.stream(stream)

    def synchronize(self, device: torch.device) -> None:
        self._module.synchronize(device)

    def is_capturing(self) -> bool:
        return self._module.is_current_stream_capturing()

    @contextmanager
    def capture(self, *, pool: Any, stream: torch.Stream, error_mode: str = "thread_local") -> Iterator[Graph]:
        """Records the body on `stream`. After a failure the capture is ended, the graph reset and the earlier stream current."""
        graph = self.graph_type()
        with self.stream(stream), compiles_refused(self.is_capturing), failures_typed(self.failures):
            self._module.empty_cache()       # what a warm-up left cached a capture can neither take nor free
            graph.capture_begin(pool=pool, capture_error_mode=error_mode)
            try:
                yield graph
                graph.capture_end()
            except BaseException:
                self.abandon(graph, pool, stream)
                raise

    @staticmethod
    def abandon(graph: Any, pool: Any, stream: torch.Stream) -> None:
        """Ends a capture that failed and drops its graph."""
        with suppress(RuntimeError):
            graph.capture_end()              # what broke the capture makes its end fail too
        graph.reset()

    @contextmanager
    def syncs_refused(self) -> Iterator[None]:
        """Turns a host sync of the body into HostSync, raised before the device is asked to wait."""
        mode = self._module.get_sync_debug_mode()
        try:
            self._set_sync_debug_mode("error")
            with failures_typed(self.sync_failures):
                yield
        finally:
            self._set_sync_debug_mode(mode)

    def _set_sync_debug_mode(self, mode: str | int) -> None:
        """PyTorch warns that the mode is a prototype; where warnings are errors, that must not stop a capture."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._module.set_sync_debug_mode(mode)

    def count_launches(self, events: Sequence[Any]) -> int:
        return sum(event.name.startswith(self.launch_calls) for event in events)

    def _index(self, device: torch.device) -> int:
        return self._module.current_device() if device.index is None else device.index
