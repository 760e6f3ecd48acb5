"""The forms that launch records choose give the same numbers: those of the other devices, here with this device's tiles."""

from dataclasses import replace

import pytest
import torch

from graphlin.backends import get_backend
from graphlin.backends.npu.tiles import launch_record as npu_record
from graphlin.kernels.launch import is_crowded
from graphlin.ops.chunks import prepare_chunk_indices
from tests.inputs import GDN, cu_of, gdn_inputs, gdn_upstream, run
from tests.ops.op_cases import OP_CASES, assert_bitwise
from tests.ops.standard_check import standard_check

FORMS = ("ROWWISE", "DOT_BLOCKS", "PERSISTENT", "INTERLEAVED", "COPY_LHS", "REV_SCAN", "PAIRWISE", "UNROLLED", "SPLIT")


@pytest.fixture
def ascend_forms(device, monkeypatch) -> set[str]:
    """Makes this device's records choose what Ascend's do, but for tiles. Returns the forms that were asked for."""
    backend, asked = get_backend(device), set()
    own = backend.launch_record

    def changed(kernel, **problem):
        record, other = own(kernel, **problem), npu_record(kernel, **problem)
        forms = {name: other.tiles[name] for name in FORMS if name in other.tiles}
        asked.update(forms)
        return replace(record, tiles={**record.tiles, **forms})

    monkeypatch.setattr(backend, "launch_record", changed)
    return asked


@pytest.mark.parametrize("seqs", [1, 5, 70])
def test_chunk_table(device, ascend_forms, seqs):
    lengths = [(7 * i) % 40 for i in range(seqs)]
    cu = cu_of(tuple(lengths), device)
    rows = [[i, j] for i, n in enumerate(lengths) for j in range(-(-n // 16))]
    table = prepare_chunk_indices(cu, sum(lengths) + 20, 16).tolist()
    assert table == rows + [[-1, -1]] * (len(table) - len(rows)) and ascend_forms == {"ROWWISE"}


def test_convolution_is_bitwise_the_same(device, request):
    case, lengths = OP_CASES[0], (1, 0, 16, 2, 20)
    drawn, cu = case.draw(sum(lengths) + 5, len(lengths), device), cu_of(lengths, device)
    expected = case.run(drawn, cu)
    assert request.getfixturevalue("ascend_forms") == set()
    assert_bitwise(case.run(drawn, cu), expected, "in the row-wise form")


@pytest.mark.parametrize("chunk_size", [16, 64])
def test_gated_delta_rule(device, ascend_forms, chunk_size):
    standard_check(GDN(lengths=(21, 0, 66), chunk_size=chunk_size, gate="raw_bias", beta="sigmoid"), device)
    assert {"DOT_BLOCKS", "PERSISTENT", "INTERLEAVED", "REV_SCAN", "SPLIT"} <= ascend_forms


def test_persistent_recurrences_leave_no_task_out(device, ascend_forms, monkeypatch):
    """Three programs for eight tasks, in each half."""
    monkeypatch.setattr(get_backend(device), "num_cores", lambda device: 3)
    problem = GDN(lengths=(21, 5), H=2, HV=2, V=80, chunk_size=16, dtype=torch.float32)
    standard_check(problem, device, gdn_inputs(problem, device))


@pytest.mark.parametrize("split", [True, False])
def test_sums_stored_in_each_round_start_anew_with_each_value_head(device, request, split):
    """Two value heads of a key head, two tiles of V each. Hopper's own records split where operands have two bytes."""
    if not split:
        assert not npu_record("gdn_state_gradients", K=32, V=80, R=2, BT=16, arch="", dtype=torch.float32).tiles["SPLIT"]
        request.getfixturevalue("ascend_forms")
    problem = GDN(lengths=(21,), H=1, HV=2, V=80, chunk_size=16, dtype=torch.bfloat16 if split else torch.float32)
    standard_check(problem, device, gdn_inputs(problem, device))


def test_more_programs_than_cores_are_a_crowd(device, monkeypatch):
    monkeypatch.setattr(get_backend(device), "num_cores", lambda device: 4)
    assert [is_crowded(programs, device) for programs in (4, 5)] == [False, True]


def test_the_number_of_programs_changes_no_bit(device, monkeypatch):
    """As many cores as there are programs, and one: on Hopper the recurrences of the backward take three stages, and two."""
    problem = GDN(lengths=(70, 33), K=48, V=48, chunk_size=32, dtype=torch.bfloat16)
    inputs, results = gdn_inputs(problem, device), []
    for cores in (1000, 1):
        monkeypatch.setattr(get_backend(device), "num_cores", lambda device, cores=cores: cores)
        results.append(run(problem.op, inputs, gdn_upstream(problem, inputs), **problem.op_options))
    assert_bitwise(*results, "with one core")
