"""A backend from outside the package, and devices that have none."""

import os
import sys

import pytest
import torch

from graphlin import backends
from graphlin.backends import get_backend, register_backend
from graphlin.backends.interpreter import choose_interpreter, is_interpreting
from graphlin.capture import capture
from graphlin.errors import BackendUnavailable
from graphlin.layers import GatedDeltaNet
from graphlin.tier import Tier
from graphlin.verify import verify
from tests.blocks import Mixer, captured, pack

MEMBERS = {"is_available", "new_pool", "pool_bytes", "pool_model", "unowned", "side_stream", "stream", "synchronize",
           "syncs_refused", "is_capturing", "capture", "arch", "num_cores", "launch_record", "launch", "compiling",
           "prepare", "allocator", "count_launches"}


class Outsider:
    """Shares no class with graphlin: what the protocol has is asked of another backend, and noted; it has nothing else."""

    def __init__(self, inner):
        self._inner = inner
        self.device_type = inner.device_type
        self.asked = []

    def __getattr__(self, name):
        if name not in MEMBERS:
            raise AttributeError(f"{name} is no part of GraphBackend")
        self.asked.append(name)
        return getattr(self._inner, name)


@pytest.fixture
def outsider(device, monkeypatch):
    monkeypatch.setattr(backends, "_backends", {})
    return Outsider(get_backend(device))


def test_a_registered_backend_captures_launches_and_replays(device, outsider):
    outsider.asked.clear()
    register_backend(outsider)
    assert get_backend(device) is outsider
    graphed = capture(Mixer().to(device), Tier(16, 3))
    x, cu = pack([3, 6], device)
    assert torch.allclose(graphed(x, cu), graphed.block(x, cu), atol=1e-5)
    graphed(x, cu).sum().backward()
    captured(graphed, 2, backwards=1)
    assert graphed.held_bytes() > 0 and verify(graphed, x, cu).ok and graphed.price.total > 0
    assert set(outsider.asked) == MEMBERS
    assert set(backends._protocol_members()) == {"device_type", *MEMBERS}


def test_a_backend_may_be_given_to_one_capture(device, outsider):
    graphed = capture(Mixer().to(device), Tier(16, 3), backend=outsider)
    outsider.asked.clear()
    graphed(*pack([3, 6], device))
    assert "capture" in outsider.asked and get_backend(device) is not outsider


def test_refresh_takes_the_backend_that_serves_the_block_now(device, outsider):
    graphed = capture(Mixer().to(device), Tier(16, 3))
    x, cu = pack([3, 6], device)
    graphed(x, cu)
    register_backend(outsider)
    outsider.asked.clear()
    graphed.refresh()
    graphed(x, cu)
    assert "capture" in outsider.asked
    captured(graphed, 2)


def test_an_incomplete_backend_is_refused_by_its_gaps(outsider):
    class Half:
        device_type = "meta"

        def is_available(self):
            return True
    with pytest.raises(TypeError, match="backend: Half lacks .*new_pool.*launch"):
        register_backend(Half())


def test_a_device_without_backend_names_those_there_are():
    with pytest.raises(BackendUnavailable, match="no graphlin backend for device type 'xla'; there are: cpu, cuda, meta"):
        get_backend("xla")


def test_blocks_without_memory_have_shapes_and_no_graphs():
    layer = GatedDeltaNet(64, head_dim=16, num_heads=2, expand_v=1).to("meta")
    x, cu = torch.empty(1, 9, 64, device="meta"), torch.empty(3, dtype=torch.int32, device="meta")
    assert layer(x, cu).shape == (1, 9, 64)
    with pytest.raises(BackendUnavailable, match="no memory to capture; move it to a device, or ask graphlin.price"):
        capture(layer, Tier(16, 3))(x, cu)


@pytest.mark.parametrize("devices", [0, 1])
def test_the_interpreter_is_chosen_without_starting_cuda(monkeypatch, devices):
    def starts_cuda():
        raise AssertionError("a forked process could not use CUDA any more")
    monkeypatch.setattr(torch.accelerator, "is_available", starts_cuda)
    monkeypatch.setattr(torch.cuda, "is_available", starts_cuda)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    monkeypatch.setitem(os.environ, "TRITON_INTERPRET", "")
    monkeypatch.delitem(os.environ, "TRITON_INTERPRET")
    for name in [name for name in sys.modules if name == "triton"]:
        monkeypatch.delitem(sys.modules, name)
    choose_interpreter()
    assert is_interpreting() == (devices == 0)


def test_an_absent_device_says_what_to_install(monkeypatch):
    monkeypatch.setattr(backends, "_backends", {})
    if torch.cuda.is_available():
        pytest.skip("cuda is here")
    with pytest.raises(BackendUnavailable, match=r"'cuda' backend cannot run .*graphlin\[cuda\]"):
        get_backend("cuda")
