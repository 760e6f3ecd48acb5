"""Long sequences split in segments: which there are, which run by themselves, and that no result depends on it."""

from dataclasses import replace
from math import ceil

import pytest
import torch
import triton
import triton.language as tl

import graphlin
from graphlin.backends import LaunchRecord, get_backend
from graphlin.kernels.launch import launch
from graphlin.kernels.packing import Packing
from graphlin.kernels.segments import later_segment, later_segments
from tests.inputs import cu_of
from tests.ops.op_cases import assert_bitwise

BT = 16
RECORD = LaunchRecord(dict(SEGMENTS=3, SEGMENT=4))


@triton.jit
def store_segments(found, cu, N, T, BT: tl.constexpr, SEGMENTS: tl.constexpr, SEGMENT: tl.constexpr, VARLEN: tl.constexpr):
    i_n, i_t = later_segment(cu, tl.program_id(0), N, T, BT, SEGMENTS, SEGMENT, VARLEN)
    tl.store(found + tl.program_id(0) * 2, i_n)
    tl.store(found + tl.program_id(0) * 2 + 1, i_t)


def expected_segments(lengths):
    """Sequence and first chunk of all segments but the first ones."""
    chunks = [ceil(n / BT) for n in lengths]
    sizes = [max(ceil(c / 3) + 1, 4) for c in chunks]
    return [[n, begin] for n, (c, size) in enumerate(zip(chunks, sizes, strict=True)) for begin in range(size, c, size)]


def found_segments(packing, device):
    places = later_segments(packing, RECORD)
    found = torch.full((places, 2), -7, dtype=torch.int32, device=device)
    launch(store_segments, places, found, packing.cu, packing.N, packing.T, record=RECORD, BT=BT, VARLEN=packing.varlen)
    return [row for row in found.tolist() if row[0] >= 0], places


@pytest.mark.parametrize("lengths", [(65, 0, 64, 63, 300), (500,), (0, 0, 1), (70,) * 70, (16, 213, 0, 128, 97, 3)])
def test_every_segment_of_a_pack_has_one_place(device, lengths):
    rows = sum(lengths) + 37
    packing = Packing(cu_of(lengths, device), None, len(lengths), rows, 0, 0, BT, True)
    found, places = found_segments(packing, device)
    assert found == expected_segments(lengths) and places == (rows - 1) // 64


@pytest.mark.parametrize("rows", [63, 64, 65, 200, 500])
def test_every_segment_of_dense_sequences_has_one_place(device, rows):
    packing = Packing(None, None, 3, rows, 0, ceil(rows / BT), BT, False)
    expected = expected_segments((rows,) * 3)
    found, places = (expected, 0) if not expected else found_segments(packing, device)
    assert found == expected and places == len(found) == later_segments(packing, RECORD)


@pytest.fixture
def split_in(device, monkeypatch):
    """Makes the recurrence split sequences in so many segments, of two chunks or more."""
    backend = get_backend(device)
    own = backend.launch_record

    def set_segments(segments, least=2):
        def changed(kernel, **problem):
            record, split = own(kernel, **problem), dict(SEGMENTS=segments, SEGMENT=least)
            return replace(record, tiles={**record.tiles, **split}) if kernel == "delta_recurrence" else record
        monkeypatch.setattr(backend, "launch_record", changed)
    return set_segments


def draw(device, lengths, decay, dtype=torch.float32, HV=2):
    """Log decays from -2 decay to 0: 16 decay nats a chunk."""
    rows = sum(lengths)
    q, k = (torch.randn(1, rows, 1, 16, device=device).to(dtype) for _ in range(2))
    v, h0 = torch.randn(1, rows, HV, 16, device=device).to(dtype), torch.randn(len(lengths), HV, 16, 16, device=device)
    g, beta = -2 * decay * torch.rand(1, rows, HV, device=device), torch.rand(1, rows, HV, device=device)
    return dict(q=q, k=k, v=v, g=g, beta=beta, initial_state=h0, cu_seqlens=cu_of(lengths, device))


def apply(drawn):
    o, ht = graphlin.chunk_gated_delta_rule(**{"use_qk_l2norm_in_kernel": True, **drawn}, output_final_state=True, chunk_size=BT)
    return {"o": o, "ht": ht}


@pytest.mark.parametrize(("decay", "dtype"), [(0.05, torch.float32), (2.5, torch.bfloat16), (5.0, torch.float32)],
                         ids=["nothing forgotten", "near the bound", "all forgotten"])
def test_no_bit_depends_on_the_split(device, split_in, decay, dtype):
    drawn = draw(device, (5, 0, 150, 33), decay, dtype, HV=1)
    split_in(1)
    expected = apply(drawn)
    for segments in (2, 5):
        split_in(segments)
        assert_bitwise(apply(drawn), expected, f"in {segments} segments")


@pytest.mark.device_only
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_no_bit_depends_on_the_split_at_sizes_of_real_models(device, split_in, dtype):
    """A NaN in v of the first token of heads 0 and 1: head 0 forgets it before the sequence's second segment, head 1 does not."""
    rows, cu = 4500 + 100 + 9000, cu_of((4500, 100, 9000), device)
    q, k = (torch.randn(1, rows, 2, 128, device=device).to(dtype) for _ in range(2))
    v, beta = torch.randn(1, rows, 4, 128, device=device).to(dtype), torch.rand(1, rows, 4, device=device)
    g = torch.rand(1, rows, 4, device=device) * torch.tensor([-0.1, -0.001, -0.3, -2.0], device=device)

    def run():
        o, ht = graphlin.chunk_gated_delta_rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=True, cu_seqlens=cu,
                                                output_final_state=True)
        return {"o": o, "ht": ht}

    split_in(2, 32)
    found = run()
    split_in(1)
    assert_bitwise(run(), found, "in one segment")
    v[0, 4600, :2] = float("nan")
    assert run()["o"][0, -1, :2].isnan().all()
    split_in(2, 32)
    assert run()["o"][0, -1].isfinite().all(1).tolist() == [True, False, True, True]


def test_dense_sequences_are_split_too(device, split_in):
    drawn = draw(device, (100, 100), 5.0, HV=1)
    dense = {name: x.reshape(2, 100, *x.shape[2:]) for name, x in drawn.items() if name not in ("initial_state", "cu_seqlens")}
    split_in(3)
    found = apply(dense | {"initial_state": drawn["initial_state"]})
    assert_bitwise(found | {"o": found["o"].reshape(1, 200, 1, 16)}, apply(drawn), "dense")


def independent(device, split_in, change):
    """Whether the second half of a sequence of 12 chunks starts without the first: a NaN there, in v of head 0, tells."""
    drawn = draw(device, (192,), 5.0)
    change(drawn)
    drawn["v"][0, 3, 0] = float("nan")
    split_in(2)
    o, ht = apply(drawn).values()
    first, last = o[0, 3:96, 0], torch.cat([o[0, 96:, 0].flatten(), ht[0, 0].flatten()])
    assert first.isnan().all() and o[0, :, 1].isfinite().all()
    assert last.isnan().all() or last.isfinite().all()
    return bool(last.isfinite().all())


def test_a_segment_starts_by_itself_where_64_nats_have_passed(device, split_in):
    """In the two chunks before it, not more of which are tried."""
    def passed(nats):
        def change(drawn):
            drawn["g"][0, 64:96] = -nats / 32
        return change
    assert independent(device, split_in, passed(64.1))
    assert not independent(device, split_in, passed(63.9))


def test_a_strength_above_two_makes_a_state_grow(device, split_in):
    """|1 - β| = e² in each of 32 rows takes back 64 nats; β = 2 takes back none."""
    def strength(beta):
        def change(drawn):
            drawn["g"][0, 64:96] = -2.5
            drawn["beta"][0, 64:96] = beta
        return change
    assert independent(device, split_in, strength(2.0))
    assert not independent(device, split_in, strength(3.0))


def test_keys_of_any_length_are_not_split(device, split_in):
    assert not independent(device, split_in, lambda drawn: drawn.update(use_qk_l2norm_in_kernel=False))


def test_a_nan_in_the_decays_is_not_taken_for_forgetting(device, split_in):
    def change(drawn):
        drawn["g"][0, 90, 0] = float("nan")
    assert not independent(device, split_in, change)
