"""Runs a Triton kernel in the interpreter, on CPU tensors."""

from collections.abc import Mapping
from threading import Lock
from typing import Any

import torch

from graphlin.backends.protocol import LaunchRecord

_one_at_a_time = Lock()  # the interpreter patches Triton's language, for all threads, while it runs a kernel


def run_interpreted(kernel: Any, grid: int, args: tuple, constexprs: Mapping[str, Any], record: LaunchRecord) -> None:
    """Runs the kernel; bfloat16 tensors go in as float32 copies and are rounded once on the way out.

    The interpreter holds a bfloat16 block as its 16-bit pattern, so that arithmetic on it gives garbage.
    """
    copies = {id(t): (t, t.float()) for t in args if isinstance(t, torch.Tensor) and t.dtype == torch.bfloat16}
    run_args = [copies[id(a)][1] if id(a) in copies else a for a in args]
    with _one_at_a_time:
        kernel[(grid,)](*run_args, **constexprs, **record.tiles)
    with torch.autograd._unsafe_preserve_version_counter(tuple(original for original, _ in copies.values())):
        for original, copy in copies.values():      # an input gets its own value back, which autograd must not take for a change
            original.copy_(copy)
