"""What every test shares: the device, poisoned memory, fixed seeds."""

import os
import random
from importlib.util import find_spec

import pytest
import torch

from tests.memory import PoisonedMemory

_TORCH_TYPE = {"host": "cpu", "cuda": "cuda", "npu": "npu"}


def pytest_addoption(parser):
    parser.addoption("--device", choices=tuple(_TORCH_TYPE), help="device to test (default: cuda where there is one)")
    parser.addoption("--require-device", action="store_true", help="a test of the device that skips fails instead")
    parser.addoption("--slow", action="store_true", help="also run tests marked slow")


def pytest_configure(config):
    config.addinivalue_line("markers", "device_only: too big for the interpreter; skipped on host")
    config.addinivalue_line("markers", "slow: runs only with --slow")
    config.addinivalue_line("markers", "raw_memory: uninitialised memory stays as the allocator gives it")
    if config.option.device is None:
        config.option.device = "cuda" if torch.cuda.is_available() else "host"
    if config.option.device == "host":
        os.environ["TRITON_INTERPRET"] = "1"      # Triton reads it while it loads, so before any test module does
        # Triton 3.6's interpreter takes loop bounds from arrays of one element, which numpy 2 deprecates.
        config.addinivalue_line("filterwarnings", "ignore:Conversion of an array with ndim > 0:DeprecationWarning")
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)


def pytest_collection_modifyitems(config, items):
    if config.option.slow:
        return
    slow = [item for item in items if item.get_closest_marker("slow")]
    config.hook.pytest_deselected(items=slow)
    items[:] = [item for item in items if item not in set(slow)]


def pytest_runtest_setup(item):
    if item.config.option.device == "host" and item.get_closest_marker("device_only"):
        pytest.skip("device_only: too big for the interpreter")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """In a lane that requires its device, a skip is a failure, except of what the host's interpreter can't do."""
    report = yield
    excused = hasattr(report, "wasxfail") or (item.config.option.device == "host"
                                              and item.get_closest_marker("device_only"))
    if report.skipped and item.config.option.require_device and "device" in item.fixturenames and not excused:
        report.outcome = "failed"
        report.longrepr = f"skipped, though --require-device was given: {report.longrepr[2]}"
    return report


@pytest.fixture(scope="session")
def device(request) -> torch.device:
    """The device under test, `--device`; tests that use it are skipped where it is absent."""
    name = request.config.option.device
    if not _is_present(name):
        pytest.skip(f"device {name!r} is absent")
    return torch.device(_TORCH_TYPE[name])


def _is_present(name: str) -> bool:
    if name == "npu":
        return find_spec("torch_npu") is not None and torch.npu.is_available()
    return name == "host" or torch.cuda.is_available()


@pytest.fixture(autouse=True)
def fixed_seeds():
    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def poisoned_memory(request, monkeypatch):
    """Fills what `torch.empty` and its kin return with NaN, or a large integer, and watches the memory around it.

    A row that a kernel forgets to write is then seen in the result, a row written outside a result or workspace at the
    end of the test. Torch's own debug mode would also swap algorithms. The fill is one more launch; a test that counts
    launches is marked `raw_memory`.
    """
    memory = PoisonedMemory()
    if not request.node.get_closest_marker("raw_memory"):
        from graphlin.backends import cuda  # imports Triton, which must be configured by then
        for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (cuda, "_empty_strided_cuda"),
                            (torch.Tensor, "new_empty"), (torch.Tensor, "new_empty_strided")):
            monkeypatch.setattr(owner, name, memory.allocating(getattr(owner, name)))
    yield memory
    memory.check()
