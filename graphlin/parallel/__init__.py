"""Context parallelism: packed batches whose tokens are split over the ranks of a process group."""

from graphlin.parallel.context import ContextParallel, context_parallel

__all__ = ["ContextParallel", "context_parallel"]
