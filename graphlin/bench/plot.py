"""Graph replay times of the ops as a picture."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from graphlin.bench.problems import PROBLEMS
from graphlin.bench.results import DIRECTIONS, OURS, REPLAY, Key, Row, Run
from graphlin.bench.targets import target

COLOURS = {OURS: "#1b6ca8"}
OTHERS = ("#d9822b", "#8a8a8a", "#6a994e")


def draw(runs: Sequence[Run], path: Path) -> None:
    """Writes a PNG of the first run that has ops: a column for each op, a row for each direction, a group of bars for each
    shape; bars are medians.

    Raises ValueError where no replay of an op was measured, ModuleNotFoundError without matplotlib.
    """
    from matplotlib.figure import Figure

    run = next((run for run in runs if set(run.sections) & set(PROBLEMS)), None)
    rows = [] if run is None else run.rows
    replays = [row for row in rows if row.measure == REPLAY and row.sample is not None and row.key.section in PROBLEMS]
    if not replays:
        raise ValueError("expected graph replays of an op among the results, found none; measure gdn, kda or conv")
    ops = list(dict.fromkeys(row.key.section for row in replays))
    names = sorted(dict.fromkeys(row.who for row in replays), key=lambda who: who != OURS)
    colours = {who: COLOURS.get(who, OTHERS[i % len(OTHERS)]) for i, who in enumerate(names)}
    figure = Figure(figsize=(1.5 + 4.2 * len(ops), 7), layout="constrained")
    panels = figure.subplots(len(DIRECTIONS), len(ops), squeeze=False)
    for line, direction in zip(panels, DIRECTIONS, strict=True):
        for axes, op in zip(line, ops, strict=True):
            chosen = [row for row in replays if (row.key.section, row.key.direction) == (op, direction)]
            _draw_panel(axes, f"{op}, {direction}", chosen, names, colours, partial(target, run.environment))
    panels[0][0].legend()
    figure.savefig(path, dpi=130)


def _draw_panel(axes: Any, title: str, rows: list[Row], names: list[str], colours: dict[str, str],
                goal: Callable[[Key], float | None]) -> None:
    keys = list(dict.fromkeys(row.key for row in rows))
    width = 0.8 / len(names)
    for i, who in enumerate(names):
        bars = [(x, row.sample) for x, key in enumerate(keys) for row in rows if (row.key, row.who) == (key, who)]
        axes.bar([x + (i - (len(names) - 1) / 2) * width for x, _ in bars], [sample.median for _, sample in bars], width,
                 color=colours[who], label=who)
    goals = [(x, goal(key)) for x, key in enumerate(keys) if goal(key) is not None]
    axes.plot([x for x, _ in goals], [microseconds for _, microseconds in goals], "k_", markersize=12,
              label="target" if goals else None)
    axes.set(title=title, ylabel="microseconds", yscale="log", xticks=range(len(keys)), xticklabels=map(_label, keys))
    axes.tick_params(axis="x", labelsize=7)


def _label(key: Key) -> str:
    return f"{key.tokens}\n{key.seqs}"
