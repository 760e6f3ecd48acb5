"""What a backward reads besides the inputs must be what its forward read."""

import pytest

from graphlin.ops.chunks import prepare_chunk_indices
from tests.inputs import cu_of
from tests.ops.op_cases import each_op

TOKENS = 24


@each_op
@pytest.mark.parametrize("written", ["cu_seqlens", "chunk_indices"])
def test_lengths_written_before_the_backward_are_noticed(case, device, written):
    """One buffer of lengths that serves two micro-batches would otherwise give the first one the second one's gradients."""
    cu = cu_of((10, 14), device)
    packing = {"cu_seqlens": cu, "chunk_indices": prepare_chunk_indices(cu, TOKENS, 16)}
    leaves = {name: x.requires_grad_() for name, x in case.draw(TOKENS, 2, device).items() if name not in ("do", "dht")}
    out = case.op(**leaves, **{**case.options, "chunk_size": 16}, **packing)[0]
    packing[written].copy_(packing[written].clone())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
