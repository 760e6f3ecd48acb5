"""Device functions that every kernel shares: where a chunk lies, row masks, zeros for inactive rows."""

import triton
import triton.language as tl

LAST_PROGRAMS = tl.constexpr(512)


@triton.jit
def sequence(cu, i_n, T, VARLEN: tl.constexpr):
    """First row (int64) and length (int32) of sequence `i_n`.

    Packed: read from `cu` and clamped into [0, T], so that wrong values never lead outside the tensors. Dense: T rows each.
    """
    if VARLEN:
        bos = tl.minimum(tl.maximum(tl.load(cu + i_n).to(tl.int64), 0), T)
        eos = tl.minimum(tl.load(cu + i_n + 1).to(tl.int64), T)
        n = tl.maximum(eos - bos, 0).to(tl.int32)
    else:
        bos = tl.cast(i_n, tl.int64) * T
        n = T
    return bos, n


@triton.jit
def chunk(chunks, i_c, NTS, VARLEN: tl.constexpr):
    """Sequence and chunk-in-sequence of chunk `i_c`: a row of the table, or by arithmetic (NTS chunks a dense sequence).
    The clamp keeps rows of a table made of anything else from leading before the sequence, or past 32 bits."""
    if VARLEN:
        i_n = tl.load(chunks + i_c * 2).to(tl.int32)
        i_t = tl.minimum(tl.maximum(tl.load(chunks + i_c * 2 + 1).to(tl.int32), 0), 1 << 24)
    else:
        i_n = i_c // NTS
        i_t = i_c % NTS
    return i_n, i_t


@triton.jit
def active_rows(cu, N, T):
    """Rows below `cu_seqlens[-1]` (int64), clamped into [0, T]."""
    return tl.minimum(tl.maximum(tl.load(cu + N).to(tl.int64), 0), T)


@triton.jit
def chunk_count(cu, N, T, NT, BT: tl.constexpr, GRAPH_CAPTURE: tl.constexpr):
    """Bound on the chunks to visit. A static table is sized for the whole tier; this follows the work that is there:
    each sequence has at most one chunk that is not full."""
    bound = NT
    if GRAPH_CAPTURE:
        bound = tl.minimum(NT, N + (active_rows(cu, N, T) // BT).to(tl.int32))
    return bound


@triton.jit
def chunk_slot(bos, i_n, i_t, BT: tl.constexpr, NS):
    """Workspace slot (int64) of a chunk, from its place in the pack alone: injective over chunks, below `T // BT + N`.
    The clamp keeps a table that does not belong to this `cu_seqlens` inside the workspace."""
    return tl.minimum(bos // BT + i_n + i_t, NS - 1)


@triton.jit
def row_mask(m_r, o_x, X: tl.constexpr, BX: tl.constexpr):
    """[rows, BX] mask; no column term where whole tiles cover X."""
    m = m_r[:, None]
    if X % BX != 0:
        m = m & (o_x < X)[None, :]
    return m


@triton.jit
def zero_rows(p_x, first, T, X: tl.constexpr, BLOCK: tl.constexpr, LAST: tl.constexpr = 0):
    """Writes exact zeros to rows [first, T) of a contiguous [T, X] tensor, shared among all programs of the launch; with LAST,
    among the last LAST of them, and no other may call it."""
    count = (T - first) * X
    blocks = ((count + BLOCK - 1) // BLOCK).to(tl.int32)
    i_p = tl.program_id(0)
    programs = tl.num_programs(0)
    if LAST > 0:
        programs = tl.minimum(programs, LAST)
        i_p -= tl.num_programs(0) - programs
    for i in range(i_p, blocks, programs):
        o = tl.cast(i, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        # evicted first: the caches are for what the other programs work on
        tl.store(p_x + first * X + o, tl.zeros([BLOCK], dtype=p_x.dtype.element_ty), mask=o < count, cache_modifier=".cs")


@triton.jit
def zero_inactive_rows(p_x, cu, N, T, X: tl.constexpr, BLOCK: tl.constexpr):
    """`zero_rows` from the first inactive row on, by LAST_PROGRAMS alone: of the others many run one after the other on a core,
    and each would wait at its end to be told that row."""
    if tl.program_id(0) >= tl.num_programs(0) - LAST_PROGRAMS:
        zero_rows(p_x, active_rows(cu, N, T), T, X, BLOCK, LAST_PROGRAMS)


@triton.jit
def keep(x, COPY_LHS: tl.constexpr):
    """A copy of a left dot operand that is used again; needed on Ascend only."""
    if COPY_LHS:
        x = x + 0.0
    return x


@triton.jit
def chunk_cumsum(b_g, REVERSE: tl.constexpr):
    """Inclusive cumulative sum over the rows of one chunk."""
    return tl.cumsum(b_g, 0, reverse=REVERSE)
