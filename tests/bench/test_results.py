import json

import pytest

from graphlin.bench.results import Sample, load
from tests.bench.rows import example


def test_a_sample_has_median_and_quartiles():
    assert Sample.of([5.0, 1.0, 2.0, 4.0, 3.0]) == Sample(3.0, 2.0, 4.0, 5)
    assert Sample.of([7.0]) == Sample(7.0, 7.0, 7.0, 1)
    assert Sample.of([1.0, 2.0]).median == 1.5


def test_the_spread_is_half_the_distance_of_the_quartiles():
    assert Sample(10.0, 9.0, 12.0, 5).spread == pytest.approx(0.15)
    assert Sample(0.0, 0.0, 0.0, 2).spread == 0.0


def test_no_measurement_is_no_sample():
    with pytest.raises(ValueError, match="at least one measurement"):
        Sample.of([])


def test_a_saved_run_is_loaded_as_it_was(tmp_path):
    path = tmp_path / "run.json"
    run = example()
    run.save(path)
    assert load(path) == run
    content = json.loads(path.read_text())
    assert content["environment"]["commit"] == "abc123"
    assert content["rows"][0] == {
        "key": {"section": "gdn", "case": "gdn", "tokens": 512, "seqs": 1, "direction": "forward"}, "who": "fla",
        "measure": "graph replay", "sample": None, "error": "PeerError: refuses to run", "note": ""}
    assert content["rows"][1]["sample"] == {"median": 30.0, "low": 29.4, "high": 30.6, "count": 5}


@pytest.mark.parametrize("content", [None, "", "[]", "{}", '{"environment": {}, "rows": []}', "\x00"])
def test_another_file_is_named(tmp_path, content):
    path = tmp_path / "other.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match="other.json: expected a file that graphlin bench --json wrote"):
        load(path)


def test_sections_are_in_the_order_of_measuring():
    run = example()
    assert run.sections == ["gdn", "layers", "cold", "stages"]
    assert [row.who for row in run.section("stages")] == ["prep", "finish"]
