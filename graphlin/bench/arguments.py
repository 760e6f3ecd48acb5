"""What the command lines of bench and tune share."""

import argparse
import sys
from collections.abc import Collection
from dataclasses import fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from graphlin.bench.problems import Sizes
from graphlin.bench.setting import Setting, Shape, scale_of
from graphlin.commands.layer import tokens_and_seqs

FILE_WIDTH = 160  # of tables that go to no terminal


class UsageError(ValueError):
    """What was asked for can't be done; the message is one line for the user."""


def names(text: str) -> list[str]:
    """Words between commas."""
    return [name for name in text.split(",") if name]


def shape(text: str) -> Shape:
    """Tokens and sequences of `4096,32` or `4096x32`, of at least a token each."""
    tokens, seqs = tokens_and_seqs(text)
    if seqs > tokens:
        raise argparse.ArgumentTypeError(f"expected no more sequences than tokens, such as 4096,32, found {text!r}")
    return tokens, seqs


def sizes(text: str) -> dict[str, int]:
    """Head counts and widths of `H=16,HV=32`."""
    pairs = [pair.partition("=") for pair in names(text)]
    known = [field.name for field in fields(Sizes) if field.type is int]
    if not all(name in known and value.isdecimal() and int(value) for name, _, value in pairs):
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE,... with names of {', '.join(known)}, found {text!r}")
    return {name: int(value) for name, _, value in pairs}


def add_problem_arguments(parser: argparse.ArgumentParser) -> None:
    """--shapes and --sizes."""
    parser.add_argument("--shapes", type=shape, nargs="+", default=[], metavar="T,N",
                        help="tokens and sequences, such as 4096,32 (default: the shapes of each section)")
    parser.add_argument("--sizes", type=sizes, default={}, metavar="NAME=VALUE,...",
                        help="other heads (H, HV), head size K, channels D and width W of the convolution, or width of layers "
                             "(hidden)")


def setting_of(arguments: argparse.Namespace, device: torch.device, **choices: Any) -> Setting:
    """What the arguments ask of a device."""
    scale = scale_of(device)
    scale = replace(scale, sizes=replace(scale.sizes, **arguments.sizes))
    return Setting(device, scale, shapes=tuple(arguments.shapes), **choices)


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
