"""`python -m graphlin verify`."""

import argparse
import json
import random
import sys
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from graphlin.capture import capture
from graphlin.commands import layer
from graphlin.demo.train import best_device
from graphlin.errors import GraphlinError
from graphlin.graphed import GraphedBlock
from graphlin.price import MIB, Price
from graphlin.tier import Tier
from graphlin.verify import Report, verify

HELP = "Capture a layer and compare its replays with eager, over several packings."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of the command."""
    layer.add_arguments(parser)
    parser.add_argument("--device", help="device to run on (default: the accelerator, or the CPU where there is none; "
                                         "on the CPU sizes that are not given are tiny)")


def run(arguments: argparse.Namespace) -> int:
    """Prints what was found; returns 0 if all is right, 1 if a result is wrong, 2 if an argument or no device can be used."""
    try:
        device = layer.find_device(arguments.device) if arguments.device else best_device()
        sizes = layer.TINY if device.type == "cpu" else layer.MODEL
        block, tiers = layer.make_layer(arguments, device, sizes), layer.make_tiers(arguments, sizes)
        with torch.set_grad_enabled(not arguments.inference):
            found = check(block, tiers, arguments.slots)
    except (ValueError, GraphlinError) as error:
        print(f"graphlin verify: {error}", file=sys.stderr)
        return 2
    if arguments.json:
        print(json.dumps({"device": str(device)} | found.as_json()))
    else:
        found.show(Console())
    return 0 if found.ok else 1


@dataclass
class Findings:
    """Reports by packing, and the memory that was said to be held and that is."""

    tiers: list[Tier]
    reports: dict[str, Report]
    price: Price
    held: int

    @property
    def ok(self) -> bool:
        return all(report.ok for report in self.reports.values())

    def as_json(self) -> dict[str, Any]:
        """Everything, as JSON has it."""
        return {"ok": self.ok, "tiers": [asdict(tier) for tier in self.tiers],
                "packings": {name: report.as_json() for name, report in self.reports.items()}, "price": self.price.as_json(),
                "held": self.held}

    def show(self, console: Console) -> None:
        """Prints tables, what is wrong, and a verdict."""
        table = Table(title="Replays into NaN-filled memory, against eager", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for column in ("packing", "tokens", "seqs", "replayed at", "tier's\nshapes", "exact shapes,\nrelative"):
            table.add_column(column, justify="left" if column == "packing" else "right")
        for name, report in self.reports.items():
            table.add_row(name, str(report.tokens), str(report.seqs), ", ".join(f"{t.tokens} x {t.seqs}" for t in report.tiers),
                          "bitwise" if report.ok else "WRONG", f"{max(report.errors.values(), default=0.0):.1e}")
        console.print(table)
        first = next(iter(self.reports.values()))
        for (path, direction), count in first.launches.items():
            console.print(f"host launches, {path} {direction}: {count}")
        console.print(f"{first.addresses} addresses unchanged, slots {', '.join(map(str, first.slots))}")
        console.print(f"priced {self.price.total / MIB:.1f} MiB, held {self.held / MIB:.1f} MiB")
        for name, report in self.reports.items():
            for line in report.mismatches:
                console.print(f"MISMATCH in {name}: {line}", markup=False)
        console.print("ok" if self.ok else "WRONG: see the mismatches above")


def check(block: torch.nn.Module, tiers: list[Tier], slots: int) -> Findings:
    """Captures a layer and verifies one call of each packing."""
    graphed = capture(block, tiers, slots=slots)
    reports = {name: _verify(graphed, lengths) for name, lengths in packings(tiers).items()}
    return Findings(list(graphed.tiers), reports, graphed.price, graphed.held_bytes())


def packings(tiers: list[Tier]) -> dict[str, list[int]]:
    """Lengths of the sequences of a batch, by name: what fills the tiers, and what ragged batches bring."""
    draw, found = random.Random(0), {}
    for tier in tiers:
        found[f"even, {tier.tokens} x {tier.seqs} full"] = _split(tier.tokens, tier.seqs)
    largest = tiers[0]
    cuts = sorted(draw.randrange(largest.tokens) for _ in range(largest.seqs - 1))
    ragged = [b - a for a, b in zip([0, *cuts], [*cuts, largest.tokens - largest.tokens // 8], strict=True) if b >= a]
    return found | {
        "ragged": ragged, "one sequence": [largest.tokens], "one token each": [1] * min(largest.seqs, largest.tokens),
        "empty ones around": [0, largest.tokens // 3, 0][:largest.seqs], "no token": [0]}


def _split(tokens: int, seqs: int) -> list[int]:
    return [tokens // seqs + (i < tokens % seqs) for i in range(seqs)]


def _verify(graphed: GraphedBlock, lengths: list[int]) -> Report:
    parameter = next(graphed.block.parameters())
    x = torch.randn(1, sum(lengths), graphed.block.hidden_size, device=parameter.device).to(parameter.dtype)
    cu = torch.tensor([0, *lengths], device=parameter.device, dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return verify(graphed, x.requires_grad_(torch.is_grad_enabled()), cu)
