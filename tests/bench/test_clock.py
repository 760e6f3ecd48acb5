from types import SimpleNamespace

import pytest
import torch

from graphlin.backends import get_backend
from graphlin.bench import clock as clock_module
from graphlin.bench.clock import Clock


class FakeDevice:
    """A device whose time passes only by the work given to it, and its events."""

    def __init__(self):
        self.now = 0.0
        self.log = []

    def work(self, name, microseconds):
        def run():
            self.log.append(name)
            self.now += microseconds
        return run

    def module(self, device):
        fake = self

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self):
                self.at = fake.now

            def synchronize(self):
                pass

            def elapsed_time(self, other):
                return (other.at - self.at) / 1e3
        return SimpleNamespace(Event=Event)


@pytest.fixture
def fake(monkeypatch):
    fake = FakeDevice()
    monkeypatch.setattr(clock_module, "get_backend", lambda device: SimpleNamespace(synchronize=lambda device: None))
    monkeypatch.setattr(clock_module.torch, "get_device_module", fake.module)
    return fake


def test_stream_times_are_microseconds_of_one_call_in_turn(fake):
    clock = Clock(torch.device("meta"), rounds=3)
    found = clock.on_stream({"short": fake.work("s", 100.0), "long": fake.work("l", 5000.0)})
    assert found["short"].median == pytest.approx(100.0) and found["long"].median == pytest.approx(5000.0)
    assert found["short"].count == 3
    # A pilot of each, then rounds in turn; each batch is behind a call that is not timed.
    assert "".join(fake.log) == "ss" + "ll" + ("s" * 5 + "ll") * 3


def test_a_batch_has_a_largest_size(fake):
    Clock(torch.device("meta"), rounds=1).on_stream({"tiny": fake.work("t", 1.0)})
    assert len(fake.log) == 2 + 1 + clock_module.LARGEST_BATCH


def test_host_times_do_not_wait_and_whole_times_do(monkeypatch, device):
    now = [0.0]
    waits = []

    def synchronize(device):
        waits.append(now[0])
        now[0] += 1e-3 if len(waits) % 2 == 0 else 0.0

    monkeypatch.setattr(clock_module, "perf_counter", lambda: now[0])
    monkeypatch.setattr(clock_module, "get_backend", lambda device: SimpleNamespace(synchronize=synchronize))

    def work():
        now[0] += 2e-3

    clock = Clock(device, rounds=1)
    assert clock.on_host({"w": work})["w"].median == pytest.approx(2000)
    waits.clear()
    assert clock.until_done({"w": work})["w"].median == pytest.approx(3000)
    assert len(waits) == 2


def test_captured_work_is_replayed(device):
    x = torch.zeros(3, device=device)
    calls = []

    def work():
        calls.append(1)
        x.add_(1)

    replay = Clock(device, rounds=1).captured(work)
    get_backend(device).synchronize(device)
    before, called = x.clone(), len(calls)
    replay()
    get_backend(device).synchronize(device)
    assert torch.equal(x, before + 1)
    assert len(calls) == called
