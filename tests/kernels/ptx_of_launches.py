"""Script: prints as JSON the PTX of every kernel that the packed ops launch, for sm_90 and without a device.

    TRITON_INTERPRET=0 TRITON_DISABLE_LINE_INFO=1 python ptx_of_launches.py {on,off}

The first folder of PYTHONPATH that holds `graphlin` decides whose kernels they are. Keys are names of kernels, each
compiled as it is launched first; values `{"chunks": whether it takes the chunk table, "flag": whether it has
GRAPH_CAPTURE, "ptx": text}`.
"""

import json
import sys
from types import SimpleNamespace

import torch
import triton
from triton.backends.compiler import GPUTarget

from graphlin.backends import GraphBackend, register_backend
from graphlin.backends.cuda.tiles import launch_record
from tests.inputs import cu_of
from tests.ops.op_cases import OP_CASES

LENGTHS = (19, 0, 16, 37)


class PtxBackend(GraphBackend):
    """Takes CPU tensors for those of an sm_90 device; compiles what it should launch. No graphs."""

    device_type = "cpu"

    def __init__(self):
        self.compiled = {}

    def is_available(self):
        return True

    def is_capturing(self):
        return False

    def arch(self, device):
        return "sm_90"

    def num_cores(self, device):
        return 132

    def launch_record(self, kernel, **problem):
        return launch_record(kernel, **problem)

    def launch(self, kernel, grid, args, constexprs, record):
        if kernel.__name__ in self.compiled:
            return
        compiled = kernel.warmup(*args, grid=(1,), **constexprs, **record.tiles, num_warps=record.num_warps,
                                 num_stages=record.num_stages)
        self.compiled[kernel.__name__] = {
            "chunks": "chunks" in kernel.arg_names, "flag": "GRAPH_CAPTURE" in kernel.arg_names,
            "ptx": compiled.asm["ptx"]}


def main(switch: str) -> None:
    triton.runtime.driver.set_active(SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32), get_current_stream=lambda device: 0,
        get_current_device=lambda: 0))
    backend = PtxBackend()
    register_backend(backend)
    cpu = torch.device("cpu")
    for case in OP_CASES:
        case.run(case.draw(sum(LENGTHS) + 5, len(LENGTHS), cpu, torch.bfloat16), cu_of(LENGTHS, cpu),
                 graph_capture=switch == "on")
    json.dump(backend.compiled, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1])
