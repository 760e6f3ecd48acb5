"""Short causal convolution, forward: with bias, silu, residual and states.

With `p` a token's position in its sequence of n tokens, `x_p` the initial state's slot `W + p` where p < 0 (or 0):
    z_p = bias + Σ_j weight[W-1-j] x_(p-j),   y = act(z) + residual,   final[w] = x_(n-W+w)
`conv_backward` has the gradients. A product that is added to something is a `tl.fma`: else the compiler chooses by tile
shape which ones to fuse, and the last bit of a result follows.
"""

import torch
import triton
import triton.language as tl

from graphlin.kernels.activations import sigmoid
from graphlin.kernels.common import active_rows, chunk, chunk_count, row_mask, sequence, zero_rows
from graphlin.kernels.launch import grid_stride, launch, record_for
from graphlin.kernels.packing import Packing

MAX_WIDTH = 8
ZERO_BLOCK = tl.constexpr(1024)


# ------------------------------------------------------------------------------------------------ shared pieces
@triton.jit
def load_columns(weight, o_d, D: tl.constexpr, W: tl.constexpr, BW: tl.constexpr):
    """[BD, BW] float32 rows of a `[D, W]` tensor, in one wide load."""
    o_w = tl.arange(0, BW)
    m = row_mask(o_d < D, o_w, W, BW)
    return tl.load(weight + o_d[:, None] * W + o_w[None, :], mask=m, other=0.).to(tl.float32)


@triton.jit
def tap(b_w, j, W: tl.constexpr, BW: tl.constexpr):
    """[BD] weights of the rows j before; 0 for a tap that is not there."""
    return tl.sum(tl.where((tl.arange(0, BW) == W - 1 - j)[None, :], b_w, 0.0), 1)


@triton.jit
def load_bias(bias, o_d, D: tl.constexpr, BD: tl.constexpr, BIAS: tl.constexpr):
    """[BD] float32 bias, 0 without one."""
    if BIAS:
        b_b = tl.load(bias + o_d, mask=o_d < D, other=0.).to(tl.float32)
    else:
        b_b = tl.zeros([BD], dtype=tl.float32)
    return b_b


@triton.jit
def load_slots(state, i_n, o_s, o_d, D: tl.constexpr, W: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr, BW: tl.constexpr,
               ROWWISE: tl.constexpr):
    """[BR, BD] float32: slot o_s of a `[N, D, W]` state for each row, 0 for rows that have none.

    ROWWISE loads all slots as they lie, and each row picks its own; for devices that move whole rows.
    """
    p = state + tl.cast(i_n, tl.int64) * (D * W)
    if ROWWISE:
        b_w = load_columns(p, o_d, D, W, BW)
        b_h = tl.zeros([BR, BD], dtype=tl.float32)
        for i_s in range(0, W):
            b_h += tl.where((o_s == i_s)[:, None], tap(b_w, W - 1 - i_s, W, BW)[None, :], 0.0)
    else:
        m = row_mask((o_s >= 0) & (o_s < W), o_d, D, BD)
        b_h = tl.load(p + o_d[None, :] * W + o_s[:, None], mask=m, other=0.).to(tl.float32)
    return b_h


@triton.jit
def range_mask(o_r, low, high, ROWWISE: tl.constexpr):
    """Which offsets lie in [low, high). ROWWISE says so in the one form that triton-ascend 3.2 sees as a range without
    reading memory that it has freed."""
    if ROWWISE:
        o = (0 - low) + o_r
        m = (o >= 0) & (o < high - low)
    else:
        m = (o_r >= low) & (o_r < high)
    return m


@triton.jit
def strand_mask(first, n, o_r, L: tl.constexpr, ROWWISE: tl.constexpr):
    """Which of the rows `first + o_r * L` lie in [0, n)."""
    if ROWWISE:
        low = (tl.maximum(-first, 0) + L - 1) // L
        high = (tl.maximum(n - first, 0) + L - 1) // L
        m = range_mask(o_r, low, high, ROWWISE)
    else:
        m = range_mask(first + o_r * L, 0, n, ROWWISE)
    return m


@triton.jit
def load_back(x, initial_state, p, i_n, first, back: tl.constexpr, n, o_r, o_x, o_d, D: tl.constexpr, W: tl.constexpr,
              BR: tl.constexpr, BD: tl.constexpr, BW: tl.constexpr, L: tl.constexpr, INITIAL: tl.constexpr,
              ROWWISE: tl.constexpr):
    """float32 rows `back` before each strand's first, of the initial state before the sequence; 0 without one, or if no tap
    reaches that far."""
    if back < W:
        m = row_mask(strand_mask(first - back, n, o_r, L, ROWWISE), o_d, D, BD)
        b_x = tl.load(x + (p + tl.cast(first - back, tl.int64) * D) + o_x, mask=m, other=0.).to(tl.float32)
        if INITIAL:
            if first < back:
                b_x += load_slots(initial_state, i_n, (first - back + W) + o_r * L, o_d, D, W, BR, BD, BW, ROWWISE)
    else:
        b_x = tl.zeros([BR, BD], dtype=tl.float32)
    return b_x


@triton.jit
def weigh(W: tl.constexpr, b_s, w_0, w_1, w_2, w_3, w_4, w_5, w_6, w_7, b_0, b_1, b_2, b_3, b_4, b_5, b_6, b_7):
    """b_s and the weighted sum of the first W of eight rows."""
    b_s = tl.fma(w_0[None, :], b_0, b_s)
    if W > 1:
        b_s = tl.fma(w_1[None, :], b_1, b_s)
    if W > 2:
        b_s = tl.fma(w_2[None, :], b_2, b_s)
    if W > 3:
        b_s = tl.fma(w_3[None, :], b_3, b_s)
    if W > 4:
        b_s = tl.fma(w_4[None, :], b_4, b_s)
    if W > 5:
        b_s = tl.fma(w_5[None, :], b_5, b_s)
    if W > 6:
        b_s = tl.fma(w_6[None, :], b_6, b_s)
    if W > 7:
        b_s = tl.fma(w_7[None, :], b_7, b_s)
    return b_s


@triton.jit
def walk_mask(i_r, k: tl.constexpr, first, n, o_r, L: tl.constexpr, R: tl.constexpr, ROWWISE: tl.constexpr):
    """Which strands of L rows have the row k after `i_r` of the first one, as far down as that, among their first R rows and in
    the sequence; i_r >= first. k alone changes in an unrolled loop, so that each comparison is one instruction."""
    if ROWWISE:
        i = i_r + k
        m = strand_mask(i, tl.where((i >= first) & (i < first + R), n, 0), o_r, L, ROWWISE)
    else:
        m = tl.minimum(n - first - o_r * L, R) - (i_r - first) > k
        if k < 0:
            m = tl.where(i_r + k >= first, m, False)
    return m


@triton.jit
def widen(b_x, ROWWISE: tl.constexpr):
    """float32 of a row. A bfloat16 is the upper half of a float32: on NVIDIA a shift is one instruction, Triton's conversion up
    to two. Ascend cannot shift such rows."""
    if ROWWISE:
        b_x = b_x.to(tl.float32)
    elif b_x.dtype == tl.bfloat16:
        b_x = (b_x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        b_x = b_x.to(tl.float32)
    return b_x


@triton.jit
def load_row(x, p, i_r, k: tl.constexpr, first, n, o_r, o_x, o_d, D: tl.constexpr, BD: tl.constexpr, L: tl.constexpr,
             R: tl.constexpr, ROWWISE: tl.constexpr):
    """The row k after `i_r` of each strand, as stored; 0 behind the strand's first R rows or the sequence."""
    m = row_mask(walk_mask(i_r, k, first, n, o_r, L, R, ROWWISE), o_d, D, BD)
    return tl.load(x + (p + tl.cast(i_r, tl.int64) * D + k * D) + o_x, mask=m, other=0.)             # [BR, BD]


@triton.jit
def store_row(y, b_y, p, i_r, k: tl.constexpr, first, n, o_r, o_x, o_d, D: tl.constexpr, BD: tl.constexpr, L: tl.constexpr,
              ROWWISE: tl.constexpr):
    """The row k after `i_r` of each strand that has it for its own."""
    m = row_mask(walk_mask(i_r, k, first, n, o_r, L, L, ROWWISE), o_d, D, BD)
    tl.store(y + (p + tl.cast(i_r, tl.int64) * D + k * D) + o_x, b_y.to(y.dtype.element_ty), mask=m)


# ------------------------------------------------------------------------------------------------ forward
@triton.jit
def _convolve_chunk(x, weight, bias, residual, initial_state, y, i_n, i_t, i_d, cu, T, D: tl.constexpr, W: tl.constexpr,
                    BT: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr, BW: tl.constexpr, UNROLL: tl.constexpr,
                    SILU: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, INITIAL: tl.constexpr,
                    VARLEN: tl.constexpr, ROWWISE: tl.constexpr):
    """BR strands of L consecutive rows, a row of each at a time. Three rows (a, b, c) are on their way while one is worked on.

    Eight rows have names since Triton has no arrays of tiles; the compiler drops those beyond W.
    """
    tl.static_assert(BT % BR == 0)
    L: tl.constexpr = BT // BR
    U: tl.constexpr = UNROLL if L % UNROLL == 0 else 1      # rows a turn; a strand is a whole number of turns
    bos, n = sequence(cu, i_n, T, VARLEN)
    first = i_t * BT
    p = bos * D
    o_d = i_d * BD + tl.arange(0, BD)
    o_r = tl.arange(0, BR)
    o_x = o_r[:, None] * (L * D) + o_d[None, :]
    x_a = load_row(x, p, first, 0, first, n, o_r, o_x, o_d, D, BD, L, L, ROWWISE)
    x_b = load_row(x, p, first, 1, first, n, o_r, o_x, o_d, D, BD, L, L, ROWWISE)
    x_c = load_row(x, p, first, 2, first, n, o_r, o_x, o_d, D, BD, L, L, ROWWISE)
    if RESIDUAL:
        r_a = load_row(residual, p, first, 0, first, n, o_r, o_x, o_d, D, BD, L, L, ROWWISE)
        r_b = load_row(residual, p, first, 1, first, n, o_r, o_x, o_d, D, BD, L, L, ROWWISE)
        r_c = load_row(residual, p, first, 2, first, n, o_r, o_x, o_d, D, BD, L, L, ROWWISE)
    x_1 = load_back(x, initial_state, p, i_n, first, 1, n, o_r, o_x, o_d, D, W, BR, BD, BW, L, INITIAL, ROWWISE)
    x_2 = load_back(x, initial_state, p, i_n, first, 2, n, o_r, o_x, o_d, D, W, BR, BD, BW, L, INITIAL, ROWWISE)
    x_3 = load_back(x, initial_state, p, i_n, first, 3, n, o_r, o_x, o_d, D, W, BR, BD, BW, L, INITIAL, ROWWISE)
    x_4 = load_back(x, initial_state, p, i_n, first, 4, n, o_r, o_x, o_d, D, W, BR, BD, BW, L, INITIAL, ROWWISE)
    x_5 = load_back(x, initial_state, p, i_n, first, 5, n, o_r, o_x, o_d, D, W, BR, BD, BW, L, INITIAL, ROWWISE)
    x_6 = load_back(x, initial_state, p, i_n, first, 6, n, o_r, o_x, o_d, D, W, BR, BD, BW, L, INITIAL, ROWWISE)
    x_7 = load_back(x, initial_state, p, i_n, first, 7, n, o_r, o_x, o_d, D, W, BR, BD, BW, L, INITIAL, ROWWISE)
    b_w = load_columns(weight, o_d, D, W, BW)
    b_b = load_bias(bias, o_d, D, BD, BIAS)[None, :] + tl.zeros([BR, BD], dtype=tl.float32)
    w_0 = tap(b_w, 0, W, BW)
    w_1 = tap(b_w, 1, W, BW)
    w_2 = tap(b_w, 2, W, BW)
    w_3 = tap(b_w, 3, W, BW)
    w_4 = tap(b_w, 4, W, BW)
    w_5 = tap(b_w, 5, W, BW)
    w_6 = tap(b_w, 6, W, BW)
    w_7 = tap(b_w, 7, W, BW)
    for i_s in range(first, first + tl.minimum(L, n - first), U):
        for k in tl.static_range(U):
            x_0 = widen(x_a, ROWWISE)
            x_a, x_b, x_c = x_b, x_c, load_row(x, p, i_s, k + 3, first, n, o_r, o_x, o_d, D, BD, L, L, ROWWISE)
            if RESIDUAL:
                b_y = widen(r_a, ROWWISE)
                r_a, r_b, r_c = r_b, r_c, load_row(residual, p, i_s, k + 3, first, n, o_r, o_x, o_d, D, BD, L, L, ROWWISE)
            else:
                b_y = tl.zeros([BR, BD], dtype=tl.float32)
            b_z = weigh(W, b_b, w_0, w_1, w_2, w_3, w_4, w_5, w_6, w_7, x_0, x_1, x_2, x_3, x_4, x_5, x_6, x_7)
            if SILU:
                b_y = tl.fma(b_z, sigmoid(b_z), b_y)
            else:
                b_y += b_z
            store_row(y, b_y, p, i_s, k, first, n, o_r, o_x, o_d, D, BD, L, ROWWISE)
            x_7, x_6, x_5, x_4, x_3, x_2, x_1 = x_6, x_5, x_4, x_3, x_2, x_1, x_0


@triton.jit
def _store_final_state(x, initial_state, final_state, i_n, i_d, cu, T, D: tl.constexpr, W: tl.constexpr,
                       BD: tl.constexpr, BW: tl.constexpr, INITIAL: tl.constexpr, VARLEN: tl.constexpr):
    """The last W rows of one sequence; where it is shorter, the newest slots of its initial state before them."""
    bos, n = sequence(cu, i_n, T, VARLEN)
    o_d = i_d * BD + tl.arange(0, BD)
    o_w = tl.arange(0, BW)
    m_d = o_d < D
    p_h = tl.cast(i_n, tl.int64) * (D * W)
    o_p = (n - W) + o_w
    m = m_d[:, None] & ((o_p >= 0) & (o_w < W))[None, :]
    p_x = x + (bos + n - W) * D + o_w[None, :] * D + o_d[:, None]
    b_h = tl.load(p_x, mask=m, other=0.).to(tl.float32)                                         # [BD, BW]
    o_h = o_d[:, None] * W + o_w[None, :]
    if INITIAL:
        m = m_d[:, None] & (n + o_w < W)[None, :]
        b_h += tl.load(initial_state + (p_h + n) + o_h, mask=m, other=0.).to(tl.float32)
    m = m_d[:, None] & (o_w < W)[None, :]
    tl.store(final_state + p_h + o_h, b_h.to(final_state.dtype.element_ty), mask=m)


@triton.jit(do_not_specialize=["N", "T", "NT", "NTS"])
def conv_forward(x, weight, bias, residual, initial_state, y, final_state, cu, chunks, N, T, NT, NTS,
                 D: tl.constexpr, W: tl.constexpr, BT: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr,
                 BW: tl.constexpr, UNROLL: tl.constexpr, SILU: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
                 INITIAL: tl.constexpr, STORE_FINAL: tl.constexpr, VARLEN: tl.constexpr, GRAPH_CAPTURE: tl.constexpr,
                 ROWWISE: tl.constexpr):
    """Tasks (chunk, D tile) for y, then (sequence, D tile) for the final state, grid-stride."""
    ND: tl.constexpr = (D + BD - 1) // BD
    for i_task in range(tl.program_id(0), chunk_count(cu, N, T, NT, BT, GRAPH_CAPTURE) * ND, tl.num_programs(0)):
        i_n, i_t = chunk(chunks, i_task // ND, NTS, VARLEN)
        live = True
        if GRAPH_CAPTURE:
            live = (i_n >= 0) & (i_n < N)
        if live:
            _convolve_chunk(x, weight, bias, residual, initial_state, y, i_n, i_t, i_task % ND, cu, T, D, W, BT, BR, BD,
                            BW, UNROLL, SILU, BIAS, RESIDUAL, INITIAL, VARLEN, ROWWISE)
    if STORE_FINAL:
        for i_task in range(tl.program_id(0), N * ND, tl.num_programs(0)):
            _store_final_state(x, initial_state, final_state, i_task // ND, i_task % ND, cu, T, D, W, BD, BW, INITIAL,
                               VARLEN)
    if VARLEN:
        zero_rows(y, active_rows(cu, N, T), T, D, ZERO_BLOCK)


def run_conv_forward(x, weight, bias, residual, initial_state, store_final: bool, silu: bool, packing: Packing):
    """y like x `[B, T, D]`, and the final state `[N, D, W]` in the initial state's dtype (x's without one) or None."""
    D, W = weight.shape
    y = torch.empty_like(x)
    state_dtype = x.dtype if initial_state is None else initial_state.dtype
    final_state = x.new_empty(packing.N, D, W, dtype=state_dtype) if store_final else None
    record = record_for("conv_forward", x.device, K=W, V=D, BT=packing.BT, dtype=x.dtype)
    launch(conv_forward, conv_programs(record, x, store_final, packing), x, weight, bias, residual, initial_state, y,
           final_state, packing.cu, packing.chunks, packing.N, packing.T, packing.NT, packing.NTS, record=record, D=D,
           W=W, BT=packing.BT, BW=triton.next_power_of_2(W), SILU=silu, BIAS=bias is not None,
           RESIDUAL=residual is not None, INITIAL=initial_state is not None, STORE_FINAL=store_final,
           VARLEN=packing.varlen, GRAPH_CAPTURE=packing.capture)
    return y, final_state


def conv_programs(record, x: torch.Tensor, by_sequence: bool, packing: Packing) -> int:
    """Programs for the chunks, for the inactive rows (as many as there would be in chunks) and for the states; none without
    channels, of which compilers for Ascend refuse the stride 0."""
    tiles = -(-x.shape[-1] // record.tiles["BD"])
    rows = max(packing.NT, -(-packing.rows // packing.BT), packing.N if by_sequence else 0)
    return grid_stride(rows * tiles, record, x.device) if tiles else 0
