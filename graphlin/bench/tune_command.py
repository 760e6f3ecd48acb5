"""The command line of the search for launch records."""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from graphlin.bench.arguments import (
    UsageError,
    add_problem_arguments,
    check_known,
    check_output,
    console,
    names,
    progress,
    setting_of,
)
from graphlin.bench.candidates import candidates
from graphlin.bench.clock import Clock
from graphlin.bench.environment import environment
from graphlin.bench.kernel_times import describe_record
from graphlin.bench.problems import PROBLEMS
from graphlin.bench.report import headline, show_sample
from graphlin.bench.results import BOTH, Key, Row, Run
from graphlin.bench.setting import Setting
from graphlin.bench.tune import Found, Tuning, best_overall, compilations
from graphlin.bench.warm_up import in_parallel
from graphlin.demo.train import best_device
from graphlin.errors import BackendUnavailable

HELP = "Look for launch records of this device: time candidates for every kernel of the ops, and print the best."
SEARCH_ROUNDS = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of the command."""
    parser.add_argument("--only", type=names, default=list(PROBLEMS), metavar="OP,...",
                        help=f"ops whose kernels are tuned: {', '.join(PROBLEMS)} (default: all)")
    parser.add_argument("--kernels", type=names, default=[], metavar="KERNEL,...",
                        help="kernels to tune (default: all of the ops)")
    add_problem_arguments(parser)
    parser.add_argument("--try", type=_values, action="append", default=[], dest="tried", metavar="NAME=VALUE,...",
                        help="values of a tile, of num_warps, num_stages or waves to combine; may be repeated, and all else "
                             "then stays as it is (default: the table of graphlin/bench/candidates.py)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the best records and their times to a JSON file")


def run(arguments: argparse.Namespace) -> int:
    """Tunes; returns 0, or 2 if an argument or no device can be used."""
    try:
        setting = _setting(arguments)
    except (UsageError, BackendUnavailable) as error:
        print(f"graphlin tune: {error}", file=sys.stderr)
        return 2
    run, found = _tune(arguments, setting)
    if arguments.json is not None:
        run.rows = [row for each in found for row in _rows(each)]
        run.save(arguments.json)
    _show(run, found, console())
    unknown = set(arguments.kernels) - {each.kernel for each in found}
    if unknown:
        print(f"graphlin tune: --kernels: {', '.join(arguments.only)} launch no {', '.join(sorted(unknown))}", file=sys.stderr)
    return 2 if unknown else 0


def _setting(arguments: argparse.Namespace) -> Setting:
    check_known("--only", arguments.only, PROBLEMS)
    check_output("--json", arguments.json)
    return setting_of(arguments, best_device())


def _tune(arguments: argparse.Namespace, setting: Setting) -> tuple[Run, list[Found]]:
    search, shapes = dict(arguments.tried), setting.shapes_of("stages")
    run, found = Run(environment(setting, None)), []
    fast = Clock(setting.device, SEARCH_ROUNDS)
    with progress() as bars:
        calls = [call for op in arguments.only if setting.clock.on_device for call in compilations(
            op, arguments.kernels, search, shapes, setting.scale.sizes, setting.device, os.cpu_count() or 1)]
        if calls:
            for _ in bars.track(in_parallel(calls), total=len(calls), description="compiling in parallel"):
                pass
        for op in arguments.only:
            for tokens, seqs in shapes:
                tuning = Tuning(setting.problem(op, tokens, seqs), (tokens, seqs), setting.device, fast, setting.clock)
                for kernel in (k for k in tuning.kernels if not arguments.kernels or k in arguments.kernels):
                    records = candidates(kernel, tuning.record(kernel), search)
                    task = bars.add_task(f"{kernel}, {op} T={tokens} N={seqs}", total=len(records))
                    found.append(tuning.search(kernel, records, lambda task=task: bars.advance(task)))
    return run, found


def _rows(found: Found) -> list[Row]:
    key = Key("tune", found.op, *found.shape, BOTH)
    return [Row(key, found.kernel, describe_record(record), sample, note="present" if i == 0 else "")
            for i, (record, sample) in enumerate([found.present, *found.finalists])]


def _show(run: Run, found: list[Found], out: Console) -> None:
    for line in headline(run):
        out.print(line, highlight=False, markup=False)
    for op, kernel in dict.fromkeys((each.op, each.kernel) for each in found):
        chosen = [each for each in found if (each.op, each.kernel) == (op, kernel)]
        table = Table("T, N", "microseconds", "of present", "record")
        for each in chosen:
            base = each.present[1].median
            for record, sample in [each.present, *each.finalists]:
                ratio = "present" if record is each.present[0] else f"{sample.median / base:.2f}"
                table.add_row(f"{each.shape[0]}, {each.shape[1]}", show_sample(sample), ratio,
                              describe_record(record))
            table.add_section()
        record, gain = best_overall(chosen)
        failed = sum(t.error is not None for each in chosen for t in each.all)
        out.print(f"\n[bold]{kernel}[/] in {op}: {len(chosen[0].all)} candidates, {failed} uses failed", table,
                      f"over these shapes best, at {gain:.2f} of the present: {escape(repr(record))}", sep="\n",
                      highlight=False)


def _values(text: str) -> tuple[str, tuple[Any, ...]]:
    name, _, values = text.partition("=")
    found = tuple(_value(value) for value in values.split(",") if value)
    if not name or not found:
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE,..., such as num_warps=4,8, found {text!r}")
    return name, found


def _value(text: str) -> Any:
    """An int, a truth value or a word."""
    return int(text) if text.isdecimal() else {"True": True, "False": False}.get(text, text)
