"""What a cubin may take of an NVIDIA device."""

import sys
from dataclasses import dataclass

SHARED_LIMIT = {"sm_80": 166_912, "sm_90": 232_448, "sm_100": 232_448}
"""Bytes of shared memory that one program can have."""

STACK_LIMIT = {"sm_80": 256, "sm_90": 256}
"""Bytes of stack of a thread, where spilled registers go; for the main records alone."""

MEASURED_SPILLS: dict[tuple[str, str], tuple[int, str]] = {
    ("gdn_state_gradients", "sm_90"): (392, "by Triton 3.9 with H=HV, 288 by 3.6; with H=16, HV=32 an order of its statements "
                                            "that spilled 288 took 130 us on an H200 at T=4096, the form of eight warps 159"),
    ("delta_two_recurrences", "sm_90"): (264, "by Triton 3.9 with a decay for each channel, as a loop; by 3.6 64, "
                                              "which takes 129 us on an H200 at T=4096, one sequence, and 166 otherwise"),
    ("kda_prep", "sm_90"): (280, "by Triton 3.9; by 3.6, with which it takes 133 us on an H200 at T=4096, H=HV=32, 24"),
    ("kda_intra_gradients", "sm_90"): (680, "by Triton 3.9, which holds in registers what 3.6 puts into shared memory on its "
                                            "way; by 3.6, with which it takes 193 us on an H200 at T=4096, H=HV=32, 288 at most"),
}
"""(kernel, arch) -> bytes that a main record may spill instead, and what was measured that speaks for it."""


@dataclass(frozen=True)
class Needs:
    """What a cubin takes of the device, or why there is none."""

    registers: int = 0
    stack: int = 0
    shared: int = 0
    error: str = ""


def fault(kernel: str, arch: str, main: bool, needs: Needs) -> str:
    """What is wrong with a cubin, or an empty string; `main` says whether its launch record is a main one."""
    if needs.error:
        return f"does not compile: {needs.error}"
    if needs.shared > SHARED_LIMIT[arch]:
        return f"needs {needs.shared:,} bytes of shared memory, {arch} has {SHARED_LIMIT[arch]:,}"
    allowed = max(STACK_LIMIT.get(arch, sys.maxsize), MEASURED_SPILLS.get((kernel, arch), (0, ""))[0])
    if main and needs.stack > allowed:
        return f"spills {needs.stack} bytes a thread, a main record may spill {allowed}"
    return ""
