"""Sums over chunks in a fixed order: gradients of parameters that every token shares.

Kernels leave one float32 row of partial sums for each row of the chunk table. Block after block of BR rows is added
to a tile, row to row, and the tile is summed at the end: an order that knows neither how many chunks a tier allows nor
what lies in the rows of unused ones, which are never read.
"""

import torch
import triton
import triton.language as tl

from graphlin.kernels.launch import launch, record_for
from graphlin.kernels.packing import Packing


@triton.jit
def _used_chunks(chunks, NT, GRAPH_CAPTURE: tl.constexpr):
    """Rows of the chunk table before its sentinels."""
    count = NT
    if GRAPH_CAPTURE:
        count = 0
        for i in range(0, NT, 256):
            o_c = i + tl.arange(0, 256)
            count += tl.sum((tl.load(chunks + o_c * 2, mask=o_c < NT, other=-1) >= 0).to(tl.int32), 0)
    return count


@triton.jit(do_not_specialize=["NT"])
def sum_chunks(partials, first, second, chunks, NT, s_row, s_column, R: tl.constexpr, RF: tl.constexpr, X: tl.constexpr,
               BR: tl.constexpr, BX: tl.constexpr, GRAPH_CAPTURE: tl.constexpr):
    """One program for BX columns of one of the R rows of partials [NT, R, X]; rows below RF go to `first`."""
    NX: tl.constexpr = (X + BX - 1) // BX
    i_r = tl.program_id(0) // NX
    o_x = tl.program_id(0) % NX * BX + tl.arange(0, BX)
    o_c = tl.arange(0, BR)
    m_x = o_x < X
    count = _used_chunks(chunks, NT, GRAPH_CAPTURE)
    b_sum = tl.zeros([BR, BX], dtype=tl.float32)
    for i_c in range(0, count, BR):
        p = partials + tl.cast(i_c, tl.int64) * (R * X) + i_r * X
        m = (i_c + o_c < count)[:, None] & m_x[None, :]
        b_sum += tl.load(p + o_c[:, None] * (R * X) + o_x[None, :], mask=m, other=0.)            # [BR, BX]
    b_sum = tl.sum(b_sum, 0)
    if i_r < RF:
        tl.store(first + i_r * s_row + o_x * s_column, b_sum.to(first.dtype.element_ty), mask=m_x)
    elif RF < R:
        tl.store(second + o_x, b_sum.to(second.dtype.element_ty), mask=m_x)


def reduce_partials_into(partials: torch.Tensor, packing: Packing, first: torch.Tensor,
                         second: torch.Tensor | None = None) -> None:
    """Sums float32 partials `[NT, R, X]` over chunks into `first` `[RF, X]` and, if R is RF + 1, `second` `[X]`.

    Row i of the partials belongs to row i of the chunk table, or to the i-th chunk of dense input; rows of sentinels
    may hold anything. `first` may have any strides, both any float dtype.
    """
    _, R, X = partials.shape
    record = record_for("sum_chunks", partials.device, V=X)
    launch(sum_chunks, R * -(-X // record.tiles["BX"]), partials, first, second, packing.chunks, packing.NT,
           *first.stride(), record=record, R=R, RF=first.shape[0], X=X, GRAPH_CAPTURE=packing.capture)


def reduce_partials(partials: torch.Tensor, packing: Packing) -> torch.Tensor:
    """The float32 sum `[X]` of partials `[NT, X]` over their chunks, as `reduce_partials_into`."""
    out = partials.new_empty(partials.shape[1])
    reduce_partials_into(partials[:, None], packing, out[None])
    return out
