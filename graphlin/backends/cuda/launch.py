"""Launches a compiled Triton kernel on the current CUDA stream."""

from collections.abc import Mapping
from typing import Any

import torch

from graphlin.backends.protocol import LaunchRecord


def run_compiled(kernel: Any, grid: int, args: tuple, constexprs: Mapping[str, Any], record: LaunchRecord) -> None:
    """Launches on the device of the first tensor, which Triton does not choose by itself."""
    device = next(a.device for a in args if isinstance(a, torch.Tensor))
    with torch.cuda.device(device):
        kernel[(grid,)](*args, **constexprs, **record.tiles, num_warps=record.num_warps, num_stages=record.num_stages)
