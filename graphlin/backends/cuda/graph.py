"""CUDA graphs: what their errors mean, and captures that end clean when they fail."""

import warnings
from contextlib import suppress
from functools import cache
from typing import Any

import torch
from torch.cuda.memory import _cuda_endAllocateToPool, _cuda_releasePool

from graphlin.backends.diagnostics import WAITS
from graphlin.errors import CaptureError, HostSync

_invalidated: list[torch.cuda.CUDAGraph] = []
# Of c10/cuda/CUDAFunctions.cpp, in the mode that refuses syncs, and of aten/src/ATen/native/cuda/Copy.cu, in captures.
SYNCS = (("called a synchronizing CUDA operation|Cannot copy between CPU and CUDA tensors during CUDA graph capture", HostSync,
          WAITS),)
BREAKS = (("captur", CaptureError, "the capture broke at {line}: the block does there what a CUDA graph cannot hold. {error}"),)


class QuietGraph(torch.cuda.CUDAGraph):
    """`torch.cuda.CUDAGraph` that does not warn that it is empty: a block may launch nothing, or have failed at once."""

    def capture_end(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            super().capture_end()


@cache
def start_autograd(index: int) -> None:
    """Runs a first kernel in autograd's thread of the device, which makes a CUDA context current there.

    A matrix product would do so too, but PyTorch warns of it; where warnings are errors, that must not stop a capture.
    """
    with torch.inference_mode(False), torch.enable_grad():
        x = torch.ones(1, device=torch.device("cuda", index), requires_grad=True)
        torch.autograd.grad(x * x, x)


def abandon(graph: QuietGraph, pool: Any, stream: torch.cuda.Stream) -> None:
    """Ends a capture that failed and drops its graph.

    Where CUDA has invalidated the capture, ending it raises before PyTorch (up to 2.13 at least) takes the allocator
    out of the pool and the default generator out of its capture mode, so that is done here: the generator's by a sound,
    empty capture. The allocator of pinned memory can't be told: it goes on asking the graph, which is kept for that, and
    takes no other capture in this pool.
    """
    try:
        graph.capture_end()
    except RuntimeError:
        _invalidated.append(graph)
        with suppress(RuntimeError):  # unless the allocator has left it already
            _cuda_endAllocateToPool(stream.device.index, pool)
            _cuda_releasePool(stream.device.index, pool)
        empty = QuietGraph()
        empty.capture_begin()
        empty.capture_end()
        empty.reset()
    graph.reset()
