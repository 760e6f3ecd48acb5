from graphlin.backends import LaunchRecord
from graphlin.backends.cuda.tiles import _RECORDS
from graphlin.bench.candidates import FIELDS, SEARCH, candidates

PRESENT = LaunchRecord({"BK": 64, "PREC": "tf32"}, num_warps=4, num_stages=2, waves=4)


def test_all_combinations_the_present_one_first_and_once():
    found = candidates("a_kernel", PRESENT, {"BK": (32, 64), "num_warps": (2, 4)})
    assert [(r.tiles["BK"], r.num_warps) for r in found] == [(64, 4), (32, 2), (32, 4), (64, 2)]
    assert all(r.tiles["PREC"] == "tf32" and (r.num_stages, r.waves) == (2, 4) for r in found)


def test_a_present_record_outside_the_search_is_tried_too():
    assert candidates("a_kernel", PRESENT, {"BK": (128,)}) == [PRESENT, LaunchRecord({"BK": 128, "PREC": "tf32"}, 4, 2, 4)]


def test_names_that_the_record_lacks_are_left_out():
    assert candidates("a_kernel", PRESENT, {"BV": (32, 64), "waves": (8,)}) == [
        PRESENT, LaunchRecord(PRESENT.tiles, num_warps=4, num_stages=2, waves=8)]


def test_without_a_search_the_kernels_own_table_is_taken():
    record = LaunchRecord({}, num_warps=8, waves=8)
    found = candidates("kda_finish_gradients", record, {})
    assert {(r.num_warps, r.waves) for r in found} == {(w, v) for w in (2, 4, 8) for v in (4, 8, 16)}


def test_the_table_names_kernels_and_tiles_that_exist():
    """Every kernel of a measured op is in it; the others serve copies, sums of gates, the norm, and several ranks."""
    others = {"copy_active_rows", "deliver_rows", "chunk_local_cumsum", "norm_forward", "norm_backward", "delta_state_map",
              "delta_gradient_map"}
    assert SEARCH.keys() == _RECORDS.keys() - others
    from torch import bfloat16
    for kernel, search in SEARCH.items():
        tiles = _RECORDS[kernel]("sm_90", 128, 128, 1, bfloat16).tiles
        assert set(search) <= {*FIELDS, *tiles}, kernel
