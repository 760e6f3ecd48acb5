"""What each rank is told about its part of a batch, against a count token by token."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphlin.ops.chunks import prepare_chunk_indices
from graphlin.parallel.context import ContextParallel
from graphlin.parallel.split import split
from tests.inputs import cu_of
from tests.parallel.layouts import THREE, TWO, Layout

LENGTHS = st.lists(st.integers(0, 6), min_size=1, max_size=6).map(tuple)


def split_of(layout: Layout, rank: int, device: torch.device) -> ContextParallel:
    offsets = torch.tensor(layout.offsets, dtype=torch.int32, device=device)
    return split(ContextParallel, None, rank, cu_of(layout.lengths, device), offsets)


def check_split(layout: Layout, rank: int, device: torch.device) -> None:
    cp = split_of(layout, rank, device)
    owners = [[layout.rank_of(token) for token in range(first, last)] for first, last in spans(layout)]
    lengths = torch.tensor([sum(owner == rank for owner in each) for each in owners])
    assert torch.equal(cp.cu_seqlens.cpu().diff(), lengths) and cp.cu_seqlens[0] == 0
    starts, ends = layout.starts(), layout.ends()
    assert cp.starts_here.tolist() == [each == rank for each in starts]
    assert cp.ends_here.tolist() == [each == rank for each in ends]
    comes_in = [n for n in range(len(owners)) if owners[n] and starts[n] < rank <= ends[n]]
    goes_out = [n for n in range(len(owners)) if owners[n] and starts[n] <= rank < ends[n]]
    N = len(layout.lengths)
    assert cp.edges.tolist() == [*(comes_in or [N]), *(goes_out or [N])]
    assert int(cp.earlier) == sum(rank - starts[n] for n in comes_in)
    assert int(cp.later) == sum(ends[n] - rank for n in goes_out)
    assert cp.earlier.dtype == cp.later.dtype == torch.int32
    assert cp.came_in.nonzero().flatten().tolist() == comes_in and cp.goes_out.nonzero().flatten().tolist() == goes_out


def spans(layout: Layout) -> list[tuple[int, int]]:
    cu = cu_of(layout.lengths, torch.device("cpu")).tolist()
    return list(zip(cu, cu[1:], strict=False))


@pytest.mark.parametrize("layout", [*TWO, *THREE], ids=str)
def test_parts_of_the_layouts(layout, device):
    for rank in range(layout.world):
        check_split(layout, rank, device)


@settings(max_examples=150, deadline=None)
@given(lengths=LENGTHS, data=st.data())
def test_parts_of_any_batch(device, lengths, data):
    cuts = tuple(sorted(data.draw(st.lists(st.integers(0, sum(lengths)), max_size=4))))
    for rank in range(len(cuts) + 1):
        check_split(Layout("", lengths, cuts), rank, device)


def test_tokens_past_the_last_sequence_belong_to_none(device):
    cu, offsets = torch.tensor([0, 5, 12], device=device), torch.tensor([0, 8, 30], device=device)
    cp = split(ContextParallel, None, 1, cu, offsets)
    assert cp.cu_seqlens.tolist() == [0, 0, 4] and cp.edges.tolist() == [1, 2]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_context_keeps_its_batch_when_the_caller_writes_the_next_one(dtype, device):
    cu, offsets = (torch.tensor(values, dtype=dtype, device=device) for values in ([0, 5, 12], [0, 8, 12]))
    cp = split(ContextParallel, None, 1, cu, offsets)
    cu.zero_(), offsets.zero_()
    assert cp.cu_seqlens.tolist() == [0, 0, 4] and cp.offsets.tolist() == [0, 8, 12]
    assert cp.first_token.tolist() == [0, 5, 0]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_sequences_keep_their_dtype(dtype, device):
    cp = split(ContextParallel, None, 0, cu_of((5, 7), device, dtype), torch.tensor([0, 8, 12], device=device))
    assert cp.cu_seqlens.dtype == dtype


def test_chunk_table_is_built_once_for_all_layers(device):
    cp = split_of(TWO[0], 1, device)
    table = cp.chunk_indices(20, 16)
    assert torch.equal(table, prepare_chunk_indices(cp.cu_seqlens, 20, 16))
    assert cp.chunk_indices(20, 16) is table and cp.chunk_indices(24, 16) is not table
