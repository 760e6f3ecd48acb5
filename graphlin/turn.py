"""Which thread may use a captured block's graphs and slots."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from graphlin.errors import CaptureError


class Turn:
    """A lock that threads take for each call, and that one thread holds while it records or verifies.

    A backward that is recorded, or compared with eager, runs in autograd's own threads. One of those may be the thread that
    asks for a turn here: it runs a checkpointed call anew, in another thread's backward. If it waited, the first backward
    would wait for it.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._is_kept = False

        self.release = self._lock.release

    def __enter__(self) -> None:
        self.take()

    def __exit__(self, *error: object) -> None:
        self.release()

    def take(self) -> None:
        """Waits for the turn; `release` gives it back. A `with` does both, and costs a call's host a little more."""
        if self._lock.acquire(False):
            return
        is_backward = torch._C._current_graph_task_id() != -1
        while not self._lock.acquire(timeout=0.1 if is_backward else -1):
            if self._is_kept:
                raise CaptureError("a captured block is called in a backward (by activation checkpointing around it) while "
                                   "another thread captures or verifies it, and each would wait for the other. Capture it before "
                                   "threads share it, by a first call or with sample_args, and verify it then.")

    @contextmanager
    def kept(self) -> Iterator[None]:
        """For the thread that has the turn, and runs backwards in it."""
        before, self._is_kept = self._is_kept, True
        try:
            yield
        finally:
            self._is_kept = before
