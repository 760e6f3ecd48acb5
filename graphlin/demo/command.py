"""The demo's command line."""

import argparse
import json
import sys
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console

from graphlin.demo.data import TextError
from graphlin.demo.experiment import compare
from graphlin.demo.model import MIXERS
from graphlin.demo.report import show
from graphlin.errors import BackendUnavailable

HELP = "Train a small byte-level model on a text, eager and captured, and compare the two runs."
MIN_STEPS = 10


class PlotError(ValueError):
    """The picture can't be drawn; the message is one line for the user."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of the command."""
    parser.add_argument("text", nargs="?", type=Path, metavar="TEXT_FILE",
                        help="UTF-8 text whose paragraphs blank lines separate (default: a text that comes with graphlin)")
    parser.add_argument("--model", choices=MIXERS, default="gdn",
                        help="what mixes tokens: Gated DeltaNet or Kimi Delta Attention (default: gdn)")
    parser.add_argument("--steps", type=_steps, default=MIN_STEPS,
                        help=f"training steps of each run, at least {MIN_STEPS} (default: {MIN_STEPS})")
    parser.add_argument("--small", action="store_true", help="the sizes of a CPU, on any device")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw loss curves and step times (needs matplotlib)")


def run(arguments: argparse.Namespace) -> int:
    """Runs the demo; returns 0 if everything is right, 1 if a result is wrong, 2 if an argument or no device can be used."""
    try:
        if arguments.plot is not None:
            _check_plot(arguments.plot)
        result = compare(arguments.model, arguments.text, arguments.steps, arguments.small, Console(stderr=True))
    except (TextError, PlotError, BackendUnavailable) as error:
        print(f"graphlin demo: {error}", file=sys.stderr)
        return 2
    if arguments.json:
        print(json.dumps(result.as_json()))
    else:
        show(result, Console())
    if arguments.plot is not None:
        from graphlin.demo.plot import draw
        draw(result, arguments.plot)
    return 1 if result.problems else 0


def _check_plot(path: Path) -> None:
    """Finds what would stop the picture before the training, not after."""
    if find_spec("matplotlib") is None:
        raise PlotError("--plot needs matplotlib, which is not installed; run pip install matplotlib, or leave --plot out")
    if path.suffix != ".png":
        raise PlotError(f"--plot writes PNG files; expected a name that ends in .png, found {path}")
    if not path.parent.is_dir() or path.is_dir():
        raise PlotError(f"--plot cannot write {path}: expected a file in a directory that exists")


def _steps(text: str) -> int:
    if not text.isdecimal() or int(text) < MIN_STEPS:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least {MIN_STEPS}, found {text!r}")
    return int(text)

