from dataclasses import dataclass, replace

import pytest
import torch

import graphlin
from graphlin.bench import cold, ladder, layers, model, underfilled
from graphlin.bench.layers import LAYERS, LayerCall, LayerKind
from graphlin.bench.peers import PEERS, Peer
from graphlin.bench.problems import OUR_OPS
from graphlin.bench.results import BOTH, FORWARD, OURS
from graphlin.bench.setting import DEVICE, HOST, Setting
from graphlin.demo.train import CPU
from tests.bench.conftest import TINY


def cells(rows):
    return {(row.key.direction, row.who, row.measure) for row in rows if row.error is None and row.sample.median > 0}


def test_shapes_are_those_given_or_the_usual_ones(device):
    assert Setting(device, DEVICE).shapes_of("conv") == [(512, 8), (2048, 16), (4096, 32), (32768, 1)]
    assert Setting(device, DEVICE, quick=True).shapes_of("gdn") == [(512, 1), (4096, 32)]
    assert Setting(device, DEVICE, quick=True).clock.rounds < Setting(device, DEVICE).clock.rounds
    assert Setting(device, DEVICE, shapes=((7, 2),)).shapes_of("gdn") == [(7, 2)]
    assert HOST.shapes.keys() == DEVICE.shapes.keys()


def test_underfilled_tiers_are_compared_with_the_exact_size(device, monkeypatch):
    monkeypatch.setattr(underfilled, "PROBLEMS", {"conv": underfilled.PROBLEMS["conv"]})
    seen = []

    def noted(**arguments):
        seen.append((arguments["x"].shape[1], len(arguments["cu_seqlens"])))
        return OUR_OPS["conv"](**arguments)

    peers = (Peer("peer", (), {"conv": lambda: (OUR_OPS["conv"], noted)}, tiered=("conv",)),
             Peer("fixed", (), {"conv": lambda: (OUR_OPS["conv"], OUR_OPS["conv"])}))
    job, = underfilled.jobs(Setting(device, TINY, peers=peers))
    rows = list(job.measure())
    assert cells(rows) == {(direction, who, measured) for direction in (FORWARD, BOTH) for who in (OURS, "peer")
                           for measured in ("exact size", "under-filled")}
    assert {row.key.case for row in rows} == {"conv in 36, 3"} and {(r.key.tokens, r.key.seqs) for r in rows} == {(17, 1)}
    assert set(seen) == {(17, 2), (36, 4)}


@pytest.mark.parametrize("kind", LAYERS, ids=lambda kind: kind.name)
def test_a_layer_call_has_all_gradients(device, kind):
    layer = kind.build(TINY.sizes, device)
    assert type(layer).__name__ == kind.name
    call = LayerCall(layer, 20, 2, TINY.sizes, device)
    output, hidden_grad, *grads = call.work(layer, BOTH)()
    assert torch.equal(output, call.work(layer, FORWARD)()[0])
    assert hidden_grad.shape == call.hidden.shape and len(grads) == len(list(layer.parameters()))


def test_layers_of_the_default_size_are_those_of_the_documents():
    with torch.device("meta"):
        gdn, kda = (getattr(graphlin.layers, kind.name)(**kind.arguments(DEVICE.sizes)) for kind in LAYERS)
    assert (gdn.hidden_size, gdn.num_heads, gdn.num_v_heads, gdn.head_k_dim, gdn.head_v_dim) == (2048, 16, 32, 128, 128)
    assert (kda.num_heads, kda.num_v_heads, kda.head_k_dim, kda.lower_bound) == (32, 32, 128, -5.0)


class Plain(torch.nn.Linear):
    """Stands for a layer; its peer is as good, or doubles the output."""

    def forward(self, hidden_states, cu_seqlens):
        return super().forward(hidden_states)


@dataclass(frozen=True)
class PlainKind(LayerKind):
    factor: int | None = None

    def build(self, sizes, device):
        return Plain(sizes.hidden, sizes.hidden).to(device, sizes.dtype)

    def build_peer(self, layer, sizes, device):
        if self.factor is None:
            raise ModuleNotFoundError("No module named 'fla'")
        peer = self.build(sizes, device)
        peer.load_state_dict({name: self.factor * value for name, value in layer.state_dict().items()})
        return peer


@pytest.mark.parametrize(("factor", "error"), [(1, None), (2, "output differs by 1.0e+00"), (None, "No module named 'fla'")])
def test_layers_are_measured_eager_captured_and_replayed(device, factor, error):
    setting = Setting(device, TINY, peers=(PEERS["fla"],))
    rows = list(layers.measure(setting, PlainKind("Plain", dict, factor), 20, 2))
    measures = {"eager", "captured", "graph replay"} | ({"sum of kernels"} if setting.clock.on_device else set())
    assert {cell for cell in cells(rows) if cell[1] == OURS} == {(d, OURS, m) for d in (FORWARD, BOTH) for m in measures}
    peer = [row for row in rows if row.who == "fla"]
    assert [row.key.direction for row in peer] == [FORWARD, BOTH] and {row.measure for row in peer} == {"eager"}
    assert all((row.error is None and row.sample.median > 0) if error is None else error in row.error for row in peer)


def test_layers_without_the_peer_leave_it_out(setting):
    assert {row.who for row in layers.measure(setting, PlainKind("Plain", dict), 20, 2)} == {OURS}


@pytest.mark.slow
def test_the_model_is_measured_eager_and_captured(device):
    setting = Setting(device, replace(TINY, model=CPU))
    rows = list(model.measure(setting, "gdn"))
    assert cells(rows) == {(d, OURS, m) for d in (FORWARD, BOTH) for m in ("eager", "captured")}
    assert {row.key.case for row in rows} == {"GatedDeltaNet, training step", "GatedDeltaNet, prefill"}


def test_a_training_step_learns(device):
    batch = model.random_batch((20, 2), device)
    small = model.small_model("gdn", CPU, device)
    before = small.loss(*batch).item()
    step = model.training_step(small, 1e-2, *batch)
    for _ in range(2):
        step()
    assert small.loss(*batch).item() < before


def test_a_fresh_process_is_timed_twice_over_one_cache(setting, monkeypatch):
    caches = []

    def seconds(kind, setting, cache):
        from pathlib import Path
        caches.append((cache, list(Path(cache).iterdir())))
        Path(cache, "kernel").touch()
        return 3.0 if len(caches) == 1 else 0.5

    monkeypatch.setattr(cold, "_seconds_of_process", seconds)
    rows = list(cold.measure(setting, LAYERS[0]))
    assert [(row.measure, row.sample.median) for row in rows] == [("empty cache", 3e6), ("warm cache", 5e5)]
    assert caches[0][0] == caches[1][0] and caches[0][1] == [] and len(caches[1][1]) == 1


def test_a_fresh_process_captures_and_replays(setting, tmp_path):
    assert 0 < cold._seconds_of_process(LAYERS[0], setting, str(tmp_path)) < 600


def test_a_fresh_process_that_fails_says_why(setting, tmp_path):
    with pytest.raises(RuntimeError, match="the fresh process failed.*StopIteration"):
        cold._seconds_of_process(replace(LAYERS[0], name="Nothing"), setting, str(tmp_path))


def test_a_fresh_process_has_the_settings_sizes(device, monkeypatch, capsys):
    seen = []
    monkeypatch.setattr(cold, "first_replay", lambda *given: seen.append(given) or 1.5)
    cold.main("GatedDeltaNet", str(device), "[20, 2]", '{"H": 3, "hidden": 48}')
    (kind, where, shape, sizes), = seen
    assert kind is LAYERS[0] and where == device and shape == (20, 2)
    assert (sizes.H, sizes.hidden) == (3, 48)
    assert capsys.readouterr().out == '{"seconds": 1.5}\n'


def test_ragged_batches_fill_from_an_eighth_of_the_tier_to_all():
    shapes = ladder.ragged_shapes(4096, 32)
    assert len(shapes) == 16 and shapes[0] == (512, 4) and shapes[-1] == (4096, 32)
    assert shapes == sorted(shapes)
    assert ladder.ragged_shapes(4096, 32, batches=4) == [(512, 4), (1024, 8), (2048, 16), (4096, 32)]
    assert ladder.ragged_shapes(8, 1, batches=2) == [(1, 1), (8, 1)]
