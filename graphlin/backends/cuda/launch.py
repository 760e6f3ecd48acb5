"""Launches a compiled Triton kernel on the current CUDA stream."""

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch

from graphlin.backends.protocol import LaunchRecord


def run_compiled(kernel: Any, grid: int, args: tuple, constexprs: Mapping[str, Any], record: LaunchRecord) -> None:
    """Launches on the device of the first tensor, which Triton does not choose by itself."""
    index = next(a.get_device() for a in args if isinstance(a, torch.Tensor))
    with nullcontext() if index == torch.cuda.current_device() else torch.cuda.device(index):
        kernel[(grid,)](*args, **constexprs, **record.tiles, num_warps=record.num_warps, num_stages=record.num_stages)
