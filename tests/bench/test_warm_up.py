import pickle

import pytest
import torch
import triton
from triton.runtime.autotuner import Autotuner

from graphlin.bench import layers, tune, warm_up
from graphlin.bench.clock import Clock
from graphlin.bench.peers import PEERS, Peer
from graphlin.bench.problems import OUR_OPS
from graphlin.bench.setting import HOST, Setting
from graphlin.bench.taps import tapped
from graphlin.bench.warm_up import candidates_compiled, compilations, in_parallel
from tests.bench.conftest import TINY


@pytest.fixture
def compiling(device, monkeypatch):
    """A setting with peers whose device is said to compile, and what its calls ran: by whom, with how many tokens."""
    ran = []

    def noting(who):
        def op(**arguments):
            ran.append((who, arguments["x"].shape[1]))
            return OUR_OPS["conv"](**arguments)
        return op

    peer = Peer("peer", (), {"conv": lambda: (noting("eager"), noting("graphed"))}, tiered=("conv",))
    monkeypatch.setitem(PEERS, "peer", peer)
    monkeypatch.setattr(Clock, "on_device", True)
    return Setting(device, TINY, peers=(peer,)), ran


def test_nothing_is_compiled_for_a_cpu(device):
    if device.type == "cpu":                                     # elsewhere its backend can't run
        assert compilations(Setting(device, HOST), ["gdn"]) == []


def test_each_op_contestant_and_form_is_one_call(compiling):
    setting, _ = compiling
    assert len(compilations(setting, ["conv"])) == 1 + 2
    fla = Setting(setting.device, TINY, peers=(PEERS["fla"],))
    assert len(compilations(fla, ["gdn", "kda"])) == 2 + 1 + 2      # of gdn it has one form
    assert len(compilations(fla, ["layers"])) == 2 + 2
    assert len(compilations(setting, ["gdn", "stages"])) == 3       # the peer has no gdn; stages has all ops, and no peer
    assert len(compilations(setting, ["layers"])) == len(compilations(setting, ["ladder"])) == 2
    assert len(compilations(setting, ["model"])) == 2
    assert compilations(setting, ["cold"]) == []
    for call in compilations(setting, ["conv", "layers", "model"]):
        assert pickle.loads(pickle.dumps(call)).args == call.args


def test_a_call_runs_the_op_at_every_shape_both_ways(compiling):
    setting, ran = compiling
    for call in compilations(setting, ["conv"])[1:]:
        call()
    assert ran == [("eager", 20)] * 2 + [("graphed", 20)] * 2


def test_layers_and_the_model_are_run(compiling, monkeypatch):
    setting, _ = compiling
    built = []
    monkeypatch.setattr(layers.LayerCall, "work", lambda call, layer, direction: lambda: built.append(type(layer).__name__))
    monkeypatch.setattr(warm_up, "training_step", lambda model, *_: lambda: built.append(type(model).__name__))
    for call in compilations(setting, ["layers", "model"]):
        call()
    assert built == ["GatedDeltaNet", "KimiDeltaAttention", "ByteModel", "ByteModel"]


def test_calls_run_in_other_processes():
    import os
    results = [future.result() for future in in_parallel([os.getpid, os.getpid])]
    assert len(results) == 2 and os.getpid() not in results


def test_candidates_are_shared_out_between_the_processes(device, monkeypatch):
    used = []

    def noted(where, records=None):
        used.extend((records or {}).items())
        return tapped(where, records)

    monkeypatch.setattr(tune, "tapped", noted)
    search = {"BD": (16, 32), "waves": (1, 2, 4)}
    shapes, kernels = [(20, 2), (40, 2)], ["conv_forward", "conv_backward"]
    for call in tune.compilations("conv", kernels, search, shapes, TINY.sizes, device, processes=3):
        pickle.loads(pickle.dumps(call))()
    # Numbers of programs are nothing to compile.
    forms = [(kernel, record.tiles["BD"]) for kernel, record in used]
    assert sorted(forms) == [("conv_backward", 16), ("conv_backward", 32), ("conv_forward", 16), ("conv_forward", 32)]


class Kernel:
    """What an autotuner launches, without a device; `BLOCK=3` does not fit."""

    def __init__(self):
        self.fn, self.warmed, self.launched = (lambda x, n: None), [], []

    def warmup(self, x, n, *, grid, BLOCK, **options):
        self.warmed.append(BLOCK)

    def run(self, x, n, *, grid, warmup, BLOCK, **options):
        self.launched.append(BLOCK)
        if BLOCK == 3:
            raise RuntimeError("out of resource")
        return BLOCK


def test_a_peers_candidates_are_compiled_and_not_timed():
    configs = [triton.Config({"BLOCK": block}) for block in (3, 1, 2)]
    kernel, own = Kernel(), Autotuner.run
    tuner = Autotuner(kernel, ["x", "n"], configs, ["n"], None, None)
    with candidates_compiled():
        for n in (8, 8, 9):
            assert tuner.run(torch.zeros(n), n, grid=(1,), warmup=False) == 1
    assert kernel.warmed == [3, 1, 2] * 2 and kernel.launched == [3, 1] * 3
    assert Autotuner.run is own and not tuner.cache


def test_without_threads_for_compiling_an_autotuner_is_left_alone(monkeypatch):
    monkeypatch.delattr(triton, "AsyncCompileMode")
    own = Autotuner.run
    with candidates_compiled():
        assert Autotuner.run is own
