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
from graphlin.kernels.common import chunk, chunk_count, row_mask, sequence, zero_inactive_rows
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


# ------------------------------------------------------------------------------------------------ forward
@triton.jit
def _convolve_chunk(x, weight, bias, residual, initial_state, y, i_n, i_t, i_d, cu, T, D: tl.constexpr, W: tl.constexpr,
                    BT: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr, BW: tl.constexpr, SILU: tl.constexpr,
                    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, INITIAL: tl.constexpr, VARLEN: tl.constexpr,
                    ROWWISE: tl.constexpr):
    """BR rows at a time. Each row is loaded once for every tap, from the cache for all but the first."""
    bos, n = sequence(cu, i_n, T, VARLEN)
    o_d = i_d * BD + tl.arange(0, BD)
    o_r = tl.arange(0, BR)
    o_x = o_r[:, None] * D + o_d[None, :]
    b_w = load_columns(weight, o_d, D, W, BW)
    b_b = load_bias(bias, o_d, D, BD, BIAS)
    for i_r in range(i_t * BT, tl.minimum(i_t * BT + BT, n), BR):
        p = (bos + i_r) * D
        b_z = tl.zeros([BR, BD], dtype=tl.float32) + b_b[None, :]
        for j in tl.static_range(W):
            o_p = (i_r - j) + o_r
            m = row_mask((o_p >= 0) & (o_p < n), o_d, D, BD)
            b_x = tl.load(x + (p - j * D) + o_x, mask=m, other=0.).to(tl.float32)            # [BR, BD]
            if INITIAL:
                if i_r < j:
                    b_x += load_slots(initial_state, i_n, (i_r - j + W) + o_r, o_d, D, W, BR, BD, BW, ROWWISE)
            b_z = tl.fma(tap(b_w, j, W, BW)[None, :], b_x, b_z)
        m = row_mask(i_r + o_r < n, o_d, D, BD)
        if RESIDUAL:
            b_y = tl.load(residual + p + o_x, mask=m, other=0.).to(tl.float32)
        else:
            b_y = tl.zeros([BR, BD], dtype=tl.float32)
        if SILU:
            b_y = tl.fma(b_z, sigmoid(b_z), b_y)
        else:
            b_y += b_z
        tl.store(y + p + o_x, b_y.to(y.dtype.element_ty), mask=m)


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
                 BW: tl.constexpr, SILU: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
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
                            BW, SILU, BIAS, RESIDUAL, INITIAL, VARLEN, ROWWISE)
    if STORE_FINAL:
        for i_task in range(tl.program_id(0), N * ND, tl.num_programs(0)):
            _store_final_state(x, initial_state, final_state, i_task // ND, i_task % ND, cu, T, D, W, BD, BW, INITIAL,
                               VARLEN)
    if VARLEN:
        zero_inactive_rows(y, cu, N, T, D, ZERO_BLOCK)


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
