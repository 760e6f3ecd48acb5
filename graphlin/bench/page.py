"""The results page: every table of some runs in Markdown."""

import os
from collections.abc import Sequence
from pathlib import Path

from graphlin.bench.report import grids, headline
from graphlin.bench.results import Run

INTRODUCTION = """# Measured

Made by `python -m graphlin bench --from RESULT.json... --page benchmarks/README.md`: edit nothing here by hand.

Times are medians in microseconds, with half the distance of the quartiles behind ±. *T, N* are tokens and sequences, packed
`[1, T, ...]` with random ends. All contestants of a table were measured in one process, in turn, on the same tensors, after
their results were found alike. *Forward* runs without gradients, *forward+backward* gives the gradients of every input.

- **graph replay**: the call captured in a device graph, replays one behind the other.
- **eager, host**: until the eager call returns; **eager, device**: the sum of its kernels' times.
- **ratio**: a time over that of the column without one; `ratio` behind a peer is how many times graphlin's time it took.
- **target**: what the op should reach on an H200.
"""


def write_page(runs: Sequence[Run], plot: Path | None, path: Path) -> None:
    """Writes the page; `plot` is a picture to show, and is linked relative to the page."""
    parts = [INTRODUCTION]
    if plot is not None:
        parts.append(f"![graph replays of the ops]({os.path.relpath(plot, path.parent)})\n")
    for run in runs:
        parts.append("\n".join([f"## {run.environment.device}, {run.environment.date}\n", *headline(run),
                                f"\n`{run.environment.command}`\n"]))
        parts += [_table(grid.title, grid.headers, grid.lines, grid.remarks) for grid in grids(run)]
    path.write_text("\n".join(parts))


def _table(title: str, headers: list[str], lines: list[list[str]], remarks: list[str]) -> str:
    rows = [headers, ["---", *["---:"] * (len(headers) - 1)], *lines]
    body = "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows)
    notes = "".join(f"\n- {remark}" for remark in remarks)
    return f"### {title}\n\n{body}\n{notes}\n" if notes else f"### {title}\n\n{body}\n"
