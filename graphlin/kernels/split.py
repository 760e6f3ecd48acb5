"""A long sequence in two halves that run side by side, and are joined to the bit.

Where few sequences leave cores idle, a program of its own begins with the second half of a sequence. It starts from no state some
chunks earlier, without output, by when their decays have left nothing of the state that it lacks, and keeps what it has made by
the beginning of its half (`assumed`). The program of the first half keeps what it reaches there (`reached`). The launch behind
compares the two, bit for bit: where they are the same, so is all that follows from them, and where they are not, it computes the
second half again from the state that was reached. So decays only decide what is worth a try, and no result depends on a split.
"""

import torch
import triton
import triton.language as tl

from graphlin.backends import LaunchRecord, get_backend
from graphlin.kernels.common import chunk_slot
from graphlin.kernels.packing import Packing

# SPLIT of the recurrence; 0: a sequence is one program's.
HALVES = tl.constexpr(1)
JOIN = tl.constexpr(2)
FORGOTTEN = tl.constexpr(-69.0)     # log2 of what decays leave of a state: 1.7e-21, which float32 sums round away


@triton.jit
def second_half(G, bos, i_n, NC, i_hv, NS, HV: tl.constexpr, BT: tl.constexpr, SEGMENT: tl.constexpr):
    """The chunk that the second half of a sequence of NC chunks begins with, and how many chunks earlier it starts; NC, 0 where
    it is not worth a try: the first half has at least SEGMENT chunks, and no more than those before the second must be enough
    to forget what was there.

    The sum is of whole numbers, so that all who ask get the same answer, in whatever order their threads add.
    """
    cut = tl.maximum((NC + 1) // 2 + SEGMENT // 4, SEGMENT)
    cut = tl.minimum(cut, NC)
    chunks = 0
    if cut < NC:
        o = tl.arange(0, SEGMENT)
        b_G = tl.load(G + (chunk_slot(bos, i_n, cut - 1 - o, BT, NS) * HV + i_hv) * BT + BT - 1)
        left = tl.cumsum(tl.ceil(tl.minimum(tl.maximum(b_G, FORGOTTEN), -FORGOTTEN)).to(tl.int32), 0)
        chunks = tl.min(tl.where(left <= FORGOTTEN, o + 1, SEGMENT + 1), 0)
        if chunks > SEGMENT:
            cut = NC
            chunks = 0
    return cut, chunks


@triton.jit
def same_bits(b_x, b_y):
    """Whether two tiles of float32 are equal, bit for bit."""
    differ = b_x.to(tl.int32, bitcast=True) != b_y.to(tl.int32, bitcast=True)
    return tl.max(tl.max(differ.to(tl.int32), 1), 0) == 0


def worth_splitting(packing: Packing, programs: int, record: LaunchRecord, device: torch.device) -> bool:
    """Whether sequences may be long enough to have two halves, and each half's program has a core to itself."""
    least = record.tiles["SEGMENT"]
    return 0 < least * packing.BT < packing.T and 2 * programs <= get_backend(device).num_cores(device)
