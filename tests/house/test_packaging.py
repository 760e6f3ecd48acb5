"""What pyproject.toml promises."""

import re

import pytest

import graphlin
from tests.house.source import ROOT

tomllib = pytest.importorskip("tomllib", reason="reads pyproject.toml; Python 3.11")


@pytest.fixture(scope="module")
def project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_name_python_and_license(project):
    assert project["name"] == "graphlin"
    assert project["requires-python"] == ">=3.10"
    assert project["license"] == "MIT"
    assert (ROOT / "LICENSE").read_text().startswith("MIT License")


def test_version_is_that_of_the_package(project):
    assert graphlin.__version__ == project["version"]


def test_extras(project):
    extras = project["optional-dependencies"]
    assert set(extras) == {"cuda", "npu", "cpu", "test", "bench", "dev"}
    names = {extra: {re.split(r"[<>=]", need)[0] for need in needs} for extra, needs in extras.items()}
    assert names["cuda"] == {"triton"}
    assert names["npu"] == {"torch_npu", "triton-ascend"}
    assert "triton" in names["cpu"] and "triton-ascend" not in names["cpu"]


def test_version_heads_the_changelog(project):
    heads = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert project["version"] in heads[:2], f"CHANGELOG.md has no section for {project['version']}"


@pytest.mark.parametrize("triton", ["36", "39"])
def test_constraints_pin_every_dependency(project, triton):
    """An unpinned torch pulls gigabytes of CUDA packages; an unpinned anything breaks on somebody else's day."""
    pins = {}
    for file in ("constraints-cpu.txt", f"constraints-triton{triton}.txt"):
        pins |= dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "ci" / file).read_text(), re.MULTILINE))
    pinned = {name.lower() for name in pins}
    extras = project["optional-dependencies"]
    wanted = [need for extra in ("cpu", "test", "bench", "dev") for need in extras[extra]] + project["dependencies"]
    assert {re.split(r"[<>=]", need)[0] for need in wanted} <= pinned
    assert pins["torch"] == "2.13.0"
    assert pins["triton"] == {"36": "3.6.0", "39": "3.9.0"}[triton]


def test_demo_text_is_packaged():
    package_data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    texts = [path for pattern in package_data["graphlin.demo"] for path in (ROOT / "graphlin" / "demo").glob(pattern)]
    assert texts, f"no text of the demo matches {package_data['graphlin.demo']}"
    assert all(text.stat().st_size > 1000 for text in texts)
