"""Triton's compiler in threads: most of its time it holds no lock of the interpreter's."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
import triton

from graphlin.backends.cuda.launch import compile_only
from graphlin.backends.protocol import CompileAhead


class _Compilers(ThreadPoolExecutor):
    """Threads that also load what they have compiled, on the device that is current where it is asked for.

    Loading compiles another piece, in C: what hands Triton's launch its arguments.
    """

    def submit(self, compile_kernel: Callable[[], Any], /) -> Future:
        return super().submit(self._compile_and_load, compile_kernel, torch.cuda.current_device())

    @staticmethod
    def _compile_and_load(compile_kernel: Callable[[], Any], index: int) -> Any:
        kernel = compile_kernel()
        with torch.cuda.device(index):
            _ = kernel.run  # a property, which loads it
        return kernel


@contextmanager
def compiling() -> Iterator[CompileAhead | None]:
    """Inside, in this thread, a launch waits for its own kernel alone, and `CompileAhead` for none; at the end all are done.

    What a compilation raises is raised by the launch that wants its kernel, as it would be without threads.
    """
    if not hasattr(triton, "AsyncCompileMode"):  # before 3.5
        yield None
        return
    with _Compilers(os.cpu_count(), "graphlin-compiler") as compilers, ExitStack() as stack:
        with suppress(RuntimeError):  # the caller has such a mode open, which serves as well
            stack.enter_context(triton.AsyncCompileMode(compilers, ignore_errors=True))
        yield compile_only
