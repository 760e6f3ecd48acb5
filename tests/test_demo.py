import json
import os
import subprocess
import sys
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console

from graphlin import Tier, backends
from graphlin.__main__ import main
from graphlin.backends.host import HostBackend
from graphlin.demo import command
from graphlin.demo.data import TextError, make_batches, read_paragraphs
from graphlin.demo.model import MIXERS, ByteModel
from graphlin.demo.report import Comparison, Launches, Packing, Result, Series, show
from graphlin.demo.train import PaddedBlocks, best_device

TIER = Tier(tokens=128, seqs=4)
ROOT = Path(__file__).parents[1]

RIGHT = Result(
    device="a device", dtype="float32", clock="a clock", text="a text", parameters=1, mixer="AMixer", layers=1, tier=TIER,
    tier_bytes=1,
    packings=[Packing([2], False), Packing([1], False), Packing([9, 200], True), Packing([3], False)],
    losses=Series([5.0, 4.5, 4.2, 3.9], [5.0, 4.5, 4.2, 3.9]), seconds=Series([9.0, 1.0, 70.0, 3.0], [8.0, 2.0, 60.0, 4.0]),
    comparison=Comparison(True, 0.0, 0.0, []), launches=Launches(100.0, 2.0), replays=3, backward_replays=3, eager_calls={})


@pytest.fixture
def text_file(tmp_path):
    """A text of its own kind: lines of Windows, letters beyond ASCII, a word longer than any piece."""
    path = tmp_path / "weather.txt"
    days = [f"Day {i}: wind {'SWNE'[i % 4]} {i * 7 % 11}, über {i * i % 29}°, {'rain ' * (i % 9)}and then calm."
            for i in range(60)]
    path.write_bytes("\r\n\r\n".join([*days, "x" * 150]).encode())
    return path


@pytest.mark.parametrize(("model", "mixer"), [
    ("gdn", "GatedDeltaNet"), pytest.param("kda", "KimiDeltaAttention", marks=pytest.mark.slow)])
def test_command_trains_the_same_way_eager_and_captured(text_file, tmp_path, model, mixer):
    picture = tmp_path / "curves.png"
    found, progress = run_command(str(text_file), "--model", model, "--plot", str(picture))
    assert found["mixer"] == mixer
    assert ("CPU" in found["clock"]) == (not torch.accelerator.is_available())
    assert "captured" in progress
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.device_only
@pytest.mark.parametrize("model", MIXERS)
def test_the_small_demo_is_right_on_a_device(device, text_file, model):
    found, _ = run_command(str(text_file), "--model", model, "--small")
    assert found["tier"]["tokens"] == 96 and "CPU" not in found["device"]


def run_command(*arguments):
    """What a demo that went well tells as JSON, and its progress."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command_line = [sys.executable, "-m", "graphlin", "demo", *arguments, "--json"]
    done = subprocess.run(command_line, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["ok"] and found["problems"] == []
    assert found["comparison"]["bitwise"] and found["losses"]["eager"] == found["losses"]["captured"]
    assert len(found["losses"]["eager"]) == len(found["seconds"]["captured"]) == 10
    assert found["loss_fall"] >= 0.2
    assert sum(p["over_tier"] for p in found["packings"]) == 1
    assert len({tuple(p["lengths"]) for p in found["packings"]}) >= 5
    assert found["replays"] == found["backward_replays"] == 9 and found["eager_calls"] == {"TierOverflow": 1}
    assert found["launches"]["replayed"] < found["launches"]["eager"]
    assert found["tier_bytes"] > 0
    return found, done.stderr


def test_shipped_text_gives_ragged_batches_and_one_over_the_tier():
    batches = make_batches(read_paragraphs(None), TIER, steps=12)
    assert len({tuple(b.cu_seqlens.tolist()) for b in batches}) >= 5
    assert [TIER.fits(b.tokens, b.seqs) for b in batches] == [i != 6 for i in range(12)]
    for batch in batches:
        ends = batch.cu_seqlens[1:].long() - 1
        assert batch.cu_seqlens[0] == 0 and ends[-1] + 1 == batch.tokens
        expected = batch.inputs[0].roll(-1).index_fill(0, ends, ord("\n"))
        assert torch.equal(batch.targets, expected)


def test_no_byte_of_a_paragraph_is_lost(text_file):
    paragraphs = read_paragraphs(text_file)
    assert len(paragraphs) == 61
    batches = make_batches(paragraphs, TIER, steps=60)
    pieces = [bytes(b.inputs[0, start:end].tolist()) for b in batches
              for start, end in zip(b.cu_seqlens[:-1], b.cu_seqlens[1:], strict=True)]
    assert max(map(len, pieces)) <= TIER.tokens // 2
    text = b"".join(b"".join(paragraphs).split())
    assert b"".join(b"".join(pieces).split())[:len(text)] == text


class Doubling(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, hidden, cu_seqlens):
        self.seen.append((hidden.shape[1], cu_seqlens.tolist()))
        return 2 * hidden


def test_eager_runs_at_the_shapes_of_the_graph():
    block = Doubling()
    padded = PaddedBlocks(block, TIER)
    hidden = torch.randn(1, 130, 3)
    for tokens, cu in ((7, [0, 2, 7]), (130, [0, 130])):
        assert torch.equal(padded(hidden[:, :tokens], torch.tensor(cu)), 2 * hidden[:, :tokens])
    assert block.seen == [(128, [0, 2, 7, 7, 7]), (130, [0, 130])]


@pytest.mark.parametrize(("content", "message"), [
    (None, "cannot read"), (b"", "is empty"), (b" \n\n\t\n", "is empty"), (b"a\0b" * 500, "is not UTF-8 text"),
    ("été".encode("latin-1"), "is not UTF-8 text"), (b"Hello there.\n", "too short: its 12 bytes"),
])
def test_a_text_that_cannot_be_used_is_one_line_and_status_2(tmp_path, capsys, content, message):
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content)
    assert main(["demo", str(path)]) == 2
    out, err = capsys.readouterr()
    assert message in err and err.count("\n") == 1 and not out
    with pytest.raises(TextError):
        make_batches(read_paragraphs(path), TIER, steps=10)


def test_a_directory_is_no_text(tmp_path, capsys):
    assert main(["demo", str(tmp_path)]) == 2
    assert "cannot read" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--steps", "9"], ["--steps", "many"], ["--model", "mamba"], ["--unknown"]])
def test_wrong_usage_is_status_2(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["demo", *arguments])
    assert stop.value.code == 2
    assert arguments[0] in capsys.readouterr().err


@pytest.mark.parametrize(("path", "message"), [("a.jpeg", "ends in .png"), ("nowhere/a.png", "a directory that exists")])
def test_a_picture_that_cannot_be_written_is_refused_before_training(tmp_path, capsys, path, message):
    assert main(["demo", "--plot", str(tmp_path / path)]) == 2
    assert message in capsys.readouterr().err


def test_a_picture_without_matplotlib_is_refused_before_training(monkeypatch, capsys):
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    assert main(["demo", "--plot", "a.png"]) == 2
    assert "needs matplotlib" in capsys.readouterr().err


@pytest.mark.parametrize(("arguments", "mixer"), [([], "gdn"), (["--model", "kda"], "kda")])
def test_the_model_is_gated_delta_net_unless_another_is_named(monkeypatch, capsys, arguments, mixer):
    asked = []
    monkeypatch.setattr(command, "compare", lambda *given: asked.append(given[0]) or RIGHT)
    assert main(["demo", *arguments]) == 0
    assert asked == [mixer]
    assert "AMixer layers: 1" in capsys.readouterr().out


@pytest.mark.parametrize("mixers", [("gdn", "gdn"), ("kda",), ("gdn", "kda")])
def test_blocks_hold_the_mixers_that_are_named(mixers):
    blocks = ByteModel(mixers, 16, 1, 16, 16).blocks.blocks
    assert [type(block.mixer) for block in blocks] == [MIXERS[mixer] for mixer in mixers]


@pytest.mark.parametrize("accelerator", ["xpu", None])
def test_an_accelerator_without_backend_leaves_the_cpu(monkeypatch, accelerator):
    found = None if accelerator is None else torch.device(accelerator)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: found)
    monkeypatch.setattr(backends, "_available", {})
    monkeypatch.setattr(HostBackend, "is_available", lambda self: True)
    assert best_device() == torch.device("cpu")


def test_no_device_at_all_is_one_line_and_status_2(monkeypatch, capsys):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: None)
    monkeypatch.setattr(backends, "_available", {})
    monkeypatch.setattr(HostBackend, "is_available", lambda self: False)
    assert main(["demo"]) == 2
    out, err = capsys.readouterr()
    assert "'cpu' backend cannot run in this process" in err and err.count("\n") == 1 and not out


WRONG = {
    "differ from the eager run's by up to 0.25": {"comparison": Comparison(False, 0.25, 0.0, [])},
    "output 0: differs": {"comparison": Comparison(True, 0.0, 0.0, ["output 0: differs"])},
    "2 forward and 3 backward replays, expected 3 each": {"replays": 2},
    "the loss fell by 10%": {"losses": Series([5.0, 4.9, 4.8, 4.5], [5.0, 4.9, 4.8, 4.0])},
    "the loss fell by nan%": {"losses": Series([5.0, 4.0, 4.0, float("nan")], [5.0, 4.0, 4.0, float("nan")])},
}


@pytest.mark.parametrize(("message", "change"), WRONG.items(), ids=WRONG.keys())
def test_a_wrong_result_is_named_and_status_1(monkeypatch, capsys, message, change):
    result = replace(RIGHT, **change)
    monkeypatch.setattr(command, "compare", lambda *_: result)
    assert main(["demo", "--json"]) == 1
    problems = json.loads(capsys.readouterr().out)["problems"]
    assert len(problems) == 1 and message in problems[0]


def test_tables_hold_every_number():
    console = Console(record=True, width=120, file=StringIO())
    show(RIGHT, console)
    shown = console.export_text()
    for number in ("4.200000", "70000.0", "over tier", "22% less", "equal bit for bit", "100.0 a layer eager, 2.0 replayed",
                   "2000.0 ms eager, 3000.0 ms captured", "4 different ones in 4 steps"):
        assert number in shown, number
