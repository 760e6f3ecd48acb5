"""What backends share to tell about an error: the line that it names, and a kernel that would compile inside a capture."""

import os
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from graphlin.errors import ColdKernel

_PACKAGE = Path(__file__).parents[1]
_MACHINERY = tuple(f"{path}{os.sep}"
                   for path in (_PACKAGE / "backends", _PACKAGE / "kernels", Path(torch.__file__).parent))


def blame(frames: Iterable[traceback.FrameSummary]) -> str:
    """`file:line in function` of the innermost frame outside PyTorch, Triton and graphlin's backends and kernels."""
    for frame in reversed(list(frames)):
        if not _is_machinery(frame.filename):
            return f"{frame.filename}:{frame.lineno} in {frame.name}"
    return "an unknown line"


def _is_machinery(filename: str) -> bool:
    return filename.startswith((*_MACHINERY, "<")) or filename.endswith("contextlib.py") or "/triton/" in filename \
        or "/torch_npu/" in filename


@contextmanager
def compiles_refused(is_capturing: Callable[[], bool]) -> Iterator[None]:
    """Turns a Triton compilation of the body into ColdKernel. Triton asks this hook before it compiles; a launch of a compiled
    kernel does not come here, and another thread's kernel is let pass."""
    def refuse(*args: Any, **kwargs: Any) -> None:
        if is_capturing():
            raise ColdKernel(f"kernel {kwargs['fn'].name} would be compiled inside a capture, launched from "
                             f"{blame(traceback.extract_stack())}. Run the block once with the same shapes and options before "
                             "capturing (num_warmup_iters of at least 1).")

    owner, name = _cache_hook()
    previous = getattr(owner, name)
    setattr(owner, name, refuse)
    try:
        yield
    finally:
        setattr(owner, name, previous)


def _cache_hook() -> tuple[Any, str]:
    import triton
    if hasattr(triton, "knobs"):
        return triton.knobs.runtime, "jit_cache_hook"
    return triton.runtime.jit.JITFunction, "cache_hook"
