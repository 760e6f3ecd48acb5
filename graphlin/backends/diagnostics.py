"""What backends share to tell about an error: what is meant by it, the line that it names, and a kernel that would compile
inside a capture."""

import os
import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from graphlin.errors import ColdKernel, GraphlinError

_PACKAGE = Path(__file__).parents[1]
_MACHINERY = tuple(f"{path}{os.sep}"
                   for path in (_PACKAGE / "backends", _PACKAGE / "kernels", Path(torch.__file__).parent))

# A pattern of a device's own error text, the error that it means here, and that one's text, with {line} and {error} in it.
Meaning = tuple[str, type[GraphlinError], str]
WAITS = ("the block waits for the device at {line}: a graph cannot repeat that. Keep the value on the device (masks, "
         "torch.where, bounded sizes) or compute it outside the block.")


@contextmanager
def failures_typed(meanings: Sequence[Meaning]) -> Iterator[None]:
    """Raises the typed error of a failure of the body that is known by its text, the first that fits; others pass, and so does a
    lack of memory."""
    try:
        yield
    except (GraphlinError, torch.OutOfMemoryError):
        raise
    except RuntimeError as error:
        for pattern, kind, text in meanings:
            if re.search(pattern, str(error)):
                raise kind(text.format(line=blame(traceback.extract_tb(error.__traceback__)), error=error)) from error
        raise


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
