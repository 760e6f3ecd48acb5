"""The benchmark of a call's host cost: what it calls a cost, who takes turns, and that every call of the layer is a replay."""

import importlib.util
from pathlib import Path

import pytest
import torch

from graphlin.backends import get_backend, register_backend

SOURCE = Path(__file__).resolve().parents[1] / "benchmarks" / "host_cost.py"


@pytest.fixture(scope="module")
def host_cost():
    spec = importlib.util.spec_from_file_location("host_cost", SOURCE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def idle(host_cost, device):
    """On the CPU, kernels and graphs that do nothing."""
    if device.type != "cpu":
        yield
        return
    backend = get_backend(device)
    register_backend(host_cost.IdleBackend())
    yield
    register_backend(backend)


def test_a_cost_leaves_out_the_first_calls_of_bursts_and_nothing_else(host_cost):
    bursts, is_quiet = [[90, 1, 2, 3], [70, 4, 5, 6], [80, 7, 8, 9]], [False, True, True]
    assert host_cost.Cost.of(bursts, is_quiet) == host_cost.Cost(median=5, quartiles=(2.5, 7.5), least=2, quiet=6.5, first=80)


def test_rounds_are_quiet_by_the_yardstick_alone(host_cost):
    rounds = [{host_cost.YARDSTICK: [0.1, *yardstick], "captured": [1, 1, 1]}
              for yardstick in ([11, 11, 90], [10, 10, 10], [11.5, 11.5, 1], [20, 20, 20])]
    assert host_cost.quiet_rounds(rounds) == [True, True, False, False]


def test_contestants_take_turns_burst_by_burst(host_cost, device, monkeypatch):
    monkeypatch.setattr(host_cost, "BURST", 3)
    seen, modes = [], []
    contestants = {name: host_cost.Contestant(lambda name=name: (seen.append(name), modes.append(torch.is_grad_enabled())),
                                              grad=name == "b", before=lambda name=name: seen.append(name.upper()))
                   for name in "abc"}
    rounds = host_cost.play(contestants, device, rounds=2, warm_up=0.0)
    assert "".join(seen) == "AaaaBbbbCccc" + "BbbbCcccAaaa"
    assert modes == [False] * 3 + [True] * 3 + [False] * 3 + [True] * 3 + [False] * 6
    assert [{name: len(burst) for name, burst in times.items()} for times in rounds] == [dict.fromkeys("abc", 3)] * 2


def test_every_call_of_the_captured_layer_is_a_replay(host_cost, device, idle):
    """Or it would raise."""
    contestants = host_cost.contestants_for(device, tokens=16, hidden_size=128)
    rounds = host_cost.play(contestants, device, rounds=2, warm_up=0.0)
    is_quiet = host_cost.quiet_rounds(rounds)
    assert all(times.keys() == contestants.keys() for times in rounds) and len(contestants) == 12
    for name in contestants:
        cost = host_cost.Cost.of([times[name] for times in rounds], is_quiet)
        assert 0 < cost.least <= cost.median and cost.quartiles[0] <= cost.median <= cost.quartiles[1] and cost.first > 0
