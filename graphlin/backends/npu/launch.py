"""Launches a triton-ascend kernel on the current NPU stream."""

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch

from graphlin.backends.protocol import LaunchRecord


def run_compiled(kernel: Any, grid: int, args: tuple, constexprs: Mapping[str, Any], record: LaunchRecord) -> None:
    """Launches on the device of the first tensor. A record of more than one stage has its loads double-buffered; warps don't
    exist here."""
    device = next(a.device for a in args if isinstance(a, torch.Tensor))
    with torch.npu.device(device):
        kernel[(grid,)](*args, **constexprs, **record.tiles, multibuffer=record.num_stages > 1)


@cache
def cube_cores(index: int) -> int:
    """Cores that multiply matrices; each has two vector cores."""
    from triton.runtime import driver
    return driver.active.utils.get_device_properties(index)["num_aicore"]
