"""What backends share: on a device as it is, and over a module that only notes what it is asked."""

import os
import subprocess
import sys
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from graphlin.backends import get_backend
from graphlin.backends.accelerator import AcceleratorBackend
from graphlin.errors import CaptureError, HostSync
from tests.backends.kernel import record


@pytest.mark.device_only
def test_pool_bytes_are_the_segments_of_the_pool(device):
    backend = get_backend(device)
    pool = backend.new_pool()
    assert backend.pool_bytes(pool, device) == 0
    graph, out = record(device, lambda: torch.zeros(16 << 20, device=device) + 1, pool)
    assert 64 << 20 <= backend.pool_bytes(pool, device) <= 256 << 20
    assert backend.pool_bytes(pool, torch.device(device.type)) == backend.pool_bytes(pool, device)
    graph.replay()
    assert (out == 1).all()


@pytest.mark.device_only
def test_syncs_outside_captures_are_refused_where_asked(device):
    x = torch.ones(3, device=device)
    with pytest.raises(HostSync, match="waits for the device at .*test_accelerator.py"), get_backend(device).syncs_refused():
        x.sum().item()
    assert x.sum().item() == 3


FIRST_USE = """
import torch, warnings, graphlin
warnings.simplefilter("error")
graphed = graphlin.capture(torch.nn.Linear(8, 8).to("{0}"), graphlin.Tier(8, 2))
x = torch.randn(4, 8, device="{0}")
graphed(x).sum().backward()
assert graphlin.verify(graphed, x).ok and graphed.stats.backward_replays == 1
"""


def test_the_first_capture_of_a_process_warns_of_nothing(device):
    paths = os.pathsep.join(map(os.path.abspath, sys.path))
    subprocess.run([sys.executable, "-c", FIRST_USE.format(device.type)], check=True, env=os.environ | {"PYTHONPATH": paths})


class Module:
    """A device module without a device: it notes calls, and its captures end only if they may."""

    def __init__(self, ends):
        self.calls, self.ends, self.mode = [], ends, "default"

    def __getattr__(self, name):
        return lambda *args, **kwargs: self.calls.append(name)

    @contextmanager
    def stream(self, stream):
        self.calls.append("stream")
        try:
            yield
        finally:
            self.calls.append("stream before")

    def graph(self):
        return SimpleNamespace(capture_begin=self.capture_begin, capture_end=self.capture_end, reset=self.reset)

    def capture_end(self):
        self.calls.append("capture_end")
        if not self.ends:
            raise RuntimeError("a stream is not joined")

    def get_sync_debug_mode(self):
        return self.mode

    def set_sync_debug_mode(self, mode):
        self.mode = mode


@pytest.fixture
def on_module():
    def make(ends=True):
        backend = object.__new__(AcceleratorBackend)
        backend._module = Module(ends)
        backend.graph_type = backend._module.graph
        backend.failures = (("not joined", CaptureError, "at {line}: {error}"),)
        backend.sync_failures = (("^sync$", HostSync, "at {line}"),)
        return backend, backend._module
    return make


BEGUN = ["stream", "empty_cache", "capture_begin"]


def test_a_capture_is_begun_and_ended_on_its_stream(on_module):
    backend, module = on_module()
    with backend.capture(pool=None, stream=None):
        assert module.calls == BEGUN
    assert module.calls == [*BEGUN, "capture_end", "stream before"]


@pytest.mark.parametrize("ends", [True, False])
@pytest.mark.parametrize("raised, expected", [(KeyError("key"), KeyError), (RuntimeError("not joined"), CaptureError),
                                              (KeyboardInterrupt(), KeyboardInterrupt), (HostSync("mine"), HostSync)])
def test_a_capture_that_fails_is_ended_and_its_graph_reset(on_module, ends, raised, expected):
    backend, module = on_module(ends)
    with pytest.raises(expected), backend.capture(pool=None, stream=None):
        raise raised
    assert module.calls == [*BEGUN, "capture_end", "reset", "stream before"]


def test_a_capture_that_cannot_end_is_typed_and_reset(on_module):
    backend, module = on_module(ends=False)
    with pytest.raises(CaptureError, match="a stream is not joined"), backend.capture(pool=None, stream=None):
        pass
    assert module.calls == [*BEGUN, "capture_end", "capture_end", "reset", "stream before"]


@pytest.mark.parametrize("raised, expected", [(RuntimeError("sync"), HostSync), (RuntimeError("not joined"), RuntimeError)])
def test_the_mode_that_refuses_syncs_is_left_as_it_was(on_module, raised, expected):
    backend, module = on_module()
    with pytest.raises(expected) as caught, backend.syncs_refused():
        assert module.mode == "error"
        raise raised
    assert type(caught.value) is expected and module.mode == "default"
