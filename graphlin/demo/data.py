"""A text file as ragged packed batches: paragraphs, byte by byte."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from itertools import cycle
from pathlib import Path

import torch

import graphlin

MIN_PACKINGS = 5


class TextError(ValueError):
    """The text can't be trained on; the message is one line for the user."""


@dataclass(frozen=True)
class Batch:
    """One packed batch: byte values `inputs [1, T]`, the bytes that follow them `targets [T]`, `cu_seqlens [N + 1]`."""

    inputs: torch.Tensor
    targets: torch.Tensor
    cu_seqlens: torch.Tensor

    @property
    def tokens(self) -> int:
        return self.inputs.shape[1]

    @property
    def seqs(self) -> int:
        return self.cu_seqlens.shape[0] - 1

    def to(self, device: torch.device) -> "Batch":
        return Batch(self.inputs.to(device), self.targets.to(device), self.cu_seqlens.to(device))


def read_paragraphs(path: Path | None) -> list[bytes]:
    """The paragraphs of a UTF-8 text file, which blank lines separate; None reads the text that graphlin ships.

    Raises TextError where the file is missing, unreadable, empty or not text.
    """
    source = resources.files("graphlin.demo").joinpath("text.txt") if path is None else path
    try:
        text = source.read_bytes()
    except OSError as error:
        raise TextError(f"cannot read {path}: {error.strerror}") from error
    try:
        printable = b"\0" not in text and text.decode("utf-8") is not None
    except UnicodeDecodeError:
        printable = False
    if not printable:
        raise TextError(f"{path} is not UTF-8 text; give a plain text file")
    paragraphs = [b" ".join(paragraph.split()) for paragraph in re.split(rb"\r?\n[ \t]*\r?\n", text)]
    paragraphs = [paragraph for paragraph in paragraphs if paragraph]
    if not paragraphs:
        raise TextError(f"{path} is empty; give a text of a few thousand bytes")
    return paragraphs


def make_batches(paragraphs: list[bytes], tier: graphlin.Tier, steps: int) -> list[Batch]:
    """`steps` packed batches in reading order, the text repeated as needed; the middle one is larger than the tier.

    Paragraphs longer than half the tier are split between words. Every other batch is as full as whole pieces make it.
    Raises TextError where the text is so short that fewer than 5 packings differ.
    """
    pieces = cycle([piece for paragraph in paragraphs for piece in _split(paragraph, tier.tokens // 2)])
    sizes = [(tier.tokens, tier.seqs)] * steps
    sizes[steps // 2] = (tier.tokens + tier.tokens // 2, 2 * tier.seqs)
    batches = [_batch(group) for group in _groups(pieces, sizes)]
    packings = {tuple(batch.cu_seqlens.tolist()) for batch in batches}
    if len(packings) < MIN_PACKINGS:
        raise TextError(f"the text is too short: its {sum(map(len, paragraphs))} bytes give {len(packings)} different "
                        f"packings, the demo needs {MIN_PACKINGS}")
    return batches


def _split(paragraph: bytes, longest: int) -> list[bytes]:
    """The paragraph in pieces of at most `longest` bytes, cut between words where there are spaces."""
    return [piece.rstrip() for piece in re.findall(rb".{1,%d}(?:\s|$)|.{%d}" % (longest - 1, longest), paragraph)]


def _groups(pieces: Iterator[bytes], sizes: list[tuple[int, int]]) -> Iterator[list[bytes]]:
    """Takes pieces while they fit into each `(tokens, seqs)`; the piece that did not fit opens the next group."""
    piece = next(pieces)
    for tokens, seqs in sizes:
        group: list[bytes] = []
        while len(group) < seqs and sum(map(len, group)) + len(piece) <= tokens:
            group.append(piece)
            piece = next(pieces)
        yield group


def _batch(pieces: list[bytes]) -> Batch:
    """Each piece predicts its own next byte, and a newline at its end."""
    inputs = torch.tensor(list(b"".join(pieces)))
    targets = torch.tensor(list(b"".join(piece[1:] + b"\n" for piece in pieces)))
    lengths = torch.tensor([0, *map(len, pieces)])
    return Batch(inputs[None], targets, lengths.cumsum(0).to(torch.int32))
