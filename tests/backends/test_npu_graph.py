"""ACL graphs: what they record, captures that fail, and what those leave; on the rig or on an Ascend device."""

import os
import subprocess
import sys

import pytest
import torch

from graphlin.backends import get_backend
from graphlin.errors import BackendUnavailable, CaptureError, ColdKernel, HostSync, ReplayError, Resource
from tests.backends.kernel import launch_cold, record


@pytest.fixture
def npu(request):
    if request.config.option.device != "npu":
        pytest.skip("needs an NPU")
    return torch.device("npu", torch.npu.current_device())


FAILURES = {
    "item": (lambda x: (x * 2).sum().item(), HostSync, "waits for the device at .*test_npu_graph.py"),
    "cpu": (lambda x: x.cpu(), HostSync, "Keep the value on the device"),
    "tolist": (lambda x: x.tolist(), HostSync, "waits"),
    "mask": (lambda x: x[x > 0], HostSync, "waits"),
    "synchronize": (lambda x: torch.npu.synchronize(), HostSync, "waits"),
    "cold kernel": (launch_cold, ColdKernel, "kernel add_one would be compiled inside a capture"),
    "of the body": (lambda x: {}["key"], KeyError, "key"),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_a_failed_capture_is_typed_and_leaves_stream_and_pool_usable(npu, failure):
    body, error, text = FAILURES[failure]
    x, stream, pool = torch.randn(5, device=npu), torch.npu.current_stream(), get_backend(npu).new_pool()
    with pytest.raises(error, match=text):
        record(npu, lambda: body(x), pool)
    assert torch.npu.current_stream() == stream and not get_backend(npu).is_capturing()
    graph, out = record(npu, lambda: x * 2)
    x.add_(1)
    graph.replay()
    assert torch.equal(out, x * 2)


def test_a_side_stream_that_is_not_joined_breaks_the_capture(npu):
    x, side = torch.randn(5, device=npu), torch.npu.Stream()

    def fork():
        side.wait_stream(torch.npu.current_stream())
        with torch.npu.stream(side):
            x.add_(1)

    with pytest.raises(CaptureError, match="not joined again"):
        record(npu, fork)


def test_a_capture_on_the_default_stream_is_refused(npu):
    backend = get_backend(npu)
    with pytest.raises(CaptureError, match="default stream.*pass a stream of side_stream()"):
        with backend.capture(pool=backend.new_pool(), stream=torch.npu.default_stream()):
            pass


def test_a_graph_without_a_capture_is_no_graph(npu):
    graph, _ = record(npu, lambda: torch.ones(3, device=npu) * 2)
    with pytest.raises(CaptureError, match="second capture.*reset"), torch.npu.stream(torch.npu.Stream()):
        graph.capture_begin()
    graph.reset()
    for use in (graph.replay, graph.pool):
        with pytest.raises(ReplayError, match="holds no capture"):
            use()


def test_streams_that_run_out_are_a_resource_error_and_a_reset_gives_one_back(npu):
    x, pool, graphs = torch.ones(3, device=npu), get_backend(npu).new_pool(), []
    with pytest.raises(Resource, match=r"no stream.*1,984\. Capture fewer tiers"):
        while len(graphs) < 2048:
            graphs.append(record(npu, lambda: x * 2, pool)[0])
    assert len(graphs) > 1000
    graphs.pop().reset()
    graph, out = record(npu, lambda: x * 3)
    graph.replay()
    assert torch.equal(out, x * 3)


def test_device_facts(npu):
    backend = get_backend(npu)
    assert backend.arch(npu).startswith("Ascend910")
    assert backend.num_cores(torch.device("npu")) in range(16, 65)


NO_CANN = """
from graphlin.backends import get_backend
try:
    get_backend("npu")
except Exception as error:
    print(type(error).__name__, error)
"""


def test_torch_npu_without_cann_is_a_typed_error(npu):
    """In a process of its own, where nothing has made the ACL libraries known."""
    paths = os.pathsep.join(map(os.path.abspath, sys.path))
    env = os.environ | {"PYTHONPATH": paths, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "LD_LIBRARY_PATH": "", "NPU_RIG_LOADED": ""}
    told = subprocess.run([sys.executable, "-W", "ignore", "-c", NO_CANN], capture_output=True, text=True, env=env).stdout
    if "npu_rig" not in sys.modules:
        pytest.skip("this machine has CANN where the loader finds it")
    assert told.startswith("BackendUnavailable") and "libhccl.so" in told and "set_env.sh" in told


def test_no_torch_npu_is_a_typed_error():
    if "torch_npu" in sys.modules:
        pytest.skip("torch_npu is installed")
    with pytest.raises(BackendUnavailable, match="torch_npu is not installed. Install graphlin"):
        get_backend("npu")
