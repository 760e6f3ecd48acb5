import json

import pytest
import torch

from graphlin.__main__ import main
from graphlin.backends import LaunchRecord, get_backend
from graphlin.backends.cuda.tiles import launch_record
from graphlin.bench import arguments, tune, tune_command
from graphlin.bench.candidates import candidates
from graphlin.bench.results import Sample, load
from graphlin.bench.tune import Found, Timed, Tuning, best_overall
from tests.bench.conftest import TINY


class FakeTimes:
    """Times of launches by what they are, in place of a clock's."""

    def __init__(self, times):
        self.times = times

    def alone(self, launch, clock):
        return Sample.of([self.times(launch)])


@pytest.fixture
def tuning(setting):
    return lambda op: Tuning(setting.problem(op, 20, 2), (20, 2), setting.device, setting.clock, setting.clock)


def search(tuning, kernel, values, monkeypatch, times):
    monkeypatch.setattr(tune, "time_alone", FakeTimes(times).alone)
    advanced = []
    found = tuning.search(kernel, candidates(kernel, tuning.record(kernel), values), lambda: advanced.append(1))
    assert len(advanced) == len(found.all)
    return found


def test_the_fastest_records_are_timed_again_beside_the_present_one(tuning, monkeypatch):
    of_conv = tuning("conv")
    present, *others = sorted((1, 2, 4, 8), key=lambda w: w != of_conv.record("conv_forward").num_warps)
    warps = dict(zip((present, *others), (10.0, 5.0, 3.0, 4.0), strict=True))
    found = search(of_conv, "conv_forward", {"num_warps": others}, monkeypatch,
                   lambda launch: warps[launch.record.num_warps] if launch.name == "conv_forward" else 100.0)
    assert {t.record.num_warps: t.microseconds for t in found.all} == warps
    assert found.present[0].num_warps == present
    assert {record.num_warps for record, _ in found.finalists} == set(others)
    assert all(sample.median > 0 for _, sample in [found.present, *found.finalists])
    assert [s.median for _, s in found.finalists] == sorted(s.median for _, s in found.finalists)


def test_what_a_record_changes_in_other_launches_counts(tuning, monkeypatch):
    """The last kernel of GDN's backward reads a workspace as wide as the tiles of the one before."""
    def times(launch):
        if launch.name == "gdn_state_gradients":
            return 10.0 if launch.record.tiles["BK"] == 16 else 6.0
        return {16: 20.0, 32: 27.0}[launch.constexprs["BK"]] if launch.name == "gdn_finish_gradients" else 1.0

    found = search(tuning("gdn"), "gdn_state_gradients", {"BK": (16, 32)}, monkeypatch, times)
    assert [(t.record.tiles["BK"], t.microseconds) for t in found.all] == [(16, 10.0), (32, 13.0)]


@pytest.mark.parametrize("kernel", ["gdn_state_gradients", "kda_inter_gradients"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_products_that_came_out_wrong_are_not_proposed(kernel, dtype):
    """Those of fewer than 64 columns by four warps, on Hopper; the present records have none either."""
    present = launch_record(kernel, arch="sm_90", K=16, V=16, R=1, BT=64, dtype=dtype)
    narrow = [r for r in candidates(kernel, present, {}) if r.tiles["BK"] < 64 and r.num_warps == 4]
    assert narrow == [] and len(candidates(kernel, present, {})) > 8


def test_a_record_with_wrong_results_is_no_candidate(tuning, monkeypatch):
    def refuse(names, found, expected):
        raise RuntimeError("differs")

    monkeypatch.setattr(tune, "check_alike", refuse)
    found = tuning("conv")._time("conv_forward", LaunchRecord({"BR": 16, "BD": 16, "UNROLL": 1, "ROWWISE": False}))
    assert found.error == "RuntimeError: differs" and found.microseconds == float("inf")


def test_a_record_that_cannot_be_launched_is_no_candidate(tuning):
    found = tuning("conv")._time("conv_forward", LaunchRecord({"BR": 16, "ROWWISE": False}))
    assert found.error and found.microseconds == float("inf")


def test_the_best_over_several_shapes_has_the_least_mean_ratio():
    records = [LaunchRecord(num_warps=w) for w in (1, 2, 4)]

    def found(*times):
        timed = [Timed(r, t) for r, t in zip(records, times, strict=True)]
        return Found("conv", "a_kernel", (1, 1), (records[0], Sample.of([times[0]])), [], timed)

    record, gain = best_overall([found(10.0, 5.0, 8.0), found(100.0, 180.0, 80.0)])
    assert record.num_warps == 4 and gain == pytest.approx(0.8)
    record, gain = best_overall([found(10.0, 5.0, float("inf"))])
    assert record.num_warps == 2 and gain == pytest.approx(0.5)


def make_tiny(monkeypatch, device):
    monkeypatch.setattr(tune_command, "best_device", lambda: device)
    monkeypatch.setattr(arguments, "scale_of", lambda device: TINY)
    monkeypatch.setattr(tune_command, "compilations", lambda *_: [])


@pytest.fixture
def tiny_command(monkeypatch, device):
    make_tiny(monkeypatch, device)


def test_the_command_prints_and_saves_the_records(tiny_command, tmp_path, capsys):
    path = tmp_path / "tuned.json"
    assert main(["tune", "--only", "conv", "--kernels", "conv_forward", "--try", "BD=16,32", "--json", str(path)]) == 0
    out = capsys.readouterr().out
    assert "conv_forward in conv: 2 candidates, 0 uses failed" in out and "BD=16" in out
    assert "of the present: LaunchRecord(tiles={'BR': " in out
    rows = load(path).rows
    assert [row.note for row in rows] == ["present", ""]
    assert all(row.who == "conv_forward" and row.key.section == "tune" and row.key.tokens == 20 for row in rows)
    assert "BD=32" in rows[0].measure and "BD=16" in rows[1].measure
    assert json.loads(path.read_text())["environment"]["device"]


@pytest.mark.slow
def test_records_of_forms_are_tuned_by_their_own_names(request, capsys, monkeypatch):
    """One sequence of 400 tokens is split, eight of 8 are not; of the backward the recurrences are in a loop where cores idle."""
    if request.config.option.device != "host":
        pytest.skip("other records than the host's do not split a sequence so short")
    host = torch.device("cpu")
    make_tiny(monkeypatch, host)
    monkeypatch.setattr(get_backend(host), "num_cores", lambda device: 12)
    names = ["delta_recurrence", "delta_recurrence_halves", "delta_two_recurrences"]
    tried = ["--kernels", ",".join(names), "--try", "num_warps=2,4", "--shapes", "400,1", "64,8"]
    assert main(["tune", "--only", "gdn", *tried]) == 0
    out = capsys.readouterr().out
    assert [f"{name} in gdn: 2 candidates, 0 uses failed" in out for name in names] == [True] * 3


def test_a_kernel_that_no_op_launches_is_named(tiny_command, capsys):
    assert main(["tune", "--only", "conv", "--kernels", "gdn_prep"]) == 2
    assert "conv launch no gdn_prep" in capsys.readouterr().err


@pytest.mark.parametrize(("given", "message"), [
    (["--only", "mamba"], "--only: expected some of gdn, kda, conv, found mamba"),
    (["--json", "nowhere/a.json"], "--json: expected a file in a directory that exists"),
])
def test_wrong_arguments_are_one_line_and_status_2(capsys, given, message):
    assert main(["tune", *given]) == 2
    out, err = capsys.readouterr()
    assert message in err and err.count("\n") == 1 and not out


@pytest.mark.parametrize("tried", ["BD", "BD=", "=3"])
def test_values_to_try_need_a_name(capsys, tried):
    with pytest.raises(SystemExit) as stop:
        main(["tune", "--try", tried])
    assert stop.value.code == 2
    assert "NAME=VALUE" in capsys.readouterr().err


def test_values_to_try_may_be_numbers_truths_and_words():
    assert tune_command._values("X=16,True,False,tf32") == ("X", (16, True, False, "tf32"))
