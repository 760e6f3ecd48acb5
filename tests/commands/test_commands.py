"""The commands about one layer, and those of the package as a whole."""

import json
from io import StringIO

import pytest
import torch
from rich.console import Console

import graphlin
from graphlin import Tier
from graphlin.__main__ import COMMANDS, main
from graphlin.commands import verify as verify_command
from graphlin.layers import GatedDeltaNet
from graphlin.price import Price
from graphlin.verify import Report

pytestmark = pytest.mark.raw_memory
TINY = ["--hidden", "32", "--heads", "1", "--head-dim", "16"]


def test_without_a_command_the_commands_are_told(capsys):
    assert main([]) == 0
    text = capsys.readouterr().out
    assert text.startswith("usage: python -m graphlin") and all(name in text for name in COMMANDS)


def test_version(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0 and capsys.readouterr().out == f"graphlin {graphlin.__version__}\n"


def test_price_tells_what_the_layer_holds(capsys):
    arguments = ["price", "--device", "meta", "--heads", "4", "--value-heads", "8", "--tier", "512,8", "--tier", "1024x16",
                 "--slots", "2"]
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    with torch.device("meta"):
        layer = GatedDeltaNet(2048, expand_v=1, head_dim=128, num_heads=4, num_v_heads=8).to(torch.bfloat16)
    price = graphlin.price(layer, [Tier(1024, 16), Tier(512, 8)])
    assert found["per_slot"] == price.per_slot and found["total"] == 2 * price.per_slot and found["slots"] == 2
    assert [t["tier"]["tokens"] for t in found["tiers"]] == [1024, 512] and found["tiers"][1]["total"] < price.per_slot // 20
    assert sum(t["total"] for t in found["tiers"]) == found["per_slot"] and found["device"] == "meta"
    assert main(arguments) == 0
    table = capsys.readouterr().out
    assert "1024 x 16" in table and "512 x 8" in table and f"{price.per_slot / 2 ** 20:.1f}" in table and "2 slots" in table
    assert main([*arguments, "--inference", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["total"] < found["total"]


@pytest.mark.parametrize("layer", ["gdn", pytest.param("kda", marks=pytest.mark.slow)])
def test_verify_finds_a_sound_layer_sound(device, layer, capsys):
    arguments = ["verify", "--layer", layer, *TINY, "--dtype", "fp32", "--tier", "24,3", "--device", device.type, "--inference"]
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] and len(found["packings"]) == 6
    for name, report in found["packings"].items():
        assert report["ok"] and report["launches"]["graph forward"] == 1, name
        assert report["tokens"] == 0 or max(report["errors"].values()) < 1e-4, name
    assert found["packings"]["even, 24 x 3 full"]["seqs"] == 3 and found["packings"]["no token"]["tokens"] == 0
    assert found["held"] > 0 and (device.type != "cpu" or found["held"] == found["price"]["total"])


def test_verify_tells_what_is_wrong(device, capsys, monkeypatch):
    def capture(block, tiers, slots):
        """A capture whose block gives twice as much when it is run eagerly."""
        graphed = graphlin.capture(block, tiers, slots=slots)
        graphed(torch.ones(1, 4, 32, device=device), cu_seqlens=torch.tensor([0, 4], dtype=torch.int32, device=device))
        forward = block.forward
        block.forward = lambda hidden, cu_seqlens, chunk_indices, *_: 2 * forward(hidden, cu_seqlens, chunk_indices)
        return graphed
    monkeypatch.setattr(verify_command, "capture", capture)
    monkeypatch.setattr(verify_command, "packings", lambda tiers: {"one": [5]})
    assert main(["verify", *TINY, "--dtype", "fp32", "--tier", "24,3", "--device", device.type, "--inference"]) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert "WRONG" in text and "MISMATCH in one: output 0: differs from eager at the tier's shapes (24 x 3, slot 0)" in text


def test_packings_fit_the_largest_tier_and_fill_every_one():
    tiers = [Tier(100, 7), Tier(40, 3)]
    found = verify_command.packings(tiers)
    assert all(tiers[0].fits(sum(lengths), len(lengths)) and min(lengths) >= 0 for lengths in found.values())
    assert [(sum(found[name]), len(found[name])) for name in ("even, 100 x 7 full", "even, 40 x 3 full")] == [(100, 7), (40, 3)]
    assert len(set(found["ragged"])) > 3 and 0 in found["empty ones around"]
    assert all(sum(lengths) <= 2 and len(lengths) == 1 for lengths in verify_command.packings([Tier(2, 1)]).values())


@pytest.mark.parametrize("command", ["price", "verify"])
@pytest.mark.parametrize(("arguments", "message"), [
    (["--heads", "3", "--value-heads", "4"], "num_v_heads: expected a multiple of num_heads=3, found 4"),
    (["--device", "nowhere"], "--device: 'nowhere' can't be used here"),
    (["--tier", "512"], "expected tokens and sequences, such as 4096,32, found '512'"),
    (["--tier", "0,4"], "expected tokens and sequences"),
    (["--slots", "0"], "expected a whole number of at least 1, found '0'"),
    (["--layer", "mamba"], "invalid choice: 'mamba'"),
])
def test_wrong_arguments_end_with_status_2(command, arguments, message, capsys):
    try:
        status = main([command, *TINY, *arguments])
    except SystemExit as end:
        status = end.code
    assert status == 2 and message in capsys.readouterr().err


def test_findings_are_shown_within_a_terminal():
    report = Report(5, 2, (Tier(24, 3), Tier(16, 2)), (0, 1), errors={"output 0": 1e-6}, launches={("graph", "forward"): 1},
                    addresses=13)
    out = StringIO()
    verify_command.Findings([Tier(24, 3)], {"ragged": report}, Price(()), 3 << 20).show(Console(file=out, width=80))
    text = out.getvalue()
    assert "24 x 3, 16 x 2" in text and "1.0e-06" in text and "held 3.0 MiB" in text and text.rstrip().endswith("ok")
