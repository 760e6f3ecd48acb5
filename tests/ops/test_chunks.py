"""The chunk table and the chunk sums against plain Python."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from graphlin.ops.chunks import chunk_local_cumsum, prepare_chunk_indices
from graphlin.ops.reference import chunk_local_cumsum_reference, prepare_chunk_indices_reference
from tests.inputs import cu_of
from tests.tolerances import assert_close_rms

ragged = st.lists(st.integers(0, 90), min_size=1, max_size=8)
few = settings(max_examples=25, deadline=None, derandomize=True, database=None,
               suppress_health_check=[HealthCheck.function_scoped_fixture])


@few
@given(lengths=ragged, slack=st.integers(0, 70), chunk_size=st.sampled_from([16, 32, 64]), wide=st.booleans())
def test_chunk_table_equals_the_table_in_python(device, lengths, slack, chunk_size, wide):
    cu = cu_of(tuple(lengths), device, torch.int64 if wide else torch.int32)
    tokens = sum(lengths) + slack
    table = prepare_chunk_indices(cu, tokens, chunk_size)
    assert table.dtype == torch.int32 and table.device == cu.device
    assert table.tolist() == prepare_chunk_indices_reference(cu, tokens, chunk_size).tolist()


@pytest.mark.parametrize(("lengths", "tokens", "expected"), [
    ((0, 0), 0, []),
    ((0, 0), 1, [[-1, -1]]),
    ((70, 0, 10), 96, [[0, 0], [0, 1], [2, 0], [-1, -1]]),
    ((1, 1, 64), 66, [[0, 0], [1, 0], [2, 0]]),
    ((0, 0, 64, 0), 64, [[2, 0], [-1, -1], [-1, -1], [-1, -1]]),
], ids=str)
def test_chunk_table_of_named_packs(device, lengths, tokens, expected):
    assert prepare_chunk_indices(cu_of(lengths, device), tokens).tolist() == expected


@pytest.mark.parametrize("chunk_size", [16, 64])
def test_the_row_bound_is_exact(device, chunk_size):
    """The worst pack, one token in all sequences but the last, fills the table to its last row."""
    seqs, tokens = 5, 5 - 1 + 3 * chunk_size + 1
    table = prepare_chunk_indices(cu_of((1,) * (seqs - 1) + (tokens - seqs + 1,), device), tokens, chunk_size)
    assert table.shape[0] == 5 + 3
    assert (table >= 0).all()


def test_many_sequences(device):
    """More sequences than one block of the kernel holds, empty ones among them."""
    lengths = tuple(int(n) for n in torch.randint(0, 4, (700,)))
    cu = cu_of(lengths, device)
    assert torch.equal(prepare_chunk_indices(cu, sum(lengths) + 9, 16),
                       prepare_chunk_indices_reference(cu, sum(lengths) + 9, 16))


@pytest.mark.parametrize("last", [2**31 - 1, 2**31 + 6, 2**32 + 6, 2**62])
def test_ends_beyond_32_bits_are_clamped(device, last):
    cu = torch.tensor([0, 5, last, -last], device=device)
    assert prepare_chunk_indices(cu, 40, 16).tolist() == [[0, 0], [1, 0], [1, 1], [1, 2], [-1, -1]]


@pytest.mark.parametrize("values", [(0, 12, 8, 16), (0, 40, 200, 16), (-5, -1, 9, 16), (16, 0, 0, 0)], ids=str)
def test_wrong_values_give_a_table_that_stays_inside(device, values):
    """Rows of a table from wrong values name sequences that exist and chunks inside [0, T)."""
    cu, tokens = torch.tensor(values, dtype=torch.int32, device=device), 16
    table = prepare_chunk_indices(cu, tokens, 16)
    assert ((table[:, 0] >= -1) & (table[:, 0] < len(values) - 1)).all()
    assert ((table[:, 1] >= -1) & (table[:, 1] * 16 < tokens)).all()


@pytest.mark.parametrize(("arguments", "error", "message"), [
    ({"chunk_size": 48}, ValueError, "chunk_size.*16, 32, 64.*48"),
    ({"max_tokens": -1}, ValueError, "max_tokens.*-1"),
    ({"max_tokens": 1.5}, (TypeError, ValueError), "max_tokens.*1.5"),
    ({"cu_seqlens": [0, 4]}, TypeError, "cu_seqlens.*list"),
    ({"cu_seqlens": torch.zeros(2, 2, dtype=torch.int32)}, ValueError, r"cu_seqlens.*\[2, 2\]"),
    ({"cu_seqlens": torch.zeros(3)}, (TypeError, ValueError), "cu_seqlens.*float32"),
    ({"cu_seqlens": torch.zeros(1, dtype=torch.int32)}, ValueError, "cu_seqlens.*1"),
], ids=str)
def test_wrong_arguments_of_the_chunk_table(device, arguments, error, message):
    good = {"cu_seqlens": cu_of((4,), device), "max_tokens": 8}
    with pytest.raises(error, match=message):
        prepare_chunk_indices(**{**good, **arguments})


@few
@given(lengths=ragged, slack=st.integers(0, 40), chunk_size=st.sampled_from([16, 32, 64]), reverse=st.booleans(),
       width=st.sampled_from([(1,), (3,), (2, 5)]),
       dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]))
def test_chunk_sums_equal_sums_in_float64(device, lengths, slack, chunk_size, reverse, width, dtype):
    cu, tokens = cu_of(tuple(lengths), device), sum(lengths) + slack
    g = torch.randn(1, tokens, *width, device=device).to(dtype)
    expected = chunk_local_cumsum_reference(g.double(), chunk_size, reverse, cu_seqlens=cu)
    g[:, sum(lengths):] = float("nan")
    sums = chunk_local_cumsum(g, chunk_size, reverse, cu_seqlens=cu)
    assert sums.dtype == torch.float32
    assert_close_rms("o", sums, expected, torch.float32)
    assert torch.count_nonzero(sums[:, sum(lengths):]) == 0


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("shape", [(3, 37, 2), (2, 16, 2, 5), (2, 1, 1), (2, 0, 3)], ids=str)
def test_chunk_sums_of_dense_input(device, shape, reverse):
    g = torch.randn(*shape, device=device)
    assert_close_rms("o", chunk_local_cumsum(g, 16, reverse), chunk_local_cumsum_reference(g.double(), 16, reverse),
                     torch.float32)


def test_chunk_sums_are_the_same_whichever_way_the_chunks_are_found(device):
    cu = cu_of((19, 0, 33), device)
    g = torch.randn(1, 60, 3, device=device)
    expected = chunk_local_cumsum(g, 16, cu_seqlens=cu)
    table = prepare_chunk_indices(cu, 60, 16)
    for options in ({"graph_capture": True}, {"graph_capture": False}, {"chunk_indices": table},
                    {"chunk_indices": prepare_chunk_indices(cu, 300, 16)},
                    {"chunk_indices": table[table[:, 0] >= 0], "graph_capture": False}):
        assert torch.equal(chunk_local_cumsum(g, 16, cu_seqlens=cu, **options), expected), options


@pytest.mark.parametrize(("arguments", "error", "message"), [
    ({"g": torch.zeros(1, 8)}, ValueError, r"g: .*\[1, 8\]"),
    ({"g": torch.zeros(1, 8, 2, dtype=torch.int32)}, (TypeError, ValueError), "g: .*int32"),
    ({"g": torch.zeros(2, 8, 2)}, ValueError, "g: .*2"),
    ({"chunk_size": 0}, ValueError, "chunk_size.*0"),
    ({"chunk_indices": torch.zeros(1, 3, dtype=torch.int32)}, ValueError, r"chunk_indices.*\[1, 3\]"),
    ({"chunk_indices": torch.zeros(1, 2, dtype=torch.int32)}, ValueError, "chunk_indices.*2.*1"),
    ({"cu_seqlens": None, "chunk_indices": torch.zeros(2, 2, dtype=torch.int32)}, ValueError,
     "chunk_indices.*cu_seqlens"),
    ({"graph_capture": 1.5}, TypeError, "graph_capture.*1.5"),
], ids=str)
def test_wrong_arguments_of_the_chunk_sums(device, arguments, error, message):
    good = {"g": torch.zeros(1, 8, 2), "cu_seqlens": cu_of((4, 3), torch.device("cpu"))}
    moved = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in {**good, **arguments}.items()}
    with pytest.raises(error, match=message):
        chunk_local_cumsum(**moved)
