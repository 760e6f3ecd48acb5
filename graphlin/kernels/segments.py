"""Where a long sequence is split, so that its segments run side by side.

Of the state that enters a chunk at most `2^c` is left at its end, with
    c = G_C + Σ_i log2 max(1, |1 − β_i|),
the chunk's decay and the norms of its rows' `I − β k kᵀ`, |k| being at most 1. Where the c of the last few chunks sum to -64
nats, nothing is left of the state before them: it is 1.6e-28 of what it was, and a float32 sum rounds it away. So a segment that
begins there starts from no state those few chunks earlier, without output, and needs nothing of the segments before. Where more
is left, the program of the segment before goes on with its own state. All of it follows from the sequence alone. A NaN is
forgotten with the state that it was written to.
"""

import triton
import triton.language as tl

from graphlin.backends import LaunchRecord
from graphlin.kernels.common import chunk_slot
from graphlin.kernels.packing import Packing

FORGOTTEN = tl.constexpr(-92.33248261893)      # log2 of e^-64


@triton.jit
def segment_chunks(NC, SEGMENTS: tl.constexpr, SEGMENT: tl.constexpr):
    """Chunks of a segment of a sequence of NC chunks: at least SEGMENT, and so many that there are no more than SEGMENTS. The
    last one has fewer, for the chunks before it that it starts with."""
    return tl.maximum((NC + SEGMENTS - 1) // SEGMENTS + SEGMENT // 4, SEGMENT)


@triton.jit
def later_segment(cu, i, N, T, BT: tl.constexpr, SEGMENTS: tl.constexpr, SEGMENT: tl.constexpr, VARLEN: tl.constexpr):
    """The i-th place where a segment other than its sequence's first may begin: sequence and chunk, sequence -1 for none.

    Packed: the rows after the first SEGMENT chunks of the pack in runs of as many, in each of which one begins at most.
    """
    if VARLEN:
        first = tl.cast(i + 1, tl.int64) * (SEGMENT * BT)
        i_n = -1
        i_t = 0
        for i_b in range(0, N, 64):
            o_n = i_b + tl.arange(0, 64)
            bos = tl.minimum(tl.maximum(tl.load(cu + o_n, mask=o_n < N, other=0).to(tl.int64), 0), T)
            eos = tl.minimum(tl.load(cu + o_n + 1, mask=o_n < N, other=0).to(tl.int64), T)
            rows = segment_chunks((tl.maximum(eos - bos, 0) + BT - 1) // BT, SEGMENTS, SEGMENT) * BT
            j = (tl.maximum(first - bos, 1) + rows - 1) // rows
            begin = bos + j * rows
            here = (begin < first + SEGMENT * BT) & (begin < eos)
            i_n = tl.maximum(i_n, tl.max(tl.where(here, o_n, -1), 0))
            i_t = tl.maximum(i_t, tl.max(tl.where(here, j * rows // BT, 0), 0).to(tl.int32))
    else:
        NC = (T + BT - 1) // BT
        chunks = segment_chunks(NC, SEGMENTS, SEGMENT)
        later = tl.maximum((NC - 1) // chunks, 1)
        i_n = i // later
        i_t = (i % later + 1) * chunks
    return i_n, i_t


@triton.jit
def chunks_to_forget(G, b, bos, i_n, i_t, i_hv, NS, HV: tl.constexpr, BT: tl.constexpr, SEGMENT: tl.constexpr):
    """How many chunks before chunk i_t, of which there are at least SEGMENT, leave nothing of an earlier state; more than SEGMENT
    where those leave something, or hold a NaN."""
    o = tl.arange(0, SEGMENT)
    p = (chunk_slot(bos, i_n, i_t - 1 - o, BT, NS) * HV + i_hv) * BT
    b_x = tl.abs(1.0 - tl.load(b + p[:, None] + tl.arange(0, BT)[None, :]))                              # [SEGMENT, BT]
    b_left = tl.load(G + p + BT - 1) + tl.sum(tl.where(b_x <= 1.0, 0.0, tl.log2(b_x)), 1)
    return tl.min(tl.where(tl.cumsum(b_left, 0) <= FORGOTTEN, o + 1, SEGMENT + 1), 0)


@triton.jit
def segment_end(G, b, bos, i_n, i_t, NC, i_hv, NS, HV: tl.constexpr, BT: tl.constexpr, SEGMENTS: tl.constexpr,
                SEGMENT: tl.constexpr):
    """The chunk before which the state of the segment that begins with chunk i_t is not needed any more, or NC."""
    chunks = segment_chunks(NC, SEGMENTS, SEGMENT)
    end = NC
    for j in range(1, SEGMENTS):
        begin = i_t + j * chunks
        if begin < end:
            if chunks_to_forget(G, b, bos, i_n, begin, i_hv, NS, HV, BT, SEGMENT) <= SEGMENT:
                end = begin
    return end


def later_segments(packing: Packing, record: LaunchRecord) -> int:
    """How many places there are for `later_segment`."""
    segments, least = record.tiles["SEGMENTS"], record.tiles["SEGMENT"]
    if segments == 1:
        return 0
    if packing.varlen:
        return (packing.T - 1) // (least * packing.BT)
    return packing.N * ((packing.NTS - 1) // max(-(-packing.NTS // segments) + least // 4, least))
