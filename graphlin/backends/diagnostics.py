"""What backends share to tell about an error: the line that it names."""

import os
import traceback
from collections.abc import Iterable
from pathlib import Path

import torch

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
    return filename.startswith((*_MACHINERY, "<")) or filename.endswith("contextlib.py") or "/triton/" in filename
