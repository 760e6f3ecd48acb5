"""A long sequence in pieces that run side by side, and are joined to the bit.

Where few sequences leave cores idle, programs of their own begin with the later pieces of a sequence. Each starts from no state
some chunks earlier, without output, by when their decays have left nothing of the state that it lacks, and keeps what it has made
by the beginning of its piece (`assumed`). The program of the piece before keeps what it reaches there (`reached`). The launch
behind compares the two, bit for bit: where they are the same, so is all that follows from them, and where they are not, it
computes the piece again from the state that was reached. So decays only decide what is worth a try, and no result depends on a
split.
"""

import torch
import triton
import triton.language as tl

from graphlin.backends import LaunchRecord, get_backend
from graphlin.kernels.common import chunk_slot
from graphlin.kernels.launch import record_for
from graphlin.kernels.packing import Packing

# Pieces and their launch records, of one decay a head and of one a channel; what is tried first comes first.
SPLIT_RECORDS = {False: {4: "delta_recurrence_quarters", 2: "delta_recurrence_halves"},
                 True: {2: "delta_recurrence_channel_halves"}}
# log2 of what decays must leave of a state. Float32 sums round 2^-25 away, but a difference in the last bit of an operand that is
# rounded to bfloat16 comes back 2^-13 as large, until by chance none is left: of 192 states 10% still had one at -69, 1% at -83.
FORGOTTEN = tl.constexpr(-118.0)


@triton.jit
def _whole_bits(b_G):
    """Sums of decays in whole bits from the first chunk on, rounded up: the same in whatever order threads add."""
    return tl.cumsum(tl.ceil(tl.minimum(tl.maximum(b_G, FORGOTTEN), -FORGOTTEN)).to(tl.int32), 0)


@triton.jit
def piece_start(G, bos, i_n, NC, i_hv, i_piece, NS, HV: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
                PER_CHANNEL: tl.constexpr, PIECES: tl.constexpr, SEGMENT: tl.constexpr, LEAST: tl.constexpr):
    """The chunk that a piece of a sequence of NC chunks begins with, and how many chunks earlier it starts; NC, 0 where it is not
    worth a try: the sequence has fewer than LEAST chunks, or the SEGMENT chunks before are not enough to forget what was there.

    The first piece is longer than the others by what those are likely to start earlier.
    """
    EARLIER: tl.constexpr = SEGMENT * 3 // 4
    tl.static_assert(LEAST + (PIECES - 1) * EARLIER >= PIECES * SEGMENT)    # no chunk before the first is asked for
    cut = tl.where(NC < LEAST, NC, NC - (PIECES - i_piece) * ((NC - EARLIER) // PIECES))
    chunks = 0
    if cut < NC:
        o = tl.arange(0, SEGMENT)
        p = chunk_slot(bos, i_n, cut - 1 - o, BT, NS) * HV + i_hv
        if PER_CHANNEL:
            o_k = tl.arange(0, BK)
            left = tl.max(_whole_bits(tl.load(G + p[:, None] * K + o_k[None, :], mask=(o_k < K)[None, :], other=FORGOTTEN)), 1)
        else:
            left = _whole_bits(tl.load(G + p * BT + BT - 1))
        chunks = tl.min(tl.where(left <= FORGOTTEN, o + 1, SEGMENT + 1), 0)
        if chunks > SEGMENT:
            cut = NC
            chunks = 0
    return cut, chunks


@triton.jit
def next_piece(G, bos, i_n, NC, i_hv, i_piece, NS, HV: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
               PER_CHANNEL: tl.constexpr, PIECES: tl.constexpr, SEGMENT: tl.constexpr, LEAST: tl.constexpr):
    """The chunk that the first piece behind i_piece which is tried begins with, and which that is; NC, PIECES where there is
    none."""
    end = NC
    i_next = PIECES
    for i in tl.static_range(1, PIECES):
        cut, _ = piece_start(G, bos, i_n, NC, i_hv, PIECES - i, NS, HV, K, BT, BK, PER_CHANNEL, PIECES, SEGMENT, LEAST)
        is_next = (PIECES - i > i_piece) & (cut < NC)
        end = tl.where(is_next, cut, end)
        i_next = tl.where(is_next, PIECES - i, i_next)
    return end, i_next


@triton.jit
def same_bits(b_x, b_y):
    """Whether two tiles of float32 are equal, bit for bit."""
    differ = b_x.to(tl.int32, bitcast=True) != b_y.to(tl.int32, bitcast=True)
    return tl.max(tl.max(differ.to(tl.int32), 1), 0) == 0


def pieces_of(packing: Packing, heads: int, K: int, V: int, per_channel: bool, dtype: torch.dtype,
              device: torch.device) -> tuple[int, LaunchRecord | None]:
    """Into how many pieces to split sequences, and by which record: the most of which each one's program has a core to itself, if
    sequences may be long enough; 1, None if not."""
    cores = get_backend(device).num_cores(device)
    for pieces, name in SPLIT_RECORDS[per_channel].items():
        if pieces * packing.N * heads > cores:      # as in most calls, which are spared the look-up
            continue
        record = record_for(name, device, K=K, V=V, BT=packing.BT, dtype=dtype)
        least = record.tiles["LEAST"]
        if 0 < least * packing.BT <= packing.T and pieces * packing.N * heads * -(-V // record.tiles["BV"]) <= cores:
            return pieces, record
    return 1, None
