"""Compiles graphlin's kernels for NVIDIA devices without one and checks what the cubins need.

    python ci/cuda_compile.py [--variants NAME...] [--arch sm_80 sm_90 sm_100] [--jobs 2]

Every distinct launch that the public ops make (`ci/launches.py`), forward and backward, with the launch records of
`graphlin/backends/cuda/tiles.py`, is compiled as Triton would compile it on the device, with the same specialisation of
pointers and integers. For each cubin a line tells registers, stack bytes of a thread (where spills go) and shared memory.
The exit status is 1 if one does not compile, does not fit, or spills too much, or if a kernel was never launched.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

from cuda_limits import SHARED_LIMIT, Needs, fault

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ["TRITON_INTERPRET"] = "0"
os.environ["TRITON_CACHE_DIR"] = str(ROOT / "build" / "cuda-compile")

import torch  # noqa: E402
import triton  # noqa: E402
from launches import Job, compiled, note_launches, unlaunched_kernels  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from variants import VARIANTS  # noqa: E402

from graphlin.backends.cuda.tiles import launch_record  # noqa: E402

CORES = 132     # an H200's; which forms are launched (PIECES, LOOPED, STAGES) depends on it


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


def report(jobs: list[Job], processes: int) -> int:
    """Compiles the jobs, prints a line for each and returns how many are at fault."""
    faults = 0
    print(f"Triton {triton.__version__}: {len(jobs)} cubins\n{'kernel':<24}{'variant':<12}{'arch':<8}warps stages"
          f"  registers  stack B  shared B  tiles")
    for job, needs in compiled(jobs, compile_job, processes):
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
    jobs = note_launches(options.variants, options.arch, launch_record, CORES)
    faults = report(jobs, options.jobs)
    missing = unlaunched_kernels(jobs)
    if missing:
        print(f"FAULT never launched, so never compiled: {', '.join(sorted(missing))}; add a run to ci/variants.py")
    print(f"cuda-compile: {len(jobs) - faults} passed, {faults + bool(missing)} failed")
    return 1 if faults or missing else 0


if __name__ == "__main__":
    sys.exit(main())
