"""What the npu lanes refuse. Compilers run only where the rig's environment does; the rules themselves run anywhere."""

import importlib
import os
import subprocess
import sys
from dataclasses import dataclass, field

import pytest

from tests.house.source import ROOT

RIG = ROOT / ".venv-npu" / "venv" / "bin" / "python"


@pytest.fixture
def ci(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "ci"))
    return importlib.import_module


@dataclass
class Found:
    ok: bool = True
    locks: int = 0
    workspace: int = 0
    rewrites: int = 0
    used: dict = field(default_factory=dict)

    def __str__(self):
        return "UB 9 of 8 bits"


@pytest.mark.parametrize("found, unmasked, grid, expected", [
    (Found(), 0, 65_535, ""),
    (Found(ok=False), 0, 20, "does not fit: UB 9 of 8 bits"),
    (Found(locks=2), 0, 20, "takes 2 locks"),
    (Found(rewrites=1), 0, 20, "1 masked stores"),
    (Found(), 3, 20, "3 masked loads"),
    (Found(), 0, 65_536, "a grid of 65,536 programs, a launch may have 65,535"),
    (Found(workspace=1 << 20), 0, 64, ""),
    (Found(workspace=1 << 20), 0, 65, "a workspace of 68,157,440 bytes"),
])
def test_kernel_limits(ci, found, unmasked, grid, expected):
    wrong = ci("npu_limits").fault(found, unmasked, grid)
    assert wrong.startswith(expected) and bool(wrong) == bool(expected)


CALLS = {
    "accelerator.py": "is_available current_device graph_pool_handle memory_snapshot empty_cache Stream stream synchronize "
                      "is_current_stream_capturing get_sync_debug_mode set_sync_debug_mode NPUGraph.capture_begin "
                      "NPUGraph.capture_end NPUGraph.reset",
    "__init__.py": "get_device_name device",
    "graph.py": "NPUGraph.capture_begin NPUGraph.capture_end NPUGraph.replay NPUGraph.pool _C._weak_ref_tensor",
}


def test_calls_of_the_backend_are_found_and_bound(ci, tmp_path):
    lane = ci("npu_signature")
    calls = lane.backend_calls(lane.FILES)
    for file, names in CALLS.items():
        assert set(names.split()) <= {call.name for call in calls if call.where.startswith(file)}, file
    assert ("pool", "capture_error_mode") in [call.keywords for call in calls if call.name == "NPUGraph.capture_begin"]
    wheel = tmp_path / "torch_npu.whl"
    with lane.ZipFile(wheel, "w") as archive:
        archive.writestr("torch_npu/npu/graphs.py", "from torch_npu._C import _weak_ref_tensor as WeakRef\n"
                                                    "class NPUGraph:\n    def capture_begin(self, pool=None): ...\n"
                                                    "def graph_pool_handle(): ...\n")
    signatures = lane.wheel_signatures(wheel)
    assert lane.Call("", "graph_pool_handle", 0, ()).fault(signatures) == ""
    assert lane.Call("", "NPUGraph.capture_begin", 0, ("pool",)).fault(signatures) == ""
    assert "unexpected keyword argument 'capture_error_mode'" in \
        lane.Call("", "NPUGraph.capture_begin", 0, ("pool", "capture_error_mode")).fault(signatures)
    assert lane.Call("", "_C._weak_ref_tensor", 1, ()).fault(signatures) == ""
    for missing in ("NPUGraph.replay", "_C._strong_ref_tensor"):
        assert lane.Call("", missing, 0, ()).fault(signatures) == "there is no such name"


def test_what_the_emulated_device_leaves_out_exists_and_is_documented(ci):
    documented = (ROOT / "docs" / "ascend.md").read_text()
    for beginning, reason in ci("npu_rig.not_emulated").NOT_EMULATED.items():
        path, name = beginning.split("[")[0].split("::")
        assert f"def {name}(" in (ROOT / path).read_text() and f"`{name}`" in documented and reason, beginning


PLANTED = """
import sys
sys.argv = ["npu_compile.py"]
import npu_compile, torch, triton, triton.language as tl
from graphlin.backends import LaunchRecord
from launches import Job
npu_compile.driver.install_front_end()

@triton.jit
def too_large(x, y, M: tl.constexpr, N: tl.constexpr):
    p = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    a = tl.load(x + p)
    tl.store(y + p, tl.exp(a) * a + tl.sigmoid(a))

@triton.jit
def breaks(x, y, n):
    for i in range(n):
        if i == 3:
            break
        tl.store(y + i, tl.load(x + i))

@triton.jit
def rewrites(x, y, n, B: tl.constexpr):
    o = (tl.program_id(0) * B + tl.arange(0, B)) - 3
    tl.store(y + o, tl.load(x + tl.arange(0, B)), mask=(o >= 0) & (o < n))

@triton.jit
def fits(x, y, B: tl.constexpr):
    tl.store(y + tl.arange(0, B), tl.load(x + tl.arange(0, B)))

x = torch.zeros(1 << 15)
jobs = [Job("main", "", kernel, 1, args, constexprs, LaunchRecord())
        for kernel, args, constexprs in ((too_large, (x, x), dict(M=128, N=256)), (breaks, (x, x, 9), {}),
                                         (rewrites, (x, x, 9), dict(B=64)), (fits, (x, x), dict(B=64)))]
print(npu_compile.report(jobs, 1), "faults")
"""


@pytest.mark.skipif(not RIG.exists(), reason="needs the environment of ci/npu_rig/setup.sh")
def test_a_planted_fault_is_told_with_the_kernel_and_the_compilers_line(tmp_path):
    script = tmp_path / "planted.py"
    script.write_text(PLANTED)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "ci"), str(ROOT)])}
    environment.pop("NPU_RIG_LOADED", None)     # the lane compiles without a device, also where these tests run on the rig
    done = subprocess.run([RIG, script], capture_output=True, text=True, timeout=300, env=environment)
    told = done.stdout
    assert told.strip().endswith("3 faults"), told + done.stderr[-2000:]
    assert "FAULT too_large: does not fit" in told and "ub overflow, requires" in told.replace("UB overflow", "ub overflow")
    assert "FAULT breaks: does not fit" in told and "unsupported AST node type: Break" in told
    assert "FAULT rewrites: 1 masked stores" in told and "FAULT fits" not in told


def test_torch_npu_is_not_in_the_main_environment():
    """With it installed, `import torch` fails on a machine without CANN."""
    if "npu_rig" in sys.modules:
        pytest.skip("this is the rig's own environment")
    pins = "".join(path.read_text() for path in (ROOT / "ci").glob("constraints-*.txt"))
    assert "torch_npu" not in pins and "triton-ascend" not in pins
