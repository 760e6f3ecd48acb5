"""CUDA graphs: captures that fail before they break, and end clean when they do not."""

import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

import torch
from torch.cuda.memory import _cuda_endAllocateToPool, _cuda_releasePool

from graphlin.backends.cuda.node import UpdatableGraph, can_update
from graphlin.backends.diagnostics import blame, compiles_refused
from graphlin.errors import CaptureError, GraphlinError, HostSync

_invalidated: list[torch.cuda.CUDAGraph] = []
# Of c10/cuda/CUDAFunctions.cpp, in the mode that refuses syncs, and of aten/src/ATen/native/cuda/Copy.cu, in captures.
_SYNC_ERRORS = ("called a synchronizing CUDA operation", "Cannot copy between CPU and CUDA tensors during CUDA graph capture")


@cache
def start_autograd(index: int) -> None:
    """Runs a first kernel in autograd's thread of the device, which makes a CUDA context current there.

    A matrix product would do so too, but PyTorch warns of it; where warnings are errors, that must not stop a capture.
    """
    with torch.inference_mode(False), torch.enable_grad():
        x = torch.ones(1, device=torch.device("cuda", index), requires_grad=True)
        torch.autograd.grad(x * x, x)


@contextmanager
def record(pool: Any, stream: torch.cuda.Stream, error_mode: str) -> Iterator[torch.cuda.CUDAGraph]:
    """Captures the body on `stream`. After a failure the capture is ended, the graph reset and the stream usable."""
    graph = UpdatableGraph() if can_update() else torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream), compiles_refused(torch.cuda.is_current_stream_capturing), _failures_typed():
        torch.cuda.empty_cache()  # what a warm-up left cached a capture can neither take nor free
        graph.capture_begin(pool=pool, capture_error_mode=error_mode)
        try:
            with syncs_refused():
                yield graph
            _end(graph)
            if isinstance(graph, UpdatableGraph):
                graph.instantiate()
        except BaseException:
            _abandon(graph, pool, stream.device)
            raise


def _end(graph: torch.cuda.CUDAGraph) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the graph is empty: a block may launch nothing, or have failed at once
        graph.capture_end()


def _abandon(graph: torch.cuda.CUDAGraph, pool: Any, device: torch.device) -> None:
    """Ends a capture that failed and drops its graph.

    Where CUDA has invalidated the capture, ending it raises before PyTorch (up to 2.13 at least) takes the allocator
    out of the pool and the default generator out of its capture mode, so that is done here: the generator's by a sound,
    empty capture. The allocator of pinned memory can't be told: it goes on asking the graph, which is kept for that, and
    takes no other capture in this pool.
    """
    try:
        _end(graph)
    except RuntimeError:
        _invalidated.append(graph)
        with suppress(RuntimeError):  # unless the allocator has left it already
            _cuda_endAllocateToPool(device.index, pool)
            _cuda_releasePool(device.index, pool)
        empty = torch.cuda.CUDAGraph()
        empty.capture_begin()
        _end(empty)
        empty.reset()
    graph.reset()


@contextmanager
def syncs_refused() -> Iterator[None]:
    """Turns a host sync of the body into HostSync, raised before the device is asked to wait."""
    mode = torch.cuda.get_sync_debug_mode()
    try:
        _set_sync_debug_mode("error")
        yield
    except RuntimeError as error:
        if not any(text in str(error) for text in _SYNC_ERRORS):
            raise
        raise HostSync(f"the block waits for the device at {blame(traceback.extract_tb(error.__traceback__))}: a graph "
                       "cannot repeat that. Keep the value on the device (masks, torch.where, bounded sizes) or "
                       "compute it outside the block.") from error
    finally:
        _set_sync_debug_mode(mode)


def _set_sync_debug_mode(mode: str | int) -> None:
    """PyTorch warns once in a process that the mode is a prototype; where warnings are errors, that must not stop a capture."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode(mode)


@contextmanager
def _failures_typed() -> Iterator[None]:
    try:
        yield
    except GraphlinError:
        raise
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError) or "captur" not in str(error):
            raise
        raise CaptureError(f"the capture broke at {blame(traceback.extract_tb(error.__traceback__))}: the block does "
                           f"there what a CUDA graph cannot hold. {error}") from error


def pool_bytes(pool: Any, device: torch.device) -> int:
    """Bytes of the allocator's segments that belong to the pool."""
    return sum(segment["total_size"] for segment in torch.cuda.memory_snapshot()
               if tuple(segment["segment_pool_id"]) == tuple(pool) and segment["device"] == device.index)
