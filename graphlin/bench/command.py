"""The bench's command line."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from graphlin.bench import kernel_times, ops
from graphlin.bench.environment import environment
from graphlin.bench.peers import PEERS, describe
from graphlin.bench.problems import PROBLEMS
from graphlin.bench.report import show
from graphlin.bench.results import Key, Row, Run
from graphlin.bench.setting import DEVICE, HOST, Job, Setting, Shape, peers_named
from graphlin.bench.warm_up import compilations, in_parallel
from graphlin.demo.train import best_device
from graphlin.errors import BackendUnavailable

HELP = "Measure ops, layers and peers: eager calls and graph replays, forward and backward."
FILE_WIDTH = 160  # of tables that are no terminal's
SECTIONS = {**ops.SECTIONS, **kernel_times.SECTIONS}


class UsageError(ValueError):
    """What was asked for can't be done; the message is one line for the user."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of the command."""
    parser.add_argument("--only", type=_names, default=list(SECTIONS), metavar="SECTION,...",
                        help=f"sections to measure: {', '.join(SECTIONS)} (default: all)")
    parser.add_argument("--peers", type=_names, default=[], metavar="PEER,...",
                        help=f"installed packages to measure in the same run: {', '.join(PEERS)} (default: none)")
    parser.add_argument("--shapes", type=_shape, nargs="+", default=[], metavar="TxN",
                        help="tokens x sequences, such as 4096x32 (default: the shapes of each section)")
    parser.add_argument("--quick", action="store_true", help="fewer shapes and repeats, no eager device times")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every number to a JSON file, as it is measured")
    parser.add_argument("--commit", metavar="HASH", help="the commit that is measured, where git can't tell")


def run(arguments: argparse.Namespace) -> int:
    """Runs the bench; returns 0, 1 if a measurement of graphlin's own failed, 2 if an argument or no device can be used."""
    try:
        setting = _setting(arguments)
    except (UsageError, ValueError, BackendUnavailable) as error:
        print(f"graphlin bench: {error}", file=sys.stderr)
        return 2
    found = Run(environment(setting.device, setting.peers, arguments.commit))
    measure(found, arguments.only, setting, arguments.json)
    show(found, Console(width=None if sys.stdout.isatty() else FILE_WIDTH))
    peers = {peer.name for peer in setting.peers}
    return int(any(row.error is not None and row.who not in peers for row in found.rows))


def measure(found: Run, names: Sequence[str], setting: Setting, json_path: Path | None) -> None:
    """Adds the rows of the named sections to `found`, and saves it after every job."""
    jobs = [(name, job) for name in names for job in SECTIONS[name](setting)]
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True)) as progress:
        calls = compilations(setting, [name for name in names if name in PROBLEMS])
        for _ in progress.track(in_parallel(calls), total=len(calls), description="compiling in parallel"):
            pass
        task = progress.add_task("", total=len(jobs))
        for name, job in jobs:
            progress.update(task, description=job.label)
            _finish(found, name, job)
            if json_path is not None:
                found.save(json_path)
            progress.advance(task)


def _finish(found: Run, section: str, job: Job) -> None:
    """Runs one job; what it can't measure becomes a row with the error, and the next job runs."""
    try:
        for row in job.measure():
            found.rows.append(row)
    except Exception as error:
        found.rows.append(Row(Key(section, job.label, 0, 0), "graphlin", "job", error=describe(error)))


def _setting(arguments: argparse.Namespace) -> Setting:
    unknown = [name for name in arguments.only if name not in SECTIONS]
    if unknown:
        raise UsageError(f"--only: expected some of {', '.join(SECTIONS)}, found {', '.join(unknown)}")
    if arguments.json is not None and not arguments.json.parent.is_dir():
        raise UsageError(f"--json: expected a file in a directory that exists, found {arguments.json}")
    peers = peers_named(arguments.peers)
    device = best_device()
    return Setting(device, HOST if device.type == "cpu" else DEVICE, arguments.quick, tuple(arguments.shapes), peers)


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def _shape(text: str) -> Shape:
    tokens, _, seqs = text.partition("x")
    if not (tokens.isdecimal() and seqs.isdecimal() and 1 <= int(seqs) <= int(tokens)):
        raise argparse.ArgumentTypeError(f"expected tokens x sequences, such as 4096x32, found {text!r}")
    return int(tokens), int(seqs)
