"""Triton's interpreter is chosen once per process, before Triton's first import."""

import os
import sys

import torch


def choose_interpreter() -> None:
    """Turns Triton's interpreter on where no accelerator is present and Triton is not loaded yet.

    Triton reads `TRITON_INTERPRET` while its own modules load, so a later change is ignored. A value that is already
    set is left alone.
    """
    if "triton" not in sys.modules and not _has_accelerator():
        os.environ.setdefault("TRITON_INTERPRET", "1")


def _has_accelerator() -> bool:
    """Asks NVML where PyTorch is built for CUDA: asking CUDA itself would start it, and a process can't be forked then."""
    if torch.backends.cuda.is_built():
        return torch.cuda.device_count() > 0
    return torch.accelerator.is_available()


def is_interpreting() -> bool:
    """Whether kernels of this process run in the interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET") == "1"
