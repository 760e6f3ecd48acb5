"""Tables of a run, for the terminal and for the results page."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from graphlin.bench.results import CAPTURED, EXACT, ONE_RANK, ONE_TIER, OURS, REPLAY, WARM, Key, Row, Run, Sample
from graphlin.bench.targets import target

Goal = Callable[[Key], float | None]


@dataclass(frozen=True)
class Base:
    """What the other columns of a table are divided by: a measure of graphlin's, or with `own` of each contestant itself."""

    measure: str
    own: bool = False


# Sections that compare measures rather than contestants.
BASES = {"underfilled": Base(EXACT, own=True), "layers": Base(CAPTURED), "model": Base(CAPTURED), "ladder": Base(ONE_TIER),
         "cold": Base(WARM), "parallel": Base(ONE_RANK)}


@dataclass(frozen=True)
class Grid:
    """One table: a title, the headers, and the cells of each line as text."""

    title: str
    headers: list[str]
    lines: list[list[str]]
    remarks: list[str]


def grids(run: Run) -> list[Grid]:
    """Tables of all sections, in the order of measuring."""
    goal = partial(target, run.environment)
    return [grid for name in run.sections for grid in _grids_of(name, run.section(name), goal)]


def _grids_of(name: str, rows: list[Row], goal: Goal) -> Iterator[Grid]:
    """One for each call of the stages, for each direction and measure of an op, for each direction of what else there is."""
    if name == "stages":
        for key in _unique(row.key for row in rows):
            yield _stages(key, [row for row in rows if row.key == key])
        return
    for direction in _unique(row.key.direction for row in rows):
        chosen = [row for row in rows if row.key.direction == direction]
        if name in BASES:
            yield _comparison(f"{name}, {direction}", chosen, BASES[name], goal)
            continue
        for measure in _unique(row.measure for row in chosen):
            yield _comparison(f"{name}, {direction}: {measure}", [row for row in chosen if row.measure == measure],
                              Base(measure), goal)


def _comparison(title: str, rows: list[Row], base: Base, goal: Goal) -> Grid:
    """A line for each shape and a column for each contestant and measure, with its ratio to the base behind it."""
    columns = sorted(_unique((row.who, row.measure) for row in rows), key=lambda column: column[0] != OURS)
    one_measure = len({measure for _, measure in columns}) == 1
    bases = {column: (column[0] if base.own else OURS, base.measure) for column in columns}
    headers = ["T, N"]
    for who, measure in columns:
        label = who if one_measure else f"{who} {measure}"
        headers += [label] if bases[who, measure] == (who, measure) else [label, "ratio"]
    lines, keys = [], _unique(row.key for row in rows)
    for key in keys:
        found = {(row.who, row.measure): row for row in rows if row.key == key}
        line = [_shape(key)]
        for column in columns:
            line.append(_cell(found.get(column)))
            if bases[column] != column:
                line.append(_ratio(found.get(column), found.get(bases[column])))
        lines.append(line)
    if any(row.measure == REPLAY and goal(row.key) is not None for row in rows):
        headers.append("target")
        for line, key in zip(lines, keys, strict=True):
            line.append("" if goal(key) is None else f"{goal(key)}")
    return Grid(f"{title}, microseconds", headers, lines, _remarks(rows))


def _stages(key: Key, rows: list[Row]) -> Grid:
    total = sum(row.sample.median for row in rows if row.sample)
    lines = [[row.who, _cell(row), f"{row.sample.median / total:.0%}" if row.sample else "", row.note] for row in rows]
    return Grid(f"stages of {key.case}, {_shape(key)}, {key.direction}: each launch alone, microseconds; sum {total:.1f}",
                ["kernel", "time", "share", "launch"], lines, _remarks(rows))


def _shape(key: Key) -> str:
    if not key.tokens:
        return key.case
    return f"{key.tokens}, {key.seqs}" + ("" if key.case == key.section else f" {key.case}")


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    return "failed" if row.sample is None else show_sample(row.sample)


def show_sample(sample: Sample) -> str:
    """Median and half the distance of the quartiles: `24.1 ±1%`, or `2.41 s ±1%` from a second on."""
    time = f"{sample.median:.1f}" if sample.median < 1e6 else f"{sample.median / 1e6:.2f} s"
    return f"{time} ±{sample.spread:.0%}" if sample.count > 1 else time


def _ratio(row: Row | None, base: Row | None) -> str:
    if row is None or base is None or row.sample is None or base.sample is None:
        return ""
    return f"{row.sample.median / base.sample.median:.2f}"


def _remarks(rows: Iterable[Row]) -> list[str]:
    """A line for each error, with the shapes it befell."""
    causes: dict[tuple[str, str, str], list[str]] = {}
    for row in rows:
        if row.error is not None:
            causes.setdefault((row.who, row.measure, row.error), []).append(f"({_shape(row.key)})")
    return [f"{who} failed, {measure}, {' '.join(shapes)}: {error}" for (who, measure, error), shapes in causes.items()]


def _unique(items: Iterable) -> list:
    return list(dict.fromkeys(items))


def headline(run: Run) -> list[str]:
    """What every result must name: date, commit, device, versions, clocks."""
    environment = run.environment
    versions = ", ".join(f"{name} {number}" for name, number in environment.versions.items())
    sizes = ", ".join(f"{name} {value}" for name, value in environment.sizes.items())
    facts = ", ".join(f"{name} {value}" for name, value in environment.device_facts.items())
    return [f"{environment.date}, commit {environment.commit}, {environment.device}; {environment.clock}", versions,
            sizes,
            *([facts] if facts else [])]


def show(run: Run, console: Console) -> None:
    """Prints the whole run for people."""
    for line in headline(run):
        console.print(line, highlight=False, markup=False)
    for grid in grids(run):
        table = Table(*grid.headers)
        for column in table.columns[1:]:
            column.justify = "right"
        for line in grid.lines:
            table.add_row(*map(escape, line))
        remarks = map(escape, grid.remarks)
        console.print(f"\n[bold]{grid.title}[/]", table, *remarks, sep="\n", highlight=False)
