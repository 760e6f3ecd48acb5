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
def idle(host_cost):
    """On the CPU, kernels and graphs that do nothing."""
    backend = get_backend("cpu")
    register_backend(host_cost.IdleBackend())
    yield
    register_backend(backend)


def test_a_cost_leaves_out_the_first_calls_of_bursts_and_nothing_else(host_cost):
    rounds = [[[90, 1, 2, 3], [70, 4, 5, 6]], [[80, 7, 8, 9]]]
    cost = host_cost.Cost.of(rounds)
    assert cost == host_cost.Cost(median=5, quartiles=(2.5, 7.5), best_round=3.5, first=80)


def test_contestants_take_turns_burst_by_burst(host_cost, device, monkeypatch):
    monkeypatch.setattr(host_cost, "BURSTS", 2)
    monkeypatch.setattr(host_cost, "BURST", 3)
    seen, modes = [], []
    contestants = {name: host_cost.Contestant(lambda name=name: (seen.append(name), modes.append(torch.is_grad_enabled())),
                                              grad=name == "b", before=lambda name=name: seen.append(name.upper()))
                   for name in "abc"}
    times = host_cost.play_round(contestants, 1, device)
    assert "".join(seen) == "BbbbCcccAaaa" * 2
    assert modes == [True] * 3 + [False] * 6 + [True] * 3 + [False] * 6
    assert {name: [len(burst) for burst in bursts] for name, bursts in times.items()} == dict.fromkeys("abc", [3, 3])


def test_every_call_of_the_captured_layer_is_a_replay(host_cost, device, idle, monkeypatch):
    monkeypatch.setattr(host_cost, "BURSTS", 1)
    contestants = host_cost.contestants_for(device, tokens=16, hidden_size=128)
    costs = host_cost.compare(contestants, device, rounds=2, warm_up=0.0)
    assert [*costs] == [*contestants] and len(costs) == 12
    for cost in costs.values():
        assert 0 < cost.quartiles[0] <= cost.median <= cost.quartiles[1] and cost.best_round > 0 and str(cost).count(".") == 5
