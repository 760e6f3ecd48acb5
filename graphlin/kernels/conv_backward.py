"""Short causal convolution, backward: gradients of x, weight, bias, residual and both states.

With `p` a token's position in its sequence of n tokens and `z` as in `conv`:
    dz = dy silu'(z) or dy,   dx_p = Σ_j weight[W-1-j] dz_(p+j) + dfinal[p-n+W],   dweight[W-1-j] = Σ_p dz_p x_(p-j)
"""

import torch
import triton
import triton.language as tl

from graphlin.kernels.activations import sigmoid, silu_slope
from graphlin.kernels.common import active_rows, chunk, chunk_count, sequence, zero_rows
from graphlin.kernels.conv import (
    ZERO_BLOCK,
    conv_programs,
    load_back,
    load_bias,
    load_columns,
    load_row,
    load_slots,
    range_mask,
    store_row,
    tap,
    weigh,
    widen,
)
from graphlin.kernels.launch import launch, record_for
from graphlin.kernels.packing import Packing
from graphlin.kernels.reduce import reduce_partials_into


@triton.jit
def _store_weight_gradients(partials, p, o_d, D: tl.constexpr, W: tl.constexpr, BIAS: tl.constexpr,
                            b_b, g_0, g_1, g_2, g_3, g_4, g_5, g_6, g_7):
    """One chunk's [W or W + 1, D] partial sums: a row for each weight, oldest tap first, and one for the bias."""
    p_w = partials + p + (W - 1) * D + o_d
    m = o_d < D
    tl.store(p_w, tl.sum(g_0, 0), mask=m)
    if W > 1:
        tl.store(p_w - D, tl.sum(g_1, 0), mask=m)
    if W > 2:
        tl.store(p_w - 2 * D, tl.sum(g_2, 0), mask=m)
    if W > 3:
        tl.store(p_w - 3 * D, tl.sum(g_3, 0), mask=m)
    if W > 4:
        tl.store(p_w - 4 * D, tl.sum(g_4, 0), mask=m)
    if W > 5:
        tl.store(p_w - 5 * D, tl.sum(g_5, 0), mask=m)
    if W > 6:
        tl.store(p_w - 6 * D, tl.sum(g_6, 0), mask=m)
    if W > 7:
        tl.store(p_w - 7 * D, tl.sum(g_7, 0), mask=m)
    if BIAS:
        tl.store(p_w + D, tl.sum(b_b, 0), mask=m)


@triton.jit
def _differentiate_row(dy_0, b_z, SILU: tl.constexpr, ROWWISE: tl.constexpr):
    """dz of a row, float32."""
    d_0 = widen(dy_0, ROWWISE)
    if SILU:
        d_0 = tl.fma(d_0, silu_slope(b_z, sigmoid(b_z)), tl.zeros_like(d_0))
    return d_0


@triton.jit
def _store_dx(dx, dfinal, b_dx, p, i_n, i_r, k: tl.constexpr, first, n, o_r, o_x, o_d, D: tl.constexpr, W: tl.constexpr,
              BR: tl.constexpr, BD: tl.constexpr, BW: tl.constexpr, L: tl.constexpr, DFINAL: tl.constexpr,
              ROWWISE: tl.constexpr):
    """Stores dx of the row W - 1 before the row k after `i_r` of each strand, with what it gets from the final state."""
    if DFINAL:
        i_o = i_r + (k - (W - 1))
        if i_o + (BR - 1) * L >= n - W:
            b_dx += load_slots(dfinal, i_n, (i_o - n + W) + o_r * L, o_d, D, W, BR, BD, BW, ROWWISE)
    store_row(dx, b_dx, p, i_r, k - (W - 1), first, n, o_r, o_x, o_d, D, BD, L, ROWWISE)


@triton.jit
def _differentiate_chunk(x, weight, bias, initial_state, dy, dfinal, dx, dresidual, partials, i_c, i_n, i_t, i_d, cu, T,
                         D: tl.constexpr, W: tl.constexpr, BT: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr,
                         BW: tl.constexpr, UNROLL: tl.constexpr, SILU: tl.constexpr, BIAS: tl.constexpr,
                         INITIAL: tl.constexpr, DFINAL: tl.constexpr, DRESIDUAL: tl.constexpr, VARLEN: tl.constexpr,
                         ROWWISE: tl.constexpr):
    """BR strands of L consecutive rows, a row of each at a time; dx needs dz of the W - 1 rows after a strand too.

    Eight rows of x and of dz have names since Triton has no arrays of tiles; the compiler drops those beyond W. Three
    rows (a, b, c) are on their way while one is worked on. Rows behind the end of the sequence count as 0 times x in the sums of
    the weight's gradient, so that an infinity or NaN of x may reach more taps than those it is under.
    """
    tl.static_assert(BT % BR == 0)
    L: tl.constexpr = BT // BR
    R: tl.constexpr = L + W - 1                             # rows a strand walks, its own and those after it
    U: tl.constexpr = UNROLL if L % UNROLL == 0 else 1      # rows a turn; a strand is a whole number of turns
    bos, n = sequence(cu, i_n, T, VARLEN)
    first = i_t * BT
    p = bos * D
    o_d = i_d * BD + tl.arange(0, BD)
    o_r = tl.arange(0, BR)
    o_x = o_r[:, None] * (L * D) + o_d[None, :]
    x_a = load_row(x, p, first, 0, first, n, o_r, o_x, o_d, D, BD, L, R, ROWWISE)
    x_b = load_row(x, p, first, 1, first, n, o_r, o_x, o_d, D, BD, L, R, ROWWISE)
    x_c = load_row(x, p, first, 2, first, n, o_r, o_x, o_d, D, BD, L, R, ROWWISE)
    dy_a = load_row(dy, p, first, 0, first, n, o_r, o_x, o_d, D, BD, L, R, ROWWISE)
    dy_b = load_row(dy, p, first, 1, first, n, o_r, o_x, o_d, D, BD, L, R, ROWWISE)
    dy_c = load_row(dy, p, first, 2, first, n, o_r, o_x, o_d, D, BD, L, R, ROWWISE)
    x_1 = load_back(x, initial_state, p, i_n, first, 1, n, o_r, o_x, o_d, D, W, BR, BD, BW, L, INITIAL, ROWWISE)
    x_2 = load_back(x, initial_state, p, i_n, first, 2, n, o_r, o_x, o_d, D, W, BR, BD, BW, L, INITIAL, ROWWISE)
    x_3 = load_back(x, initial_state, p, i_n, first, 3, n, o_r, o_x, o_d, D, W, BR, BD, BW, L, INITIAL, ROWWISE)
    x_4 = load_back(x, initial_state, p, i_n, first, 4, n, o_r, o_x, o_d, D, W, BR, BD, BW, L, INITIAL, ROWWISE)
    x_5 = load_back(x, initial_state, p, i_n, first, 5, n, o_r, o_x, o_d, D, W, BR, BD, BW, L, INITIAL, ROWWISE)
    x_6 = load_back(x, initial_state, p, i_n, first, 6, n, o_r, o_x, o_d, D, W, BR, BD, BW, L, INITIAL, ROWWISE)
    x_7 = load_back(x, initial_state, p, i_n, first, 7, n, o_r, o_x, o_d, D, W, BR, BD, BW, L, INITIAL, ROWWISE)
    b_w = load_columns(weight, o_d, D, W, BW)
    b_b = load_bias(bias, o_d, D, BD, BIAS)[None, :] + tl.zeros([BR, BD], dtype=tl.float32)
    # Tap j weighs the row j before in z; dx of a row W - 1 before takes the same weights in the other order.
    w_0 = tap(b_w, 0, W, BW)
    w_1 = tap(b_w, 1, W, BW)
    w_2 = tap(b_w, 2, W, BW)
    w_3 = tap(b_w, 3, W, BW)
    w_4 = tap(b_w, 4, W, BW)
    w_5 = tap(b_w, 5, W, BW)
    w_6 = tap(b_w, 6, W, BW)
    w_7 = tap(b_w, 7, W, BW)
    v_0 = tap(b_w, W - 1, W, BW)
    v_1 = tap(b_w, W - 2, W, BW)
    v_2 = tap(b_w, W - 3, W, BW)
    v_3 = tap(b_w, W - 4, W, BW)
    v_4 = tap(b_w, W - 5, W, BW)
    v_5 = tap(b_w, W - 6, W, BW)
    v_6 = tap(b_w, W - 7, W, BW)
    v_7 = tap(b_w, W - 8, W, BW)
    zero = tl.zeros([BR, BD], dtype=tl.float32)
    # A tile for each: Triton 3.6 to 3.9 carry a name round a loop only if the body leaves it another tile than it came
    # with, so of names with one first tile those that just hand it on would stay 0.
    d_1 = tl.zeros([BR, BD], dtype=tl.float32)
    d_2 = tl.zeros([BR, BD], dtype=tl.float32)
    d_3 = tl.zeros([BR, BD], dtype=tl.float32)
    d_4 = tl.zeros([BR, BD], dtype=tl.float32)
    d_5 = tl.zeros([BR, BD], dtype=tl.float32)
    d_6 = tl.zeros([BR, BD], dtype=tl.float32)
    d_7 = tl.zeros([BR, BD], dtype=tl.float32)
    g_0, g_1, g_2, g_3, g_4, g_5, g_6, g_7, g_b = zero, zero, zero, zero, zero, zero, zero, zero, zero
    i_e = first + (tl.maximum(tl.minimum(L, n - first), 0) + U - 1) // U * U
    for i_s in range(first, i_e, U):
        for k in tl.static_range(U):
            x_0, dy_0 = widen(x_a, ROWWISE), dy_a
            x_a, x_b, x_c = x_b, x_c, load_row(x, p, i_s, k + 3, first, n, o_r, o_x, o_d, D, BD, L, R, ROWWISE)
            dy_a, dy_b, dy_c = dy_b, dy_c, load_row(dy, p, i_s, k + 3, first, n, o_r, o_x, o_d, D, BD, L, R, ROWWISE)
            if DRESIDUAL:
                store_row(dresidual, dy_0, p, i_s, k, first, n, o_r, o_x, o_d, D, BD, L, ROWWISE)
            b_z = weigh(W, b_b, w_0, w_1, w_2, w_3, w_4, w_5, w_6, w_7, x_0, x_1, x_2, x_3, x_4, x_5, x_6, x_7)
            d_0 = _differentiate_row(dy_0, b_z, SILU, ROWWISE)
            b_dx = weigh(W, zero, v_0, v_1, v_2, v_3, v_4, v_5, v_6, v_7, d_0, d_1, d_2, d_3, d_4, d_5, d_6, d_7)
            _store_dx(dx, dfinal, b_dx, p, i_n, i_s, k, first, n, o_r, o_x, o_d, D, W, BR, BD, BW, L, DFINAL, ROWWISE)
            g_b += d_0
            g_0 = tl.fma(d_0, x_0, g_0)
            g_1 = tl.fma(d_0, x_1, g_1)
            g_2 = tl.fma(d_0, x_2, g_2)
            g_3 = tl.fma(d_0, x_3, g_3)
            if W > 4:
                g_4 = tl.fma(d_0, x_4, g_4)
                g_5 = tl.fma(d_0, x_5, g_5)
                g_6 = tl.fma(d_0, x_6, g_6)
                g_7 = tl.fma(d_0, x_7, g_7)
            d_7, d_6, d_5, d_4, d_3, d_2, d_1 = d_6, d_5, d_4, d_3, d_2, d_1, d_0
            x_7, x_6, x_5, x_4, x_3, x_2, x_1 = x_6, x_5, x_4, x_3, x_2, x_1, x_0
    for k in tl.static_range(W - 1):       # rows after a strand, for dx alone: the strand that owns them sums the rest
        x_0, dy_0 = widen(x_a, ROWWISE), dy_a
        x_a, x_b, dy_a, dy_b = x_b, x_c, dy_b, dy_c
        if k + 3 < W - 1:
            x_c = load_row(x, p, i_e, k + 3, first, n, o_r, o_x, o_d, D, BD, L, R, ROWWISE)
            dy_c = load_row(dy, p, i_e, k + 3, first, n, o_r, o_x, o_d, D, BD, L, R, ROWWISE)
        b_z = weigh(W, b_b, w_0, w_1, w_2, w_3, w_4, w_5, w_6, w_7, x_0, x_1, x_2, x_3, x_4, x_5, x_6, x_7)
        d_0 = _differentiate_row(dy_0, b_z, SILU, ROWWISE)
        b_dx = weigh(W, zero, v_0, v_1, v_2, v_3, v_4, v_5, v_6, v_7, d_0, d_1, d_2, d_3, d_4, d_5, d_6, d_7)
        _store_dx(dx, dfinal, b_dx, p, i_n, i_e, k, first, n, o_r, o_x, o_d, D, W, BR, BD, BW, L, DFINAL, ROWWISE)
        d_7, d_6, d_5, d_4, d_3, d_2, d_1 = d_6, d_5, d_4, d_3, d_2, d_1, d_0
        x_7, x_6, x_5, x_4, x_3, x_2, x_1 = x_6, x_5, x_4, x_3, x_2, x_1, x_0
    G: tl.constexpr = W + 1 if BIAS else W
    _store_weight_gradients(partials, tl.cast(i_c, tl.int64) * (G * D), o_d, D, W, BIAS,
                            g_b, g_0, g_1, g_2, g_3, g_4, g_5, g_6, g_7)


@triton.jit
def _store_initial_gradient(x, weight, bias, initial_state, dy, dfinal, dinitial, i_n, i_d, cu, T, D: tl.constexpr,
                            W: tl.constexpr, BD: tl.constexpr, BW: tl.constexpr, SILU: tl.constexpr, BIAS: tl.constexpr,
                            DFINAL: tl.constexpr, VARLEN: tl.constexpr, ROWWISE: tl.constexpr):
    """Slot w feeds rows 0 to w - 1, and slot w - n of the final state of a sequence shorter than that."""
    bos, n = sequence(cu, i_n, T, VARLEN)
    o_d = i_d * BD + tl.arange(0, BD)
    o_w = tl.arange(0, BW)
    m_d = o_d < D
    p_h = tl.cast(i_n, tl.int64) * (D * W)
    o_h = o_d[:, None] * W + o_w[None, :]
    b_w = load_columns(weight, o_d, D, W, BW)
    b_b = load_bias(bias, o_d, D, BD, BIAS)
    b_dh = tl.zeros([BD, BW], dtype=tl.float32)
    if DFINAL:
        m = m_d[:, None] & range_mask(o_w, n, W, ROWWISE)[None, :]
        b_dh += tl.load(dfinal + (p_h - n) + o_h, mask=m, other=0.).to(tl.float32)
    for i_p in tl.static_range(W - 1):
        m = o_d < tl.where(n > i_p, D, 0)
        b_dz = tl.load(dy + (bos + i_p) * D + o_d, mask=m, other=0.).to(tl.float32)
        if SILU:
            b_z = b_b
            for j in tl.static_range(W):
                if j <= i_p:
                    b_x = tl.load(x + (bos + i_p - j) * D + o_d, mask=m, other=0.).to(tl.float32)
                else:
                    b_x = tl.load(initial_state + (p_h + W + i_p - j) + o_d * W, mask=m, other=0.).to(tl.float32)
                b_z = tl.fma(tap(b_w, j, W, BW), b_x, b_z)
            b_dz *= silu_slope(b_z, sigmoid(b_z))
        if ROWWISE:                         # a load from before the tensor, even if masked, is refused
            b_v = tl.zeros([BD, BW], dtype=tl.float32)
            for i_w in range(0, W):
                b_v += tl.where((o_w == i_w + i_p + 1)[None, :], tap(b_w, W - 1 - i_w, W, BW)[:, None], 0.0)
        else:
            m = m_d[:, None] & ((o_w >= i_p + 1) & (o_w < W))[None, :]
            b_v = tl.load(weight + o_h - (i_p + 1), mask=m, other=0.).to(tl.float32)
        b_dh = tl.fma(b_dz[:, None], b_v, b_dh)                                                 # [BD, BW]
    tl.store(dinitial + p_h + o_h, b_dh.to(dinitial.dtype.element_ty), mask=m_d[:, None] & (o_w < W)[None, :])


@triton.jit(do_not_specialize=["N", "T", "NT", "NTS"])
def conv_backward(x, weight, bias, initial_state, dy, dfinal, dx, dresidual, dinitial, partials, cu, chunks,
                  N, T, NT, NTS, D: tl.constexpr, W: tl.constexpr, BT: tl.constexpr, BR: tl.constexpr,
                  BD: tl.constexpr, BW: tl.constexpr, UNROLL: tl.constexpr, SILU: tl.constexpr, BIAS: tl.constexpr,
                  INITIAL: tl.constexpr, DFINAL: tl.constexpr, DRESIDUAL: tl.constexpr, DINITIAL: tl.constexpr,
                  VARLEN: tl.constexpr, GRAPH_CAPTURE: tl.constexpr, ROWWISE: tl.constexpr):
    """Tasks (chunk, D tile) for dx, dresidual and partial sums, then (sequence, D tile) for dinitial, grid-stride."""
    ND: tl.constexpr = (D + BD - 1) // BD
    for i_task in range(tl.program_id(0), chunk_count(cu, N, T, NT, BT, GRAPH_CAPTURE) * ND, tl.num_programs(0)):
        i_n, i_t = chunk(chunks, i_task // ND, NTS, VARLEN)
        live = True
        if GRAPH_CAPTURE:
            live = (i_n >= 0) & (i_n < N)
        if live:
            _differentiate_chunk(x, weight, bias, initial_state, dy, dfinal, dx, dresidual, partials, i_task // ND,
                                 i_n, i_t, i_task % ND, cu, T, D, W, BT, BR, BD, BW, UNROLL, SILU, BIAS, INITIAL,
                                 DFINAL, DRESIDUAL, VARLEN, ROWWISE)
    if DINITIAL:
        for i_task in range(tl.program_id(0), N * ND, tl.num_programs(0)):
            _store_initial_gradient(x, weight, bias, initial_state, dy, dfinal, dinitial, i_task // ND, i_task % ND,
                                    cu, T, D, W, BD, BW, SILU, BIAS, DFINAL, VARLEN, ROWWISE)
    if VARLEN:
        zero_rows(dx, active_rows(cu, N, T), T, D, ZERO_BLOCK)
        if DRESIDUAL:
            zero_rows(dresidual, active_rows(cu, N, T), T, D, ZERO_BLOCK)


def run_conv_backward(x, weight, bias, initial_state, dy, dfinal, residual_dtype: torch.dtype | None,
                      want_initial: bool, silu: bool, packing: Packing):
    """Gradients of x, weight, bias, residual and initial_state; None for what is absent or not wanted."""
    D, W = weight.shape
    dx, dweight = torch.empty_like(x), torch.empty_like(weight)
    dbias = None if bias is None else torch.empty_like(bias)
    dresidual = None if residual_dtype is None else torch.empty_like(x, dtype=residual_dtype)
    dinitial = torch.empty_like(initial_state) if want_initial else None
    partials = torch.empty(packing.NT, W if bias is None else W + 1, D, dtype=torch.float32, device=x.device)
    record = record_for("conv_backward", x.device, K=W, V=D, BT=packing.BT, dtype=x.dtype)
    launch(conv_backward, conv_programs(record, x, want_initial, packing), x, weight, bias, initial_state, dy, dfinal,
           dx, dresidual, dinitial, partials, packing.cu, packing.chunks, packing.N, packing.T, packing.NT,
           packing.NTS, record=record, D=D, W=W, BT=packing.BT, BW=triton.next_power_of_2(W), SILU=silu,
           BIAS=bias is not None, INITIAL=initial_state is not None, DFINAL=dfinal is not None,
           DRESIDUAL=dresidual is not None, DINITIAL=want_initial, VARLEN=packing.varlen, GRAPH_CAPTURE=packing.capture)
    reduce_partials_into(partials, packing, dweight.t(), dbias)
    return dx, dweight, dbias, dresidual, dinitial
