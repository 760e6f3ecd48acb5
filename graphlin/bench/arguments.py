"""What the command lines of bench and tune share."""

import argparse
import sys
from collections.abc import Collection
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from graphlin.bench.setting import Shape

FILE_WIDTH = 160  # of tables that go to no terminal


class UsageError(ValueError):
    """What was asked for can't be done; the message is one line for the user."""


def names(text: str) -> list[str]:
    """Words between commas."""
    return [name for name in text.split(",") if name]


def shape(text: str) -> Shape:
    """Tokens and sequences of `4096x32`."""
    tokens, _, seqs = text.partition("x")
    if not (tokens.isdecimal() and seqs.isdecimal() and 1 <= int(seqs) <= int(tokens)):
        raise argparse.ArgumentTypeError(f"expected tokens x sequences, such as 4096x32, found {text!r}")
    return int(tokens), int(seqs)


def check_known(option: str, given: Collection[str], known: Collection[str]) -> None:
    """Raises UsageError for a word that is none of those known, or if there is none."""
    wrong = [name for name in given if name not in known]
    if wrong or not given:
        raise UsageError(f"{option}: expected some of {', '.join(known)}, found {', '.join(wrong) or 'nothing'}")


def check_output(option: str, path: Path | None, suffix: str = "") -> None:
    """Raises UsageError where a file can't be written, before anything is measured."""
    if path is None:
        return
    if not path.parent.is_dir() or path.is_dir():
        raise UsageError(f"{option}: expected a file in a directory that exists, found {path}")
    if suffix and path.suffix != suffix:
        raise UsageError(f"{option}: expected a name that ends in {suffix}, found {path}")


def check_plot(path: Path | None) -> None:
    """Raises UsageError where a picture can't be drawn."""
    check_output("--plot", path, ".png")
    if path is not None and find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib, which is not installed; run pip install matplotlib, or leave --plot out")


def progress() -> Progress:
    """A bar on the standard error stream: what is measured, how far, for how long."""
    return Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
                    console=Console(stderr=True))


def console() -> Console:
    """The standard output, wide where it is a file."""
    return Console(width=None if sys.stdout.isatty() else FILE_WIDTH)
