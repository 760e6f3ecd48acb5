"""Compiles graphlin's kernels for Ascend 910B3 without one and checks that they fit.

    python ci/npu_compile.py [--variants NAME...] [--kernels NAME...] [--jobs 2]       # in the environment of ci/npu_rig/setup.sh

Every distinct launch that the public ops make (`ci/launches.py`), with the launch records of `graphlin/backends/npu/tiles.py`,
goes through triton-ascend's front end (Triton IR to linalg) and bishengir (fusion, split into cube and vector code, memory
plan). What is not run is the last step, device code, whose tool is not public. A line for each tells what it takes of the
buffers. The exit status is 1 if one does not lower or fit, takes a lock, accesses memory outside its masks, or asks for too
much workspace or too many programs (`ci/npu_limits.py`), or if a kernel was never launched.
"""

import argparse
import os
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ["TRITON_INTERPRET"] = "0"
os.environ["TRITON_CACHE_DIR"] = str(ROOT / "build" / "npu-compile")

import torch  # noqa: E402
from launches import Job, compiled, note_launches, unlaunched_kernels  # noqa: E402
from npu_limits import fault  # noqa: E402
from npu_rig import driver, fit  # noqa: E402
from variants import VARIANTS  # noqa: E402

from graphlin.backends.npu.tiles import launch_record  # noqa: E402

CORES = 20
NEVER_LAUNCHED = {"delta_join"}    # no record of Ascend splits a sequence


def tier_grid(job: Job) -> int:
    """Programs at the tier (4096, 32): a grid that strides over its tasks is full there; others (sums of partials, the chunk
    table) have no workspace to multiply."""
    return max(job.grid, CORES * job.record.waves)


def compile_job(job: Job) -> tuple[fit.Fit, int]:
    """What bishengir says of one launch, and how many of its masked loads lost their mask. Fails with the compiler's line."""
    multibuffer = job.record.num_stages > 1
    try:
        compiled = job.kernel.warmup(*job.args, grid=(1,), **job.constexprs, **job.record.tiles, multibuffer=multibuffer)
    except Exception as error:  # one bad kernel must not hide the others
        return fit.Fit(ok=False, message=first_errors(str(error))), 0
    return fit.check(compiled, multibuffer=multibuffer), fit.unmasked_loads(compiled.asm["ttir"])


def first_errors(text: str) -> str:
    """The compiler's own lines that say what it refuses, with place."""
    lines = [line.strip() for line in text.splitlines() if re.search(r"error: |Assertion|failed|unsupported", line)]
    return " | ".join(dict.fromkeys(lines))[:600] or text.strip()[-600:]


def report(jobs: list[Job], processes: int) -> int:
    """Compiles the jobs, prints a line for each and returns how many are at fault."""
    faults = 0
    for job, (found, unmasked) in compiled(jobs, compile_job, processes):
        grid = tier_grid(job)
        wrong = fault(found, unmasked, grid)
        faults += bool(wrong)
        used = " ".join(f"{space} {bits / 8192:.0f}" for space, bits in sorted(found.used.items()))
        tiles = " ".join(f"{name}={value}" for name, value in job.record.tiles.items())
        print(f"{job.kernel.__name__:<24}{job.variant:<12}{used:<28} KB  workspace {found.workspace * grid:>9,} B"
              f"  programs {grid:>4}  {tiles}" + (f"\n    FAULT {job.kernel.__name__}: {wrong}" if wrong else ""), flush=True)
    return faults


def main() -> int:
    """Compiles what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--kernels", nargs="+", metavar="NAME", help="only these; all others count as launched")
    parser.add_argument("--jobs", type=int, default=2, help="processes that compile (2)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    driver.install_front_end()
    jobs = note_launches(options.variants, [fit.TARGET], launch_record, CORES)
    missing = unlaunched_kernels(jobs) - NEVER_LAUNCHED
    if options.kernels:
        jobs = [job for job in jobs if job.kernel.__name__ in options.kernels]
    print(f"{fit.TARGET}: {len(jobs)} kernels")
    faults = report(jobs, options.jobs)
    if missing:
        print(f"FAULT never launched, so never compiled: {', '.join(sorted(missing))}; add a run to ci/variants.py")
    print(f"npu-compile: {len(jobs) - faults} passed, {faults + bool(missing)} failed")
    return 1 if faults or missing else 0


if __name__ == "__main__":
    sys.exit(main())
