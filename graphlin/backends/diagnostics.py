"""What backends share to tell about a run: the line an error names, the profiler ranges that are launches."""

import traceback
from collections.abc import Iterable
from pathlib import Path

import torch

# Profiler ranges of the host, where a launch or a replay leaves no runtime event of its own.
LAUNCH_MARK = "graphlin::launch"
REPLAY_MARK = "graphlin::replay"

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
