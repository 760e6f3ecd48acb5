from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from graphlin.bench.page import write_page
from graphlin.bench.plot import draw
from graphlin.bench.report import grids, headline, show, show_sample
from graphlin.bench.results import BOTH, FORWARD, Key, Run, Sample
from graphlin.bench.targets import TARGETS, target
from tests.bench.rows import ENVIRONMENT, example, row, sample


def grid(title_part):
    found, = [g for g in grids(example()) if title_part in g.title]
    return found


def test_a_table_has_a_ratio_for_each_peer_and_the_target():
    table = grid("gdn, forward: graph replay")
    assert table.headers == ["T, N", "graphlin", "fla", "ratio", "target"]
    assert table.lines == [["512, 1", "30.0 ±2%", "failed", "", "24"], ["4096, 32", "120.0 ±2%", "360.0 ±2%", "3.00", "125"]]
    assert table.remarks == ["fla failed, graph replay, (512, 1): PeerError: refuses to run"]


def test_each_direction_and_measure_has_a_table():
    titles = [g.title for g in grids(example())]
    assert titles[:3] == ["gdn, forward: graph replay, microseconds", "gdn, forward: eager, host, microseconds",
                          "gdn, forward+backward: graph replay, microseconds"]
    assert grid("eager, host").headers == ["T, N", "graphlin"]


def test_layers_are_compared_with_the_captured_call():
    table = grid("layers")
    assert table.headers == ["T, N", "graphlin eager", "ratio", "graphlin captured", "fla eager", "ratio"]
    assert table.lines == [["512, 1 GatedDeltaNet", "1000.0 ±2%", "4.00", "250.0 ±2%", "2500.0 ±2%", "10.00"]]


def test_each_contestants_tier_is_compared_with_its_own_exact_size():
    rows = [row("underfilled", (512, 1), time, who, case="kda", measure=measure)
            for who, times in (("graphlin", (100.0, 105.0)), ("fla", (140.0, 252.0)))
            for measure, time in zip(("exact size", "under-filled"), times, strict=True)]
    table, = grids(Run(ENVIRONMENT, rows))
    assert table.lines == [["512, 1 kda", "100.0 ±2%", "105.0 ±2%", "1.05", "140.0 ±2%", "252.0 ±2%", "1.80"]]


def test_stages_have_shares_of_their_sum():
    table = grid("stages")
    assert "sum 40.0" in table.title
    assert table.lines == [["prep", "30.0 ±2%", "75%", "4 programs; BK=64"], ["finish", "10.0 ±2%", "25%", "2 programs"]]


def test_errors_with_one_cause_are_one_remark():
    rows = [row("gdn", shape, None, "fla", error="no module") for shape in ((512, 1), (4096, 32))]
    table, = grids(Run(ENVIRONMENT, rows))
    assert table.remarks == ["fla failed, graph replay, (512, 1) (4096, 32): no module"]
    assert table.lines == [["512, 1", "failed", "", "24"], ["4096, 32", "failed", "", "125"]]


@pytest.mark.parametrize(("found", "text"), [
    (sample(24.06, 0.01), "24.1 ±1%"), (sample(12.3e6), "12.30 s ±0%"), (Sample(5.0, 5.0, 5.0, 1), "5.0")])
def test_times_are_shown_with_their_spread(found, text):
    assert show_sample(found) == text


def test_targets_are_those_of_the_ops():
    def goal(*key, **changes):
        return target(replace(ENVIRONMENT, **changes), Key(*key))

    assert goal("gdn", "gdn", 512, 1, FORWARD) == 24 and goal("gdn", "gdn", 512, 1, BOTH) == 90
    assert goal("conv", "conv", 32768, 1, BOTH) == 750
    assert goal("gdn", "gdn", 513, 1, FORWARD) is None and goal("layers", "x", 512, 1, FORWARD) is None
    assert goal("gdn", "gdn", 512, 1, FORWARD, device="NVIDIA H100") is None
    assert goal("gdn", "gdn", 512, 1, FORWARD, sizes=ENVIRONMENT.sizes | {"K": 64}) is None
    assert {op: len(shapes) for op, shapes in TARGETS.items()} == {"gdn": 8, "kda": 8, "conv": 4}
    assert all(forward < both for shapes in TARGETS.values() for forward, both in shapes.values())


def test_the_terminal_shows_everything():
    out = Console(record=True, width=160, file=StringIO())
    show(example(), out)
    shown = out.export_text()
    for text in ("a date, commit abc123, NVIDIA H200; a clock", "HV 32, K 128", "torch 9.9, fla-core 0.6.0", "clocks.sm 1980 MHz",
                 "360.0 ±2%", "refuses to run", "12.30 s", "4 programs; BK=64"):
        assert text in shown, text


def test_errors_are_shown_as_they_are():
    out = Console(record=True, width=160, file=StringIO())
    show(Run(ENVIRONMENT, [row("gdn", (512, 1), None, "fla", error="expected [b] and [/b], found x[red]")]), out)
    assert "expected [b] and [/b], found x[red]" in out.export_text()


def test_the_page_has_the_run_and_every_table(tmp_path):
    (tmp_path / "pictures").mkdir()
    path = tmp_path / "README.md"
    write_page([example(), example()], tmp_path / "pictures" / "a.png", path)
    page = path.read_text()
    assert page.startswith("# Measured\n")
    assert "![graph replays of the ops](pictures/a.png)" in page
    for line in headline(example()):
        assert page.count(line) == 2
    assert page.count("`python -m graphlin bench`") == 2
    table = "| T, N | graphlin | fla | ratio | target |\n| --- | ---: | ---: | ---: | ---: |\n| 512, 1 | 30.0 ±2% | failed |"
    assert table in page
    assert "- fla failed, graph replay, (512, 1): PeerError: refuses to run" in page


def test_the_plot_is_a_picture(tmp_path):
    path = tmp_path / "a.png"
    draw([example()], path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_the_plot_shows_the_replays_by_contestant(monkeypatch, tmp_path):
    from matplotlib.figure import Figure
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **kwargs: figures.append(figure))
    draw([example()], tmp_path / "a.png")
    forward, both = figures[0].axes
    assert (forward.get_title(), both.get_title()) == ("gdn, forward", "gdn, forward+backward")
    assert [bar.get_height() for container in forward.containers for bar in container] == [30.0, 120.0, 360.0]
    assert sorted(label.get_text() for label in forward.get_legend().get_texts()) == ["fla", "graphlin", "target"]
    assert forward.lines[0].get_ydata().tolist() == [24, 125]


def test_nothing_to_draw_is_told(tmp_path):
    rows = [row for row in example().rows if row.key.section != "gdn"]
    with pytest.raises(ValueError, match="expected graph replays of an op"):
        draw([Run(ENVIRONMENT, rows)], tmp_path / "a.png")
