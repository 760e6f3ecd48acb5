"""Triton's interpreter is chosen once per process, before Triton's first import."""

import os
import sys

import torch


def choose_interpreter() -> None:
    """Turns Triton's interpreter on where no accelerator is present and Triton is not loaded yet.

    Triton reads `TRITON_INTERPRET` while its own modules load, so a later change is ignored. A value that is already
    set is left alone.
    """
    if "triton" not in sys.modules and not torch.accelerator.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")


def is_interpreting() -> bool:
    """Whether kernels of this process run in the interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET") == "1"
