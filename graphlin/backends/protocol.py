"""What graphlin asks of a device: run kernels, record a graph, replay it."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch


@dataclass(frozen=True)
class LaunchRecord:
    """How one kernel is launched: constexpr tiles, warps and pipeline stages, and programs per core of its grid."""

    tiles: Mapping[str, Any] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 1
    waves: int = 4


def block_size(size: int, largest: int) -> int:
    """The tile size, a power of two, that covers `size`, between 16 and `largest`.

    >>> block_size(100, 64)
    64
    """
    return min(largest, max(16, 1 << (size - 1).bit_length()))


# Begins to compile what `launch` of a kernel would run: takes its arguments, constexprs and record.
CompileAhead = Callable[[Any, tuple, Mapping[str, Any], LaunchRecord], None]

# Makes uninitialised memory of these sizes and strides.
Allocate = Callable[[tuple[int, ...], tuple[int, ...]], torch.Tensor]

# A launch of a kernel that is prepared: takes its tensors (or None), then integers that it is not specialised on. It may have a
# method `record`, which takes a graph that is being captured before these, launches into it, and returns the launch's Entry.
Prepared = Callable[[tuple[torch.Tensor | None, ...], tuple[int, ...]], None]


class Entry(Protocol):
    """A launch in a captured graph that is given other arguments for the replays to come."""

    def set(self, tensors: tuple[torch.Tensor, ...], integers: tuple[int, ...]) -> bool:
        """Whether the launch could be given these arguments; if not, replays leave it out."""

    def enable(self, enabled: bool) -> None:
        """Whether replays do the launch at all."""


class Graph(Protocol):
    """A recorded piece of device work."""

    def replay(self) -> None: ...

    def reset(self) -> None: ...

    def pool(self) -> Any: ...


class PoolModel(Protocol):
    """A pool without memory, which tells what a real one would hold after the same allocations and frees."""

    def allocate(self, nbytes: int) -> Any:
        """A block of at least one byte, for `free`."""

    def free(self, block: Any) -> None: ...

    def nbytes(self) -> int: ...


class GraphBackend(Protocol):
    """One device type. Register an object of this shape with `graphlin.backends.register_backend`."""

    device_type: str

    def is_available(self) -> bool: ...

    def new_pool(self) -> Any:
        """A private memory pool for `capture`."""

    def pool_bytes(self, pool: Any, device: torch.device) -> int:
        """Bytes that the pool holds on the device."""

    def pool_model(self) -> PoolModel:
        """A model of one of its pools, which prices a capture before there is one."""

    def unowned(self, tensors: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Tensors made in a `capture`, replaced by ones on the same memory that do not keep it: later captures in the pool
        may use it again, and the graph keeps it valid. The tensors themselves where the device can't do that."""

    def side_stream(self, device: torch.device) -> Any:
        """A non-default stream to warm up and capture on."""

    def stream(self, stream: Any) -> AbstractContextManager:
        """Makes the stream current."""

    def synchronize(self, device: torch.device) -> None: ...

    def syncs_refused(self) -> AbstractContextManager:
        """Raises HostSync where its body, which is run outside captures, waits for the device; nothing if only captures tell."""

    def is_capturing(self) -> bool: ...

    def capture(self, *, pool: Any, stream: Any, error_mode: str = "thread_local") -> AbstractContextManager[Graph]:
        """Records what the body does; the graph it yields may be replayed once the body has ended.

        After a failure nothing is open, but the pool may take no other capture.
        """

    def arch(self, device: torch.device) -> str:
        """Name of the device generation that launch records are kept for, such as `sm_90`."""

    def num_cores(self, device: torch.device) -> int: ...

    def launch_record(self, kernel: str, *, arch: str, K: int, V: int, R: int, BT: int, dtype: torch.dtype) -> LaunchRecord: ...

    def launch(self, kernel: Any, grid: int, args: tuple, constexprs: Mapping[str, Any], record: LaunchRecord) -> None:
        """Runs `kernel[(grid,)](*args, **constexprs, **record.tiles)`."""

    def compiling(self) -> AbstractContextManager[CompileAhead | None]:
        """Around a block's first runs. Yields what begins to compile a kernel, or None, the default, where kernels are compiled
        as they are launched. A launch inside waits for its own kernel alone; at the end all that was begun is compiled."""
        return nullcontext()

    def prepare(self, kernel: Any, grid: int, fixed: tuple, constexprs: Mapping[str, Any], record: LaunchRecord) -> Prepared:
        """What launches a kernel again and again at less cost for the host, with `fixed` as its last arguments. A backend that
        has no quicker way may take this one over."""
        return lambda tensors, integers: self.launch(kernel, grid, (*tensors, *integers, *fixed), constexprs, record)

    def allocator(self, dtype: torch.dtype, device: torch.device) -> Allocate:
        """What makes tensors of one kind again and again at less cost for the host. A backend that has no quicker way may take
        this one over."""
        return partial(torch.empty_strided, dtype=dtype, device=device)

    def count_launches(self, events: Sequence[Any]) -> int:
        """Launches that the host made, among the torch.profiler events of a run."""
