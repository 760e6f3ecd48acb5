"""Triton's compiler in threads: most of its time it holds no lock of the interpreter's."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress

import triton

from graphlin.backends.cuda.launch import compile_only
from graphlin.backends.protocol import CompileAhead


@contextmanager
def compiling() -> Iterator[CompileAhead | None]:
    """Inside, in this thread, a launch waits for its own kernel alone, and `CompileAhead` for none; at the end all are done.

    What a compilation raises is raised by the launch that wants its kernel, as it would be without threads.
    """
    if not hasattr(triton, "AsyncCompileMode"):  # before 3.5
        yield None
        return
    with ThreadPoolExecutor(os.cpu_count(), "graphlin-compiler") as threads, ExitStack() as stack:
        with suppress(RuntimeError):  # the caller has such a mode open, which serves as well
            stack.enter_context(triton.AsyncCompileMode(threads, ignore_errors=True))
        yield compile_only
