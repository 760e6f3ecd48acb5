"""The device matrix, the workflow made from it, and the scripts that run it."""

import importlib
import os
import re
import sys

import pytest

from tests.house.source import ROOT


@pytest.fixture
def ci(monkeypatch):
    """Imports a script of ci/, which are no package."""
    monkeypatch.syspath_prepend(str(ROOT / "ci"))
    return importlib.import_module


def test_workflow_is_made_from_the_matrix(ci):
    workflow = ci("workflow")
    assert workflow.WORKFLOW.read_text() == workflow.workflow(), "run `python ci/workflow.py` and commit the result"


def test_workflow_check_notices_a_difference(ci, monkeypatch, tmp_path, capsys):
    workflow = ci("workflow")
    monkeypatch.setattr(workflow, "WORKFLOW", tmp_path / "ci.yml")
    monkeypatch.setattr(sys, "argv", ["workflow.py", "--check"])
    assert workflow.main() == 1
    (tmp_path / "ci.yml").write_text(workflow.workflow())
    assert workflow.main() == 0
    (tmp_path / "ci.yml").write_text(workflow.workflow() + "#")
    assert workflow.main() == 1
    assert "run `python ci/workflow.py`" in capsys.readouterr().err


def test_every_lane_has_a_job_or_says_what_it_waits_for(ci):
    text = ci("workflow").workflow()
    for row in ci("lanes").LANES:
        job = re.search(rf"^  {row.name}:$", text, re.MULTILINE)
        assert bool(job) != bool(row.waits_for)
        assert row.waits_for in text


def test_matrix_covers_every_device_and_toolchain(ci):
    names = {row.name for row in ci("lanes").LANES}
    assert {"host-triton36", "host-triton39", "cuda-compile", "cuda-a100", "cuda-h100", "cuda-h200",
            "npu-compile", "npu-signature", "npu", "npu-910b"} <= names


def test_lanes_are_documented(ci):
    text = (ROOT / "docs" / "testing.md").read_text()
    missing = [row.name for row in ci("lanes").LANES if f"`{row.name}`" not in text]
    assert not missing, f"docs/testing.md says nothing of {missing}"


def test_make_targets_of_lanes_exist(ci):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    used = {command.split()[1] for row in ci("lanes").LANES for command in row.commands + row.short
            if command.startswith("make ")}
    assert used <= targets


def test_ci_run_names_lanes_that_need_no_device(ci):
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    names = re.search(r"ci/lane\.py --short (.+)", script.read_text())[1].split()
    rows = [ci("lanes").lane(name) for name in names]
    assert all(row.hosted for row in rows)
    assert {"lint", "host-triton36", "host-triton39", "cuda-compile", "npu-compile", "npu-signature", "npu"} == set(names)


def test_unknown_lane_is_refused(ci):
    with pytest.raises(ValueError, match="no lane 'gpu'; there are: lint, host-triton39"):
        ci("lanes").lane("gpu")


def test_lanes_run_to_the_end_and_a_failure_is_told(ci, monkeypatch, capfd):
    lane, lanes = ci("lane"), ci("lanes")
    rows = {"bad": lanes.Lane("bad", "", ("echo one", "false", "echo never")),
            "good": lanes.Lane("good", "", ("echo whole",), short=("echo short",))}
    monkeypatch.setattr(lane, "lane", rows.__getitem__)
    monkeypatch.setattr(sys, "argv", ["lane.py", "--short", "bad", "good"])
    assert lane.main() == 1
    lines = capfd.readouterr().out.splitlines()
    assert {"one", "short"} <= set(lines) and not {"never", "whole"} & set(lines)
    assert re.fullmatch(r"lane bad +FAILED in 0\.0 min", lines[-2])
    assert re.fullmatch(r"lane good +passed in 0\.0 min", lines[-1])


@pytest.mark.parametrize("arch, main, stack, shared, error, expected", [
    ("sm_80", True, 256, 166_912, "", ""),
    ("sm_80", True, 257, 0, "", "spills 257 bytes a thread, a main record may spill 256"),
    ("sm_80", False, 2048, 0, "", ""),
    ("sm_100", True, 2048, 232_448, "", ""),
    ("sm_80", False, 0, 166_913, "", "needs 166,913 bytes of shared memory, sm_80 has 166,912"),
    ("sm_90", False, 0, 232_449, "", "needs 232,449 bytes of shared memory, sm_90 has 232,448"),
    ("sm_90", False, 0, 0, "CompilationError: x", "does not compile: CompilationError: x"),
])
def test_cubin_limits(ci, arch, main, stack, shared, error, expected):
    limits = ci("cuda_limits")
    assert limits.fault("kernel", arch, main, limits.Needs(255, stack, shared, error)) == expected


def test_measured_spill_raises_the_limit_of_one_kernel(ci, monkeypatch):
    limits = ci("cuda_limits")
    monkeypatch.setitem(limits.MEASURED_SPILLS, ("slow_kernel", "sm_80"), (400, "16 warps without it: 31% slower"))
    assert limits.fault("slow_kernel", "sm_80", True, limits.Needs(stack=400)) == ""
    assert "may spill 400" in limits.fault("slow_kernel", "sm_80", True, limits.Needs(stack=401))
    assert "may spill 256" in limits.fault("slow_kernel", "sm_90", True, limits.Needs(stack=400))


def test_every_measured_spill_has_its_reason(ci):
    assert all(len(reason) > 20 for _, reason in ci("cuda_limits").MEASURED_SPILLS.values())
