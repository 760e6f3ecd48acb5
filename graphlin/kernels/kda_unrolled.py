"""Kimi Delta Attention with a bounded gate: the gradients inside a chunk of 64 rows, its four blocks of 16 rows written out.

A block's decayed rows are made once for all other blocks and stay in registers, where kda_intra makes them again for each pair of
blocks, and each block's loads are on their way while the block before is worked on. Blocks behind the end of the sequence are
left out: nothing is stored of their rows, nor read of them later. Tuples of tiles need a Triton newer than triton-ascend's 3.2,
whose records keep to kda_intra.
With e_J = 2^(T_J), what a row i of block I reads of the blocks before it is the last of
    U_0 = F_I0 y_0,   U_J = e_J ∘ U_(J-1) + F_IJ y_J,
with y_J decayed to its block's end; what a writer gets from the blocks behind it comes the same way from the last one on.
"""

import triton
import triton.language as tl

from graphlin.kernels.common import row_mask
from graphlin.kernels.gates import exp2, gate_gradients
from graphlin.kernels.kda_block import block_gradients, log_decay_gradient


@triton.jit
def _load(x, p, o_b, o_k, K: tl.constexpr):
    """Rows of a tile of channels, `[16, BK]`, as they are."""
    return tl.load(x + p + (o_b[:, None] * K + o_k[None, :]), mask=(o_k < K)[None, :], other=0.)


@triton.jit
def _load_rows(x, p, m_t, o_b, o_k, STRIDE: tl.constexpr, K: tl.constexpr, BK: tl.constexpr):
    return tl.load(x + p + (o_b[:, None] * STRIDE + o_k[None, :]), mask=row_mask(m_t, o_k, K, BK), other=0.)


@triton.jit
def _read(fs, ys, es, AT: tl.constexpr, PREC: tl.constexpr):
    """U of block AT's rows through F or W, `[16, BK]`."""
    u = tl.dot(fs[0], ys[0], input_precision=PREC)
    for J in tl.static_range(1, AT):
        u = tl.dot(fs[J], ys[J], u * es[J][None, :], input_precision=PREC)
    return u


@triton.jit
def _write(fs, gs, xs_q, xs_k, es, J: tl.constexpr, PREC: tl.constexpr):
    """What block J's rows as writers get from readers of the blocks behind it, from the block's end on: `[16, BK]`."""
    u = tl.dot(fs[3], xs_q[3], input_precision=PREC)
    u = tl.dot(gs[3], xs_k[3], u, input_precision=PREC)
    for i in tl.static_range(1, 3 - J):
        u = tl.dot(fs[3 - i], xs_q[3 - i], u * es[3 - i][None, :], input_precision=PREC)
        u = tl.dot(gs[3 - i], xs_k[3 - i], u, input_precision=PREC)
    return u


@triton.jit
def _row_of_blocks(p_f, o_b, AT: tl.constexpr, BT: tl.constexpr):
    """Blocks (AT, 0), (AT, 1), (AT, 2) of F or W, those that are before AT."""
    p = p_f + AT * 16 * BT + (o_b[:, None] * BT + o_b[None, :])
    f_0 = tl.load(p)
    f_1 = f_0
    f_2 = f_0
    if AT > 1:
        f_1 = tl.load(p + 16)
    if AT > 2:
        f_2 = tl.load(p + 32)
    return f_0, f_1, f_2


@triton.jit
def _column_of_blocks(p_f, o_b, J: tl.constexpr, BT: tl.constexpr):
    """Blocks (., J) of F or W, transposed: four, of which those behind J are right."""
    p = p_f + J * 16 + (o_b[None, :] * BT + o_b[:, None])
    f_3 = tl.load(p + 48 * BT)
    f_2 = f_3
    f_1 = f_3
    if J < 2:
        f_2 = tl.load(p + 32 * BT)
    if J < 1:
        f_1 = tl.load(p + 16 * BT)
    return f_3, f_1, f_2, f_3


@triton.jit
def _block_loads(q, k, g, c, b, rq, rk, ts, p_q, p_r, p_g, p, o_b, o_k, first_row, n, AT: tl.constexpr, H: tl.constexpr,
                 HV: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr):
    m_t = first_row + AT * 16 + o_b < n
    p_x = p_q + AT * (16 * H * K)
    p_t = p * (3 * BT * K) + AT * (16 * K)
    return (_load_rows(q, p_x, m_t, o_b, o_k, H * K, K, BK), _load_rows(k, p_x, m_t, o_b, o_k, H * K, K, BK),
            _load(c, p * (BT * K) + AT * (16 * K), o_b, o_k, K), _load(ts, p_t, o_b, o_k, K),
            _load(ts, p_t + BT * K, o_b, o_k, K), _load(ts, p_t + 2 * BT * K, o_b, o_k, K),
            _load_rows(g, p_g + AT * (16 * HV * K), m_t, o_b, o_k, HV * K, K, BK), tl.load(rq + p_r + AT * 16 + o_b),
            tl.load(rk + p_r + AT * 16 + o_b), tl.load(b + p * BT + AT * 16 + o_b))


@triton.jit
def _writer_loads(k, c, b, rk, ts, p_q, p_r, p, o_b, o_k, first_row, n, J: tl.constexpr, H: tl.constexpr, K: tl.constexpr,
                  BT: tl.constexpr, BK: tl.constexpr):
    m_t = first_row + J * 16 + o_b < n
    return (_load_rows(k, p_q + J * (16 * H * K), m_t, o_b, o_k, H * K, K, BK),
            _load(c, p * (BT * K) + J * (16 * K), o_b, o_k, K), _load(ts, p * (3 * BT * K) + J * (16 * K), o_b, o_k, K),
            tl.load(rk + p_r + J * 16 + o_b), tl.load(b + p * BT + J * 16 + o_b))


@triton.jit
def _writers(loads, b_t, b_later, lift, DT: tl.constexpr, FAST: tl.constexpr):
    """y of a block decayed to its end; what dg gets from the block's rows in all rows behind them."""
    b_k, b_c, b_x, b_r, b_b = loads
    b_y = (b_k.to(tl.float32) * b_r[:, None]) * b_b[:, None] * (exp2(b_t[None, :] - b_c, FAST) * (1.0 / lift))
    return b_y.to(DT), tl.sum(b_y * b_x.to(tl.float32), 0) * (exp2(b_later, FAST) * lift)


@triton.jit
def _block(loads, dt, fw, dg, dqk, pb, p_g, p, p_d, o_b, o_k, first_row, n, ys, xs_q, xs_k, es, b_t, b_earlier, b_later, b_before,
           rate, lower_bound, lift, scale, AT: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, BT: tl.constexpr,
           BK: tl.constexpr, NK: tl.constexpr, GATE: tl.constexpr, PREC: tl.constexpr, REV_SCAN: tl.constexpr,
           FAST: tl.constexpr):
    """Block AT. b_before is what dg gets in all of its rows from elsewhere. Returns the block's readers q and k, decayed from its
    beginning, the sum of a, and the terms of dA_log and ddt_bias."""
    DT: tl.constexpr = fw.dtype.element_ty
    p_f = fw + p * (2 * BT * BT)
    p_b = p_f + AT * (16 * BT + 16) + (o_b[:, None] * BT + o_b[None, :])
    b_f = tl.load(p_b)                                                                                   # [16, 16]
    b_h = tl.load(p_b + BT * BT)
    if AT < 3:
        fs = _column_of_blocks(p_f, o_b, AT, BT)
        gs = _column_of_blocks(p_f + BT * BT, o_b, AT, BT)
    if AT > 0:
        f_r = _row_of_blocks(p_f, o_b, AT, BT)
        g_r = _row_of_blocks(p_f + BT * BT, o_b, AT, BT)
    b_q, b_k, b_c, t_w, t_q, t_k, b_u, r_q, r_k, b_b = loads
    b_q = b_q.to(tl.float32) * (r_q * scale)[:, None]
    b_k = b_k.to(tl.float32) * r_k[:, None]
    b_y = b_k * b_b[:, None]
    b_er = exp2(b_c, FAST) * lift
    b_ew = exp2(b_t[None, :] - b_c, FAST) * (1.0 / lift)
    b_dw = tl.zeros([16, BK], dtype=tl.float32)
    u_q = tl.zeros([16, BK], dtype=tl.float32)
    u_k = tl.zeros([16, BK], dtype=tl.float32)
    b_a = tl.zeros([16, BK], dtype=tl.float32)
    if AT < 3:
        b_dw = _write(fs, gs, xs_q, xs_k, es, AT, PREC)
        b_a -= (b_y * b_ew).to(DT).to(tl.float32) * b_dw
        b_dw = b_ew * b_dw
    if AT > 0:
        u_q = _read(f_r, ys, es, AT, PREC)
        u_k = _read(g_r, ys, es, AT, PREC)
    b_eye = tl.sum(tl.where(o_b[:, None] == o_b[None, :], b_f.to(tl.float32), 0.0), 1)                   # [16]
    b_f = tl.where(o_b[:, None] > o_b[None, :], b_f, 0.0).to(DT)
    b_dq, b_dr, b_dw, b_a = block_gradients(b_q, b_k, b_y, b_c, b_er, u_q, u_k, b_f, b_h, b_dw, b_a, lift, BK, True, False, PREC,
                                            FAST)
    b_x = t_w.to(tl.float32) * b_ew * (exp2(b_later, FAST) * lift)[None, :]
    b_dw += b_x + b_eye[:, None] * b_q
    b_w = b_x * b_y
    b_e = b_er * (exp2(b_earlier, FAST) * (1.0 / lift))[None, :]
    b_x = t_q.to(tl.float32) * b_e
    b_a += b_q * b_x
    b_dq = (b_dq + b_x + b_eye[:, None] * b_y) * scale
    b_x = t_k.to(tl.float32) * b_e
    b_a -= b_k * b_x
    b_dr += b_b[:, None] * b_dw - b_x
    b_dg = log_decay_gradient(b_a, b_w, b_before, o_b, PREC, REV_SCAN)
    m_tk = row_mask(first_row + AT * 16 + o_b < n, o_k, K, BK)
    b_dg, b_da = gate_gradients(tl.where(m_tk, b_dg, 0.0), b_u.to(tl.float32) + dt[None, :], rate, lower_bound, GATE, FAST)

    tl.store(pb + p_d + AT * 16 + o_b, tl.sum(b_k * b_dw, 1))
    p_w = dqk + p * (2 * BT * NK * BK) + AT * (16 * NK * BK) + (o_b[:, None] * (NK * BK) + o_k[None, :])
    tl.store(p_w, b_dq.to(dqk.dtype.element_ty))
    tl.store(p_w + BT * NK * BK, b_dr.to(dqk.dtype.element_ty))
    tl.store(dg + p_g + AT * (16 * HV * K) + (o_b[:, None] * (HV * K) + o_k[None, :]), b_dg.to(dg.dtype.element_ty), mask=m_tk)
    return (b_q * b_er).to(DT), (b_k * b_er).to(DT), tl.sum(b_a, 0), b_da, b_dg


@triton.jit
def unrolled_chunk_gradients(q, k, g, dt_bias, GC, c, b, rq, rk, fw, ts, sr, dg, dqk, pb, pa, p_q, p_r, p_g, p, p_d, i_hv, o_k,
                             first_row, n, rate, lower_bound, lift, scale, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr,
                             BT: tl.constexpr, BK: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr,
                             PREC: tl.constexpr, REV_SCAN: tl.constexpr, FAST: tl.constexpr):
    """One chunk, one tile of channels; p counts chunks of heads, the other offsets are of its first row."""
    NK: tl.constexpr = (K + BK - 1) // BK
    DT: tl.constexpr = fw.dtype.element_ty
    o_b = tl.arange(0, 16)
    m_k = o_k < K
    p_c = c + p * (BT * K) + 15 * K + o_k
    w_0 = _writer_loads(k, c, b, rk, ts, p_q, p_r, p, o_b, o_k, first_row, n, 0, H, K, BT, BK)
    w_1 = _writer_loads(k, c, b, rk, ts, p_q, p_r, p, o_b, o_k, first_row, n, 1, H, K, BT, BK)
    w_2 = _writer_loads(k, c, b, rk, ts, p_q, p_r, p, o_b, o_k, first_row, n, 2, H, K, BT, BK)
    l_3 = _block_loads(q, k, g, c, b, rq, rk, ts, p_q, p_r, p_g, p, o_b, o_k, first_row, n, 3, H, HV, K, BT, BK)
    t_0 = tl.load(p_c, mask=m_k, other=0.)                                                               # [BK]
    t_1 = tl.load(p_c + 16 * K, mask=m_k, other=0.)
    t_2 = tl.load(p_c + 32 * K, mask=m_k, other=0.)
    t_3 = tl.load(p_c + 48 * K, mask=m_k, other=0.)
    dt = tl.zeros([BK], dtype=tl.float32)
    if BIAS:
        dt += tl.load(dt_bias + i_hv * K + o_k, mask=m_k, other=0.).to(tl.float32)
    b_all = exp2(tl.load(GC + p * K + o_k, mask=m_k, other=0.), FAST) * tl.load(sr + p * K + o_k, mask=m_k, other=0.)
    zero = tl.zeros([BK], dtype=tl.float32)
    es = (zero, exp2(t_1, FAST), exp2(t_2, FAST))
    y_0, s_0 = _writers(w_0, t_0, t_1 + (t_2 + t_3), lift, DT, FAST)
    y_1, s_1 = _writers(w_1, t_1, t_2 + t_3, lift, DT, FAST)
    y_2, s_2 = _writers(w_2, t_2, t_3, lift, DT, FAST)
    ys = (y_0, y_1, y_2)

    live = n - first_row
    rest = tl.zeros([16, BK], dtype=tl.float32).to(DT)
    x_q3, x_k3, x_q2, x_k2, x_q1, x_k1 = rest, rest, rest, rest, rest, rest
    b_da = tl.zeros([16, BK], dtype=tl.float32)
    b_db = tl.zeros([16, BK], dtype=tl.float32)
    l_2 = _block_loads(q, k, g, c, b, rq, rk, ts, p_q, p_r, p_g, p, o_b, o_k, first_row, n, 2, H, HV, K, BT, BK)
    if live > 48:
        x_q3, x_k3, a, b_da, b_db = _block(
            l_3, dt, fw, dg, dqk, pb, p_g, p, p_d, o_b, o_k, first_row, n, ys, ys, ys, es, t_3, t_0 + t_1 + t_2, zero,
            b_all + (s_0 + s_1 + s_2), rate, lower_bound, lift, scale, 3, HV, K, BT, BK, NK, GATE, PREC, REV_SCAN, FAST)
        b_all += a
    l_1 = _block_loads(q, k, g, c, b, rq, rk, ts, p_q, p_r, p_g, p, o_b, o_k, first_row, n, 1, H, HV, K, BT, BK)
    if live > 32:
        x_q2, x_k2, a, da, db = _block(
            l_2, dt, fw, dg, dqk, pb, p_g, p, p_d, o_b, o_k, first_row, n, ys, (x_q3, x_q3, x_q3, x_q3),
            (x_k3, x_k3, x_k3, x_k3), es, t_2, t_0 + t_1, t_3, b_all + (s_0 + s_1), rate, lower_bound, lift, scale, 2, HV, K, BT,
            BK, NK, GATE, PREC, REV_SCAN, FAST)
        b_all += a
        b_da += da
        b_db += db
    l_0 = _block_loads(q, k, g, c, b, rq, rk, ts, p_q, p_r, p_g, p, o_b, o_k, first_row, n, 0, H, HV, K, BT, BK)
    if live > 16:
        x_q1, x_k1, a, da, db = _block(
            l_1, dt, fw, dg, dqk, pb, p_g, p, p_d, o_b, o_k, first_row, n, ys, (x_q2, x_q2, x_q2, x_q3),
            (x_k2, x_k2, x_k2, x_k3), es, t_1, t_0, t_2 + t_3, b_all + s_0, rate, lower_bound, lift, scale, 1, HV, K, BT, BK, NK,
            GATE, PREC, REV_SCAN, FAST)
        b_all += a
        b_da += da
        b_db += db
    _, _, _, da, db = _block(
        l_0, dt, fw, dg, dqk, pb, p_g, p, p_d, o_b, o_k, first_row, n, ys, (x_q1, x_q1, x_q2, x_q3), (x_k1, x_k1, x_k2, x_k3), es,
        t_0, zero, t_1 + (t_2 + t_3), b_all, rate, lower_bound, lift, scale, 0, HV, K, BT, BK, NK, GATE, PREC, REV_SCAN, FAST)
    b_da += da
    b_db += db
    if GATE > 0:
        p_a = pa + p * (2 * NK * BK) + o_k
        tl.store(p_a, tl.sum(b_da, 0))
        tl.store(p_a + NK * BK, tl.sum(b_db, 0))
