"""Notes what the public ops launch on a device that is not there, so that a compile lane can compile it.

The ops run on CPU tensors over a backend that claims to be the device: its launch records are the device's own, and instead
of launching a kernel it notes the launch. So no table of kernels or signatures is kept.
"""

import pkgutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import get_context
from typing import Any

import torch
import triton
from variants import RUNS, VARIANTS

import graphlin
from graphlin.backends import GraphBackend, LaunchRecord, register_backend


@dataclass(frozen=True)
class Job:
    """A launch to compile, and the first variant that made it."""

    variant: str
    arch: str
    kernel: Any
    grid: int
    args: tuple
    constexprs: dict[str, Any]
    record: LaunchRecord

    def key(self) -> tuple:
        """Equal for launches that Triton compiles to one cubin."""
        return (self.arch, self.kernel.__name__, *map(_specialised, self.kernel.params, self.args),
                *sorted(self.constexprs.items()), *sorted(self.record.tiles.items()),
                self.record.num_warps, self.record.num_stages)


def _specialised(param: Any, argument: Any) -> tuple:
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if isinstance(argument, int) and not param.do_not_specialize:
        return int, argument == 1, argument % 16 == 0
    return (type(argument),)


class CompileOnlyBackend(GraphBackend):
    """Serves CPU tensors as if they were on the device; notes launches instead of running them. No graphs."""

    device_type = "cpu"

    def __init__(self, records: Callable[..., LaunchRecord], cores: int) -> None:
        self.jobs: dict[tuple, Job] = {}
        self.variant = self.current_arch = ""
        self._records, self._cores = records, cores

    def is_available(self) -> bool:
        """Always: nothing runs."""
        return True

    def is_capturing(self) -> bool:
        """Never."""
        return False

    def arch(self, device: torch.device) -> str:
        """The architecture whose launches are being noted."""
        return self.current_arch

    def num_cores(self, device: torch.device) -> int:
        """The device's; it chooses the grid, and forms of the recurrences."""
        return self._cores

    def launch_record(self, kernel: str, **problem: Any) -> LaunchRecord:
        """The record that the device would use."""
        return self._records(kernel, **problem)

    def launch(self, kernel: Any, grid: int, args: tuple, constexprs: dict, record: LaunchRecord) -> None:
        """Notes the launch."""
        job = Job(self.variant, self.current_arch, kernel, grid, args, dict(constexprs), record)
        self.jobs.setdefault(job.key(), job)


def note_launches(variants: Sequence[str], archs: Sequence[str], records: Callable[..., LaunchRecord], cores: int) -> list[Job]:
    """All distinct launches of the ops, in the order of the variants, with the launch records and cores of a device."""
    backend = CompileOnlyBackend(records, cores)
    register_backend(backend)
    for backend.variant in variants:
        for backend.current_arch in archs:
            for run in RUNS:
                run(VARIANTS[backend.variant])
    return list(backend.jobs.values())


_work: list = []  # filled before the workers are forked, since kernels cannot be sent to them


def _compile_numbered(index: int) -> Any:
    compile_job, jobs = _work
    return compile_job(jobs[index])


def compiled(jobs: Sequence[Job], compile_job: Callable[[Job], Any], processes: int) -> Iterator[tuple[Job, Any]]:
    """Each job, in order, with what `compile_job` says of it in a worker process."""
    _work[:] = compile_job, jobs
    with get_context("fork").Pool(processes) as pool:
        yield from zip(jobs, pool.imap(_compile_numbered, range(len(jobs))), strict=True)


def unlaunched_kernels(jobs: Sequence[Job]) -> set[str]:
    """Kernels of the package that no job launches: jit functions that ask for their program id, helpers left out."""
    launched, found = {job.kernel.__name__ for job in jobs}, set()
    for module in pkgutil.iter_modules(graphlin.kernels.__path__, "graphlin.kernels."):
        for name, value in vars(import_module(module.name)).items():
            if isinstance(value, triton.JITFunction) and value.__module__ == module.name and not name.startswith("_") \
                    and "program_id(" in value.src and not module.name.endswith(".common"):
                found.add(name)
    return found - launched
