"""Compiles graphlin's kernels for NVIDIA devices without one and checks what the cubins need.

    python ci/cuda_compile.py [--variants NAME...] [--arch sm_80 sm_90 sm_100] [--jobs 2]

The public ops run on CPU tensors over a backend that claims to be an NVIDIA device: its launch records are those of
`graphlin/backends/cuda/tiles.py`, and instead of launching a kernel it notes the launch. Every distinct launch, forward
and backward, is then compiled as Triton would compile it on the device, with the same specialisation of pointers and
integers. So no table of kernels or signatures is kept here. For each cubin a line tells registers, stack bytes of a
thread (where spills go) and shared memory. The exit status is 1 if one does not compile, does not fit, or spills too
much, or if a kernel of the package was never launched.
"""

import argparse
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from cuda_limits import SHARED_LIMIT, Needs, fault

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ["TRITON_INTERPRET"] = "0"
os.environ["TRITON_CACHE_DIR"] = str(ROOT / "build" / "cuda-compile")

import torch  # noqa: E402
import triton  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402

import graphlin  # noqa: E402
from graphlin.backends import GraphBackend, LaunchRecord, register_backend  # noqa: E402
from graphlin.backends.cuda.tiles import launch_record  # noqa: E402
from graphlin.kernels.copy_rows import RowCopy  # noqa: E402


# ------------------------------------------------------------------------------------------------------ variants
@dataclass(frozen=True)
class Variant:
    """One setting of the ops' compile-time switches. The default is the main one: that of a real layer, packed."""

    dtype: torch.dtype = torch.bfloat16
    H: int = 16
    HV: int = 32
    K: int = 128
    V: int = 128
    chunk_size: int = 64
    taps: int = 4
    packed: bool = True
    extras: bool = True
    """Gate, sigmoid, l2norm, bias, residual and activation inside the kernels, and states in and out."""
    graph_capture: bool | None = None
    state_v_first: bool = False

    @property
    def is_main(self) -> bool:
        """Whether it uses the main launch records, which may not spill much whatever the other switches."""
        return (self.dtype, self.K, self.V, self.chunk_size) == (torch.bfloat16, 128, 128, 64)


VARIANTS = {
    "main": Variant(),
    "bare": Variant(extras=False),
    "dense": Variant(packed=False),
    "exact": Variant(graph_capture=False),
    "fp16": Variant(dtype=torch.float16),
    "fp32": Variant(dtype=torch.float32),
    "one-group": Variant(H=32, HV=32),
    "small": Variant(K=64, V=64),
    "odd": Variant(K=100, V=60),
    "large": Variant(K=256, V=256),
    "large-fp32": Variant(K=256, V=256, dtype=torch.float32),
    "chunk-32": Variant(chunk_size=32),
    "chunk-16": Variant(chunk_size=16),
    "v-first": Variant(state_v_first=True),
    "taps-8": Variant(taps=8),
}
TOKENS, SEQS = 256, 4


def make(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A leaf that wants a gradient; its values are never read."""
    return torch.zeros(shape, dtype=dtype, requires_grad=True)


def packing(variant: Variant) -> dict[str, Any]:
    """The packing arguments that the ops share."""
    if not variant.packed:
        return {"chunk_size": variant.chunk_size}
    cu = torch.arange(0, TOKENS + 1, TOKENS // SEQS, dtype=torch.int32)
    return {"chunk_size": variant.chunk_size, "cu_seqlens": cu, "graph_capture": variant.graph_capture}


def differentiate(*outputs: torch.Tensor | None) -> None:
    """Runs the backward of all outputs."""
    present = [x for x in outputs if x is not None]
    torch.autograd.backward(present, [torch.zeros_like(x) for x in present])


def run_chunks(variant: Variant) -> None:
    """The chunk table and the cumulative sums, both ways."""
    graphlin.prepare_chunk_indices(torch.tensor([0, TOKENS], dtype=torch.int32), TOKENS, variant.chunk_size)
    for reverse in (False, True):
        graphlin.chunk_local_cumsum(make(1, TOKENS, variant.HV), reverse=reverse, **packing(variant))


def run_gated_delta_rule(variant: Variant) -> None:
    """Gated DeltaNet, forward and backward."""
    dtype, H, HV, seqs = variant.dtype, variant.H, variant.HV, SEQS if variant.packed else 1
    state = (seqs, HV, variant.V, variant.K) if variant.state_v_first else (seqs, HV, variant.K, variant.V)
    extras: dict[str, Any] = {}
    if variant.extras:
        extras = dict(initial_state=make(*state), output_final_state=True, use_qk_l2norm_in_kernel=True,
                      use_gate_in_kernel=True, A_log=make(HV), dt_bias=make(HV), use_beta_sigmoid_in_kernel=True)
    gate_dtype = dtype if variant.extras else torch.float32
    differentiate(*graphlin.chunk_gated_delta_rule(
        make(1, TOKENS, H, variant.K, dtype=dtype), make(1, TOKENS, H, variant.K, dtype=dtype),
        make(1, TOKENS, HV, variant.V, dtype=dtype), make(1, TOKENS, HV, dtype=gate_dtype),
        make(1, TOKENS, HV, dtype=dtype), state_v_first=variant.state_v_first, **extras, **packing(variant)))


def run_kda(variant: Variant) -> None:
    """Kimi Delta Attention with each of its gates, forward and backward."""
    dtype, H, HV, seqs = variant.dtype, variant.H, variant.HV, SEQS if variant.packed else 1
    state = (seqs, HV, variant.V, variant.K) if variant.state_v_first else (seqs, HV, variant.K, variant.V)
    gates: list[dict[str, Any]] = [{}]
    if variant.extras:
        extras = dict(initial_state=make(*state), output_final_state=True, use_qk_l2norm_in_kernel=True,
                      use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, dt_bias=make(HV * variant.K))
        gates = [dict(extras, A_log=make(HV)), dict(extras, A_log=make(HV), lower_bound=-5.0, safe_gate=True),
                 dict(extras, lower_bound=-5.0)]
    gate_dtype = dtype if variant.extras else torch.float32
    for gate in gates:
        differentiate(*graphlin.chunk_kda(
            make(1, TOKENS, H, variant.K, dtype=dtype), make(1, TOKENS, H, variant.K, dtype=dtype),
            make(1, TOKENS, HV, variant.V, dtype=dtype), make(1, TOKENS, HV, variant.K, dtype=gate_dtype),
            make(1, TOKENS, HV, dtype=dtype), state_v_first=variant.state_v_first, **gate, **packing(variant)))


def run_causal_conv1d(variant: Variant) -> None:
    """The short convolution over all heads' values, forward and backward."""
    D, dtype, seqs = variant.HV * variant.V, variant.dtype, SEQS if variant.packed else 1
    extras: dict[str, Any] = {}
    if variant.extras:
        extras = dict(bias=make(D, dtype=dtype), residual=make(1, TOKENS, D, dtype=dtype), activation="silu",
                      initial_state=make(seqs, D, variant.taps, dtype=dtype), output_final_state=True)
    differentiate(*graphlin.causal_conv1d(
        make(1, TOKENS, D, dtype=dtype), make(D, variant.taps, dtype=dtype), **extras, **packing(variant)))


def run_copy_in(variant: Variant) -> None:
    """The copy of active rows into a graph's static buffers."""
    cu = torch.arange(0, TOKENS + 1, TOKENS // SEQS, dtype=torch.int32)
    x = torch.zeros(1, TOKENS, variant.HV * variant.V, dtype=variant.dtype)
    copy = RowCopy(torch.zeros_like(x), dim=1)
    copy(x, cu)
    copy(x, cu, torch.zeros(SEQS + 1, dtype=torch.int32))
    copy(x, None)


RUNS = (run_chunks, run_gated_delta_rule, run_kda, run_causal_conv1d, run_copy_in)


# ------------------------------------------------------------------------------------------------------ launches
@dataclass(frozen=True)
class Job:
    """A launch to compile, and the first variant that made it."""

    variant: str
    arch: str
    kernel: Any
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
    """Serves CPU tensors as if they were on an NVIDIA device; notes launches instead of running them. No graphs."""

    device_type = "cpu"

    def __init__(self) -> None:
        self.jobs: dict[tuple, Job] = {}
        self.variant = self.current_arch = ""

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
        """Any number: it chooses the grid, which is no part of a cubin."""
        return 132

    def launch_record(self, kernel: str, **problem: Any) -> LaunchRecord:
        """The record that an NVIDIA device would use."""
        return launch_record(kernel, **problem)

    def launch(self, kernel: Any, grid: int, args: tuple, constexprs: dict, record: LaunchRecord) -> None:
        """Notes the launch."""
        job = Job(self.variant, self.current_arch, kernel, args, dict(constexprs), record)
        self.jobs.setdefault(job.key(), job)


def note_launches(variants: list[str], archs: list[str]) -> list[Job]:
    """All distinct launches of the ops, in the order of the variants."""
    backend = CompileOnlyBackend()
    register_backend(backend)
    for backend.variant in variants:
        for backend.current_arch in archs:
            for run in RUNS:
                run(VARIANTS[backend.variant])
    return list(backend.jobs.values())


def all_kernels() -> set[str]:
    """Names of the kernels in graphlin.kernels: jit functions that ask for their program id, helpers left out."""
    found = set()
    for module in pkgutil.iter_modules(graphlin.kernels.__path__, "graphlin.kernels."):
        for name, value in vars(import_module(module.name)).items():
            if isinstance(value, triton.JITFunction) and value.__module__ == module.name and not name.startswith("_") \
                    and "program_id(" in value.src and not module.name.endswith(".common"):
                found.add(name)
    return found


# ------------------------------------------------------------------------------------------------------ compiling
def compile_job(job: Job) -> Needs:
    """Compiles one launch through Triton's own launch path, over a driver that knows only its target."""
    capability = int(job.arch.removeprefix("sm_"))
    triton.runtime.driver.set_active(SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", capability, 32), get_current_stream=lambda device: 0,
        get_current_device=lambda: capability))  # Triton keeps compiled kernels by device
    try:
        compiled = job.kernel.warmup(*job.args, grid=(1,), **job.constexprs, **job.record.tiles,
                                     num_warps=job.record.num_warps, num_stages=job.record.num_stages)
        return Needs(*_resource_usage(compiled.asm["cubin"]), compiled.metadata.shared)
    except Exception as error:  # one bad kernel must not hide the others
        return Needs(error=f"{type(error).__name__}: {error}")


def _resource_usage(cubin: bytes) -> tuple[int, int]:
    """Registers and stack bytes of a thread, as the toolkit that Triton brings reports them."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return int(re.search(r"REG:(\d+)", text)[1]), int(re.search(r"STACK:(\d+)", text)[1])


_jobs: list[Job] = []  # filled before the workers are forked, since kernels cannot be sent to them


def _compile_numbered(index: int) -> tuple[int, Needs]:
    return index, compile_job(_jobs[index])


def report(jobs: list[Job], processes: int) -> int:
    """Compiles the jobs, prints a line for each and returns how many are at fault."""
    _jobs[:] = jobs
    faults = 0
    print(f"Triton {triton.__version__}: {len(jobs)} cubins\n{'kernel':<24}{'variant':<12}{'arch':<8}warps stages"
          f"  registers  stack B  shared B  tiles")
    with get_context("fork").Pool(processes) as pool:
        for index, needs in pool.imap(_compile_numbered, range(len(jobs))):
            job = jobs[index]
            wrong = fault(job.kernel.__name__, job.arch, VARIANTS[job.variant].is_main, needs)
            faults += bool(wrong)
            tiles = " ".join(f"{name}={value}" for name, value in job.record.tiles.items())
            print(f"{job.kernel.__name__:<24}{job.variant:<12}{job.arch:<8}{job.record.num_warps:>5}"
                  f" {job.record.num_stages:>6}  {needs.registers:>9}  {needs.stack:>7}  {needs.shared:>8}  {tiles}"
                  + (f"\n    FAULT {wrong}" if wrong else ""), flush=True)
    return faults


def main() -> int:
    """Compiles what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--arch", nargs="+", choices=list(SHARED_LIMIT), default=list(SHARED_LIMIT))
    parser.add_argument("--jobs", type=int, default=2, help="processes that compile (2)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    jobs = note_launches(options.variants, options.arch)
    faults = report(jobs, options.jobs)
    missing = all_kernels() - {job.kernel.__name__ for job in jobs}
    if missing:
        print(f"FAULT never launched, so never compiled: {', '.join(sorted(missing))}; add a run to ci/cuda_compile.py")
    print(f"cuda-compile: {len(jobs) - faults} passed, {faults + bool(missing)} failed")
    return 1 if faults or missing else 0


if __name__ == "__main__":
    sys.exit(main())
