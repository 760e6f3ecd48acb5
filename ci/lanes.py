"""The device matrix: one row per device and toolchain.

`ci/lane.py` runs a row, `ci/workflow.py` makes the GitHub workflow from the rows, docs/testing.md tells about them.
"""

from dataclasses import dataclass

HOSTED = "ubuntu-24.04"
DEBIAN = "python:3.11-bookworm"


@dataclass(frozen=True)
class Lane:
    """One device and toolchain, and the commands that test it."""

    name: str
    about: str
    commands: tuple[str, ...]
    short: tuple[str, ...] = ()
    """A chosen subset for `.ci/run`; empty: the whole lane."""

    runner: str = HOSTED
    """The label of the machine. Any but the hosted one is used once the repository variable DEVICE_RUNNERS names it."""

    container: str = ""
    """The image that a hosted lane runs in, where it needs a Linux of its own."""

    waits_for: str = ""
    """What has to exist before the lane can run; a lane that waits has no job."""

    minutes: int = 60

    @property
    def hosted(self) -> bool:
        """Whether the lane runs on a CPU machine of the CI service, in an environment made by the Makefile."""
        return self.runner == HOSTED


TRITON36 = "VENV=.venv-triton36 CONSTRAINTS=ci/constraints-triton36.txt"
ON_CUDA = ("make test-device DEVICE=cuda PYTHON=python ARGS=--slow", "python -m graphlin demo --json")

LANES = (
    Lane("lint", "ruff, and the workflow in sync with this file", ("make lint",), minutes=15),
    Lane("host-triton39", "Triton 3.9's interpreter on the CPU", ("make test ARGS=--slow",), short=("make test",)),
    Lane("host-triton36", "Triton 3.6's interpreter on the CPU", (f"make test {TRITON36} ARGS=--slow",),
         short=(f"make test {TRITON36} ARGS=tests/ops/test_contract.py",)),
    Lane("cuda-compile", "Triton 3.9 to sm_80, sm_90 and sm_100, all variants; no GPU", ("make cuda-compile",),
         short=('make cuda-compile ARGS="--variants main one-group"',)),
    Lane("cuda-compile-triton36", "Triton 3.6 to sm_80, sm_90 and sm_100, all variants; no GPU",
         (f"make cuda-compile {TRITON36}",)),
    Lane("npu-compile", "triton-ascend and bishengir to Ascend 910B3, all variants; no NPU", ("make npu-compile",), minutes=120,
         short=('make npu-compile ARGS="--variants main"',), container=DEBIAN),
    Lane("npu-signature", "the npu backend's calls against torch_npu's wheels; no NPU", ("make npu-signature",), minutes=15),
    Lane("npu", "the suite on the emulated Ascend device of ci/npu_rig; no NPU", ("make npu-test ARGS=--slow",), minutes=240,
         short=('make npu-test ARGS="tests/backends/test_accelerator.py tests/backends/test_npu_graph.py '
                'tests/ops/test_chunks.py tests/test_capture_layers.py"',), container=DEBIAN),
    Lane("cuda-a100", "A100 (sm_80): the suite and the demo", ON_CUDA, runner="a100"),
    Lane("cuda-h100", "H100 (sm_90): the suite and the demo", ON_CUDA, runner="h100"),
    Lane("cuda-h200", "H200 (sm_90): the suite and the demo", ON_CUDA, runner="h200"),
    Lane("npu-910b", "Ascend 910B, torch_npu and triton-ascend: the suite and the demo",
         ("make test-device DEVICE=npu PYTHON=python ARGS=--slow", "python -m graphlin demo --json"),
         runner="ascend-910b"),
)


def lane(name: str) -> Lane:
    """The row of that name; raises ValueError with the known names."""
    for row in LANES:
        if row.name == name:
            return row
    raise ValueError(f"no lane {name!r}; there are: {', '.join(row.name for row in LANES)}")
