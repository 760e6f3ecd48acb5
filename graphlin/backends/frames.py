"""Finds the line of the caller's code that an error should name."""

import traceback
from collections.abc import Iterable
from pathlib import Path

import torch

_OWN = str(Path(__file__).parent)
_TORCH = str(Path(torch.__file__).parent)


def blame(frames: Iterable[traceback.FrameSummary]) -> str:
    """`file:line in function` of the innermost frame outside PyTorch, Triton and this package's backends."""
    for frame in reversed(list(frames)):
        if not _is_machinery(frame.filename):
            return f"{frame.filename}:{frame.lineno} in {frame.name}"
    return "an unknown line"


def _is_machinery(filename: str) -> bool:
    return filename.startswith((_OWN, _TORCH, "<")) or filename.endswith("contextlib.py") or "/triton/" in filename
