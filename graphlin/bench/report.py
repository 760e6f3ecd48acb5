"""Tables of a run, for the terminal and for the results page."""

from collections.abc import Iterable
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from graphlin.bench.results import OURS, REPLAY, Key, Row, Run
from graphlin.bench.targets import target


@dataclass(frozen=True)
class Grid:
    """One table: a title, the headers, and the cells of each line as text."""

    title: str
    headers: list[str]
    lines: list[list[str]]
    remarks: list[str]


def grids(run: Run) -> list[Grid]:
    """A table for each section, direction and measure; stages have one for each call."""
    return [grid for name in run.sections for grid in _grids_of(name, run.section(name))]


def _grids_of(name: str, rows: list[Row]) -> Iterable[Grid]:
    if name == "stages":
        for key in _unique(row.key for row in rows):
            yield _stages(key, [row for row in rows if row.key == key])
        return
    for direction in _unique(row.key.direction for row in rows):
        for measure in _unique(row.measure for row in rows):
            chosen = [row for row in rows if (row.key.direction, row.measure) == (direction, measure)]
            if chosen:
                yield _comparison(f"{name}, {direction}: {measure}, microseconds", chosen)


def _comparison(title: str, rows: list[Row]) -> Grid:
    """A line for each shape; a column for each contestant, and after a peer's how many times graphlin's time it took."""
    names = sorted(_unique(row.who for row in rows), key=lambda who: who != OURS)
    headers = ["T, N"]
    for who in names:
        headers += [who] if who == OURS else [who, f"{who} / {OURS}"]
    lines, remarks = [], []
    for key in _unique(row.key for row in rows):
        found = {row.who: row for row in rows if row.key == key}
        base = found.get(OURS)
        line = [_shape(key)]
        for who in names:
            row = found.get(who)
            line.append(_cell(row))
            if who != OURS:
                line.append(_ratio(row, base))
            if row is not None and row.error is not None:
                remarks.append(f"{who}, {_shape(key)}: {row.error}")
        lines.append(line)
    if any(_has_target(row) for row in rows):
        headers.append("target")
        for line, key in zip(lines, _unique(row.key for row in rows), strict=True):
            line.append("" if target(key) is None else f"{target(key)}")
    return Grid(title, headers, lines, _merge(remarks))


def _stages(key: Key, rows: list[Row]) -> Grid:
    total = sum(row.sample.median for row in rows if row.sample)
    lines = [[row.who, _cell(row), f"{row.sample.median / total:.0%}" if row.sample else "", row.note] for row in rows]
    return Grid(f"stages of {key.case}, {_shape(key)}, {key.direction}: each launch alone, microseconds; sum {total:.1f}",
                ["kernel", "time", "share", "launch"], lines, [f"{row.who}: {row.error}" for row in rows if row.error])


def _has_target(row: Row) -> bool:
    return row.measure == REPLAY and target(row.key) is not None


def _shape(key: Key) -> str:
    return f"{key.tokens}, {key.seqs}" + ("" if key.case == key.section else f" {key.case}")


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    return "failed" if row.sample is None else f"{row.sample.median:.1f} ±{row.sample.spread:.0%}"


def _ratio(row: Row | None, base: Row | None) -> str:
    if row is None or base is None or row.sample is None or base.sample is None:
        return ""
    return f"{row.sample.median / base.sample.median:.2f}"


def _merge(remarks: list[str]) -> list[str]:
    """One remark for each cause, with the shapes it befell."""
    causes: dict[tuple[str, str], list[str]] = {}
    for remark in remarks:
        place, _, cause = remark.partition(": ")
        who, _, shape = place.partition(", ")
        causes.setdefault((who, cause), []).append(f"({shape})")
    return [f"{who} {' '.join(shapes)}: {cause}" for (who, cause), shapes in causes.items()]


def _unique(items: Iterable) -> list:
    return list(dict.fromkeys(items))


def headline(run: Run) -> list[str]:
    """What every result must name: date, commit, device, versions, clocks."""
    environment = run.environment
    versions = ", ".join(f"{name} {number}" for name, number in environment.versions.items())
    facts = ", ".join(f"{name} {value}" for name, value in environment.device_facts.items())
    return [f"{environment.date}, commit {environment.commit}, {environment.device}; {environment.clock}", versions,
            *([facts] if facts else [])]


def show(run: Run, console: Console) -> None:
    """Prints the whole run for people."""
    for line in headline(run):
        console.print(line, highlight=False)
    for grid in grids(run):
        table = Table(*grid.headers)
        for column in table.columns[1:]:
            column.justify = "right"
        for line in grid.lines:
            table.add_row(*line)
        console.print(f"\n[bold]{grid.title}[/]", table, *grid.remarks, sep="\n", highlight=False)
