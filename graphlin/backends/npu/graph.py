"""ACL graphs: torch_npu's own error texts turned into typed errors, and captures that end clean when they fail."""

import re
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch_npu  # makes torch.npu

from graphlin.backends.diagnostics import blame, compiles_refused
from graphlin.errors import CaptureError, GraphlinError, HostSync, ReplayError, Resource

_KEEP_ON_DEVICE = ("a graph cannot repeat that. Keep the value on the device (masks, torch.where, bounded sizes) or compute it "
                   "outside the block.")
_CODE = r"error code(?: is |:)"
# A code or text of an error that torch_npu raises (acl/error_codes/rt_error_codes.h, NPUGraph.cpp) -> what it means here.
_MEANING = (
    (_CODE + r"(107027|107028|107030)\b|called a synchronizing NPU operation", HostSync,
     f"the block waits for the device at {{line}}: {_KEEP_ON_DEVICE}"),
    (r"captured on a non-default stream", CaptureError, "a capture on the default stream, at {line}: pass a stream of "
     "side_stream(), and do the warm-up there too."),
    (r"without a preceding successful capture", ReplayError, "a graph that holds no capture was used at {line}: capture first; "
     "after reset() or a failed capture, capture again."),
    (r"already owns a captured graph", CaptureError, "a second capture into one graph, at {line}: reset() it first."),
    (_CODE + r"(207005|20700[789]|207010)\b", Resource, "the device has no stream, event or model left for a graph: each "
     "keeps a stream or more, of which a 910B has 1,984. Capture fewer tiers, slots and modes, or reset() blocks that are done."),
    (_CODE + r"(10702[59]|10703\d|507903)\b", CaptureError, "the capture broke at {line}: the block does there what an ACL graph "
     "cannot hold, such as work on a stream that is not joined again."),
)


class AclGraph(torch.npu.NPUGraph):
    """`torch.npu.NPUGraph` with typed errors."""

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "thread_local") -> None:
        with failures_typed():
            super().capture_begin(pool=pool, capture_error_mode=capture_error_mode)

    def capture_end(self) -> None:
        with failures_typed():
            super().capture_end()

    def replay(self) -> None:
        with failures_typed():
            super().replay()

    def pool(self) -> Any:
        with failures_typed():
            return super().pool()


@contextmanager
def record(pool: Any, stream: Any, error_mode: str) -> Iterator[AclGraph]:
    """Captures the body on `stream`. After a failure the capture is ended, the graph reset and the earlier stream current."""
    graph = AclGraph()
    with torch.npu.stream(stream), compiles_refused(torch.npu.is_current_stream_capturing):
        graph.capture_begin(pool=pool, capture_error_mode=error_mode)
        try:
            with failures_typed():
                yield graph
            graph.capture_end()
        except BaseException:
            with suppress(RuntimeError):
                graph.capture_end()     # what broke the capture makes its end fail too
            graph.reset()
            raise


@contextmanager
def syncs_refused() -> Iterator[None]:
    """Turns a host sync of the body, outside captures, into HostSync."""
    mode = torch.npu.get_sync_debug_mode()
    try:
        _set_sync_debug_mode("error")
        with failures_typed():
            yield
    finally:
        _set_sync_debug_mode(mode)


def _set_sync_debug_mode(mode: str | int) -> None:
    """torch_npu warns that the mode is experimental; where warnings are errors, that must not stop a capture."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.npu.set_sync_debug_mode(mode)


@contextmanager
def failures_typed() -> Iterator[None]:
    """Raises the typed error of a known failure, with the line and the remedy; others pass."""
    try:
        yield
    except GraphlinError:
        raise
    except RuntimeError as error:
        for pattern, kind, text in _MEANING:
            if re.search(pattern, str(error)):
                raise kind(text.format(line=blame(traceback.extract_tb(error.__traceback__)))) from error
        raise


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor on the same memory that does not keep it; its storage has torch_npu's description, which operators ask for."""
    return torch_npu._C._weak_ref_tensor(tensor)


def pool_bytes(pool: Any, index: int) -> int:
    """Bytes of the allocator's segments that belong to the pool."""
    return sum(segment["total_size"] for segment in torch.npu.memory_snapshot()
               if tuple(segment["segment_pool_id"]) == tuple(pool) and segment["device"] == index)
