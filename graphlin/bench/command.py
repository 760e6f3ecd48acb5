"""The bench's command line."""

import argparse
import gc
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from graphlin.bench import cold, kernel_times, ladder, layers, model, ops, parallel, underfilled
from graphlin.bench.arguments import (
    UsageError,
    add_problem_arguments,
    check_known,
    check_output,
    check_plot,
    console,
    names,
    progress,
    setting_of,
)
from graphlin.bench.environment import environment
from graphlin.bench.page import write_page
from graphlin.bench.peers import PEERS, describe
from graphlin.bench.plot import draw
from graphlin.bench.report import show
from graphlin.bench.results import OURS, Key, Row, Run, load
from graphlin.bench.setting import Job, Setting
from graphlin.bench.warm_up import compilations, in_parallel
from graphlin.demo.train import best_device
from graphlin.errors import BackendUnavailable

HELP = "Measure ops, layers and peers: eager calls and graph replays, forward and backward."
_MODULES = (ops, underfilled, kernel_times, layers, model, ladder, cold, parallel)
SECTIONS = {name: jobs for module in _MODULES for name, jobs in module.SECTIONS.items()}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of the command."""
    parser.add_argument("--only", type=names, default=list(SECTIONS), metavar="SECTION,...",
                        help=f"sections to measure: {', '.join(SECTIONS)} (default: all)")
    parser.add_argument("--peers", type=names, default=None, metavar="PEER,...",
                        help=f"installed packages to measure in the same run: {', '.join(PEERS)} (default: none)")
    add_problem_arguments(parser)
    parser.add_argument("--quick", action="store_true", help="fewer shapes and repeats, no eager device times")
    parser.add_argument("--cp", type=int, default=0, metavar="RANKS",
                        help="measure context parallelism alone: a process and a device for each of so many ranks, against one")
    parser.add_argument("--commit", metavar="HASH", help="the commit that is measured, where git can't tell")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every number to a JSON file, as it is measured")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the replays of the ops (needs matplotlib)")
    parser.add_argument("--page", type=Path, metavar="FILE.md", help="write all tables to a page in Markdown")
    parser.add_argument("--from", type=Path, nargs="+", dest="results", metavar="FILE",
                        help="show, draw and write what --json files hold, and measure nothing")


def run(arguments: argparse.Namespace) -> int:
    """Runs the bench; returns 0, 1 if a measurement of graphlin's own failed, 2 if an argument or no device can be used."""
    try:
        _check_outputs(arguments)
        setting = None if arguments.results else _setting(arguments)
        runs = [load(path) for path in arguments.results or []]
        if runs and arguments.plot is not None and not any(set(each.sections) & set(ops.SECTIONS) for each in runs):
            raise UsageError(f"--plot draws the ops; found none of {', '.join(ops.SECTIONS)} in the files")
    except (ValueError, BackendUnavailable) as error:
        print(f"graphlin bench: {error}", file=sys.stderr)
        return 2
    if setting is not None:
        runs = [Run(environment(setting, arguments.commit))]
        measure(runs[0], list(parallel.SECTIONS) if arguments.cp else arguments.only, setting, arguments.json)
    for each in runs:
        show(each, console())
    if arguments.plot is not None:
        draw(runs, arguments.plot)
    if arguments.page is not None:
        write_page(runs, arguments.plot, arguments.page)
    return int(any(row.error is not None and row.who == OURS for each in runs for row in each.rows))


def measure(found: Run, sections: Sequence[str], setting: Setting, json_path: Path | None) -> None:
    """Adds the rows of the named sections to `found`, and saves it after every job."""
    jobs = [(name, job) for name in sections for job in SECTIONS[name](setting)]
    calls = compilations(setting, sections)
    with progress() as bars:
        if calls:
            for _ in bars.track(in_parallel(calls), total=len(calls), description="compiling in parallel"):
                pass
        task = bars.add_task("", total=len(jobs))
        for name, job in jobs:
            bars.update(task, description=job.label)
            _finish(found, name, job)
            if json_path is not None:
                found.save(json_path)
            bars.advance(task)
            gc.collect()  # a captured block is in a cycle with its slots, and holds their memory


def _finish(found: Run, section: str, job: Job) -> None:
    """Runs one job; what it can't measure becomes a row with the error, and the next job runs."""
    try:
        for row in job.measure():
            found.rows.append(row)
    except Exception as error:
        found.rows.append(Row(Key(section, job.label, 0, 0), OURS, "whole job", error=describe(error)))


def _check_outputs(arguments: argparse.Namespace) -> None:
    check_known("--only", arguments.only, SECTIONS)
    check_output("--json", arguments.json)
    check_output("--page", arguments.page, ".md")
    check_plot(arguments.plot)
    if arguments.results and arguments.json is not None:
        raise UsageError("--json: expected a run that measures, found --from, which measures nothing")
    if arguments.plot is not None and not arguments.results and not set(arguments.only) & set(ops.SECTIONS):
        raise UsageError(f"--plot draws the ops; expected one of {', '.join(ops.SECTIONS)} among --only")


def _setting(arguments: argparse.Namespace) -> Setting:
    if arguments.peers is not None:
        check_known("--peers", arguments.peers, PEERS)
    peers = tuple(PEERS[name] for name in arguments.peers or [])
    device = best_device()
    found = torch.get_device_module(device).device_count() if device.type != "cpu" else os.cpu_count()
    if arguments.cp and not 1 <= arguments.cp <= found:
        raise UsageError(f"--cp: expected between 1 and the {found} devices there are, found {arguments.cp}")
    return setting_of(arguments, device, quick=arguments.quick, peers=peers, ranks=arguments.cp)
