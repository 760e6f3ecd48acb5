"""Watches the launches of a device, and lets a kernel be launched by another record than the backend's."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from graphlin.backends import GraphBackend, LaunchRecord, get_backend, register_backend


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel, which `again` repeats on the same tensors."""

    backend: GraphBackend
    kernel: Any
    grid: int
    args: tuple
    constexprs: Mapping[str, Any]
    record: LaunchRecord
    asked: str
    """The name that the record was asked for by: the kernel's own, or that of a form."""

    @property
    def name(self) -> str:
        return self.kernel.fn.__name__

    @property
    def form(self) -> tuple:
        """What tells launches of the same call apart: the kernel, its grid, constexprs and record."""
        record = self.record
        return (self.name, self.grid, tuple(sorted(self.constexprs.items())), tuple(sorted(record.tiles.items())),
                record.num_warps, record.num_stages)

    def again(self) -> None:
        self.backend.launch(self.kernel, self.grid, self.args, self.constexprs, self.record)


@dataclass
class Tap:
    """The backend of a device, with its launches noted and the records of some kernels replaced."""

    backend: GraphBackend
    records: Mapping[str, LaunchRecord] = field(default_factory=dict)
    launches: list[Launch] = field(default_factory=list)
    _asked: dict[int, tuple[str, LaunchRecord]] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.backend, name)

    def launch_record(self, kernel: str, **problem: Any) -> LaunchRecord:
        """The replaced record, or the backend's."""
        record = self.records.get(kernel) or self.backend.launch_record(kernel, **problem)
        self._asked[id(record)] = kernel, record
        return record

    def launch(self, kernel: Any, grid: int, args: tuple, constexprs: Mapping[str, Any], record: LaunchRecord) -> None:
        """Notes the launch and makes it."""
        asked, _ = self._asked.get(id(record), (kernel.fn.__name__, record))
        self.launches.append(Launch(self.backend, kernel, grid, args, constexprs, record, asked))
        self.backend.launch(kernel, grid, args, constexprs, record)


@contextmanager
def tapped(device: torch.device, records: Mapping[str, LaunchRecord] | None = None) -> Iterator[Tap]:
    """Taps the device's registered backend in the body.

    Grids and everything else that depends on a record follow from `records`, since the kernels' own launchers ask for it.

    >>> with tapped(device, {"gdn_prep": LaunchRecord({...}, num_warps=4)}) as tap:
    ...     graphlin.chunk_gated_delta_rule(q, k, v, g, beta)
    """
    backend = get_backend(device)
    tap = Tap(backend, records or {})
    register_backend(tap)
    try:
        yield tap
    finally:
        register_backend(backend)
