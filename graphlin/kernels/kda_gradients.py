"""Kimi Delta Attention, the gradients of q, k, g and beta, in three launches.

inter: what needs no decay. F = tril(dO Eᵀ), W = -stril(dV Eᵀ), T1 = E Rᵀ, T2 = dO Sᵀ, T3 = dV Sᵀ and Σ_v S∘R.
intra: tiles of channels. With y = β∘k and Γ_ijd = e^(G_id - G_jd), gradients of q, of k as a reader (ρ) and as a writer (κ):
    dq = s (e^G∘T2 + Σ_j F_ij y_j Γ_ij),   ρ = -e^G∘T3 + Σ_j W_ij y_j Γ_ij,
    κ = e^(G_C-G)∘T1 + Σ_i (s F_ij q_i + W_ij k_i) Γ_ij,   dk = ρ + β∘κ,   dβ = k·κ
    dg_t = Σ_{i>=t} a_i + Σ_{j<t} y_j∘e^(G_C-G_j)∘T1_j + e^(G_C)∘Σ_v S∘R,   a = q∘dq + k∘ρ - y∘κ of the pairs and q, k's T terms
finish: sums over the value heads of a key head, and the l2 norm's and the sigmoid's own gradients.
Operands of pairs are rounded once and used in both directions: a pair outside j < t <= i then cancels in dg to the last digit
of float32, which products rounded apart do not.
"""

import torch
import triton
import triton.language as tl

from graphlin.kernels.common import active_rows, chunk, chunk_count, chunk_slot, row_mask, sequence, zero_rows
from graphlin.kernels.delta_problem import Operands, Prologue
from graphlin.kernels.delta_products import error_products, state_products
from graphlin.kernels.gates import (
    decay_rate,
    gate_gradients,
    load_channel_gates,
    masked_decay,
    norm_gradients,
    rate_gradient,
    strength_gradient,
)
from graphlin.kernels.kda_anchors import bounded_decay, bounded_pairs, level_decay, level_pairs
from graphlin.kernels.kda_prep import constant_anchor
from graphlin.kernels.launch import grid_stride, launch, record_for
from graphlin.kernels.packing import Packing


@triton.jit
def _inter_chunk(do, E, dv, St, Rt, fw, ts, sr, i_n, i_t, i_hv, cu, T, NS, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
                 BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, VARLEN: tl.constexpr, PREC: tl.constexpr):
    NK: tl.constexpr = (K + BK - 1) // BK
    bos, n = sequence(cu, i_n, T, VARLEN)
    p = chunk_slot(bos, i_n, i_t, BT, NS) * HV + i_hv
    p_v = ((bos + i_t * BT) * HV + i_hv) * V
    o_c = tl.arange(0, BT)
    m_t = i_t * BT + o_c < n
    b_f, b_h = error_products(do, dv, E, p_v, m_t, HV, V, BT, BV, PREC)
    p_c = p * (2 * BT * BT) + o_c[:, None] * BT + o_c[None, :]
    tl.store(fw + p_c, tl.where(o_c[:, None] >= o_c[None, :], b_f, 0.0).to(fw.dtype.element_ty))
    tl.store(fw + p_c + BT * BT, tl.where(o_c[:, None] > o_c[None, :], -b_h, 0.0).to(fw.dtype.element_ty))
    for i_k in range(0, NK):
        o_k = i_k * BK + tl.arange(0, BK)
        m_k = o_k < K
        b_1, b_2, b_3, b_sr = state_products(do, E, dv, St, Rt, p_v, p * (K * V), i_k, m_t, HV, K, V, BT, BK, BV, PREC)
        p_t = p * (3 * BT * K) + o_c[:, None] * K + o_k[None, :]
        tl.store(ts + p_t, b_1.to(ts.dtype.element_ty), mask=m_k[None, :])
        tl.store(ts + p_t + BT * K, b_2.to(ts.dtype.element_ty), mask=m_k[None, :])
        tl.store(ts + p_t + 2 * BT * K, b_3.to(ts.dtype.element_ty), mask=m_k[None, :])
        tl.store(sr + p * K + o_k, b_sr, mask=m_k)


@triton.jit(do_not_specialize=["N", "T", "NT", "NTS", "NS"])
def kda_inter_gradients(do, E, dv, St, Rt, fw, ts, sr, cu, chunks, N, T, NT, NTS, NS, HV: tl.constexpr, K: tl.constexpr,
                        V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, VARLEN: tl.constexpr,
                        GRAPH_CAPTURE: tl.constexpr, PREC: tl.constexpr, COPY_LHS: tl.constexpr):
    """Tasks (chunk, value head), grid-stride."""
    for i_task in range(tl.program_id(0), chunk_count(cu, N, T, NT, BT, GRAPH_CAPTURE) * HV, tl.num_programs(0)):
        i_n, i_t = chunk(chunks, i_task // HV, NTS, VARLEN)
        live = True
        if GRAPH_CAPTURE:
            live = (i_n >= 0) & (i_n < N)
        if live:
            _inter_chunk(do, E, dv, St, Rt, fw, ts, sr, i_n, i_t, i_task % HV, cu, T, NS, HV, K, V, BT, BK, BV, VARLEN, PREC)


@triton.jit
def _pair_gradients(b_q, b_k, b_y, b_er, b_ec, b_f, b_w, m, b_dq, b_dr, b_dw, b_a, PREC: tl.constexpr):
    """Adds the pairs of mask m inside one half, decayed by er of the reader and ec of the writer."""
    x_q = (b_q * b_er).to(b_f.dtype)
    x_k = (b_k * b_er).to(b_f.dtype)
    x_y = (b_y * b_ec).to(b_f.dtype)
    b_f = tl.where(m, b_f, 0.0).to(b_f.dtype)
    b_w = tl.where(m, b_w, 0.0).to(b_f.dtype)
    u = tl.dot(b_f, x_y, input_precision=PREC)                                                           # [HB, BK]
    b_dq += b_er * u
    b_a += x_q.to(tl.float32) * u
    u = tl.dot(b_w, x_y, input_precision=PREC)
    b_dr += b_er * u
    b_a += x_k.to(tl.float32) * u
    u = tl.dot(tl.trans(b_f), x_q, input_precision=PREC)
    u = tl.dot(tl.trans(b_w), x_k, u, input_precision=PREC)
    b_dw += b_ec * u
    b_a -= x_y.to(tl.float32) * u
    return b_dq, b_dr, b_dw, b_a


@triton.jit
def _level_gradients(b_q, b_k, b_y, b_G, b_g, b_f, b_w, b_dq, b_dr, b_dw, b_a, h: tl.constexpr, HB: tl.constexpr,
                     BK: tl.constexpr, PREC: tl.constexpr):
    f = level_decay(b_G, b_g, h, HB, BK)
    return _pair_gradients(b_q, b_k, b_y, f, f, b_f, b_w, level_pairs(h, HB), b_dq, b_dr, b_dw, b_a, PREC)


@triton.jit
def _half_gradients(b_q, b_k, b_y, b_G, b_g, b_f, b_w, b_dq, b_dr, b_dw, b_a, middle, HB: tl.constexpr, BK: tl.constexpr,
                    SAFE: tl.constexpr, PREC: tl.constexpr):
    """Adds all pairs i > j of one half."""
    if HB == 32:
        b_dq, b_dr, b_dw, b_a = _level_gradients(b_q, b_k, b_y, b_G, b_g, b_f, b_w, b_dq, b_dr, b_dw, b_a, 16, HB, BK, PREC)
    if SAFE:
        b_er, b_ec = bounded_decay(b_G, middle, HB, BK)
        b_dq, b_dr, b_dw, b_a = _pair_gradients(b_q, b_k, b_y, b_er, b_ec, b_f, b_w, bounded_pairs(HB), b_dq, b_dr, b_dw, b_a,
                                                PREC)
    else:
        b_dq, b_dr, b_dw, b_a = _level_gradients(b_q, b_k, b_y, b_G, b_g, b_f, b_w, b_dq, b_dr, b_dw, b_a, 8, HB, BK, PREC)
        b_dq, b_dr, b_dw, b_a = _level_gradients(b_q, b_k, b_y, b_G, b_g, b_f, b_w, b_dq, b_dr, b_dw, b_a, 4, HB, BK, PREC)
        b_dq, b_dr, b_dw, b_a = _level_gradients(b_q, b_k, b_y, b_G, b_g, b_f, b_w, b_dq, b_dr, b_dw, b_a, 2, HB, BK, PREC)
        b_dq, b_dr, b_dw, b_a = _level_gradients(b_q, b_k, b_y, b_G, b_g, b_f, b_w, b_dq, b_dr, b_dw, b_a, 1, HB, BK, PREC)
    return b_dq, b_dr, b_dw, b_a


@triton.jit
def _load_rows(q, k, b, rq, rk, p_q, p_r, p_b, m, o_h, o_k, scale, H: tl.constexpr, K: tl.constexpr):
    """scale q, k `[HB, BK]` normalised, and β."""
    p = p_q + o_h[:, None] * (H * K) + o_k[None, :]
    b_q = tl.load(q + p, mask=m, other=0.).to(tl.float32) * (tl.load(rq + p_r + o_h) * scale)[:, None]
    b_k = tl.load(k + p, mask=m, other=0.).to(tl.float32) * tl.load(rk + p_r + o_h)[:, None]
    return b_q, b_k, tl.load(b + p_b + o_h)


@triton.jit
def _finish_half(g, dt_bias, ts, dg, dqk, pb, p_g, p_t, p_w, p_b, i_hv, b_q, b_k, b_b, b_G, b_gc, b_f, b_dq, b_dr, b_dw, b_a,
                 b_past, b_later, b_sr, m_t, o_h, o_k, rate, lower_bound, scale, HV: tl.constexpr, K: tl.constexpr,
                 BT: tl.constexpr, BK: tl.constexpr, NK: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr,
                 REV_SCAN: tl.constexpr):
    """Adds what comes from outside the chunk, and stores one half's dq, dk, dg and its share of dβ.

    past, later: sums of `y∘e^(G_C-G)∘T1` over the rows before this half, of a over those behind it. Returns the sums over this
    half of a, and of its terms of dA_log and ddt_bias.
    """
    p = p_t + o_h[:, None] * K + o_k[None, :]
    m = (o_k < K)[None, :]
    m_tk = row_mask(m_t, o_k, K, BK)
    b_eye = tl.sum(tl.where(o_h[:, None] == o_h[None, :], b_f, 0.0).to(tl.float32), 1)                   # [HB]
    b_eg = tl.exp(b_G)
    b_x = tl.load(ts + p, mask=m, other=0.).to(tl.float32) * tl.exp(tl.minimum(b_gc[None, :] - b_G, 0.0))
    b_y = b_k * b_b[:, None]
    b_dw += b_x + b_eye[:, None] * b_q
    b_x = b_x * b_y
    b_dg = tl.cumsum(b_x, 0) - b_x + b_past[None, :] + (b_later + tl.exp(b_gc) * b_sr)[None, :]
    b_x = tl.load(ts + p + BT * K, mask=m, other=0.).to(tl.float32) * b_eg
    b_a += b_q * b_x
    b_dq += b_x + b_eye[:, None] * b_y
    b_x = tl.load(ts + p + 2 * BT * K, mask=m, other=0.).to(tl.float32) * b_eg
    b_a -= b_k * b_x
    b_dk = b_dr - b_x + b_b[:, None] * b_dw
    b_sum = tl.sum(b_a, 0)
    if REV_SCAN:
        b_dg += tl.cumsum(b_a, 0, reverse=True)
    else:
        b_dg += b_sum[None, :] - tl.cumsum(b_a, 0) + b_a
    p = p_w + o_h[:, None] * (NK * BK) + o_k[None, :]
    tl.store(dqk + p, b_dq * scale)
    tl.store(dqk + p + BT * NK * BK, b_dk)
    tl.store(pb + p_b + o_h, tl.sum(b_k * b_dw, 1))
    b_u = load_channel_gates(g, dt_bias, p_g, i_hv, m_t, o_h, o_k, HV, K, BK, BIAS)
    b_dg, b_da = gate_gradients(tl.where(m_tk, b_dg, 0.0), b_u, rate, lower_bound, GATE)
    tl.store(dg + p_g + o_h[:, None] * (HV * K) + o_k[None, :], b_dg.to(dg.dtype.element_ty), mask=m_tk)
    return b_sum, tl.sum(b_da, 0), tl.sum(b_dg, 0)


@triton.jit
def _intra_chunk(q, k, g, A_log, dt_bias, GC, b, rq, rk, fw, ts, sr, dg, dqk, pb, pa, dgate, i_c, i_n, i_t, i_hv, i_k, cu, T, NS,
                 scale, lower_bound, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
                 GATE: tl.constexpr, BIAS: tl.constexpr, SAFE: tl.constexpr, VARLEN: tl.constexpr, PREC: tl.constexpr,
                 REV_SCAN: tl.constexpr):
    """One tile of channels: the upper half as far as the lower one reads it, the lower half, then the rest of the upper half."""
    NK: tl.constexpr = (K + BK - 1) // BK
    TWO: tl.constexpr = BT == 64
    HB: tl.constexpr = 32 if TWO else BT
    bos, n = sequence(cu, i_n, T, VARLEN)
    slot = chunk_slot(bos, i_n, i_t, BT, NS)
    row = bos + i_t * BT
    i_h = i_hv // (HV // H)
    o_h = tl.arange(0, HB)
    o_k = i_k * BK + tl.arange(0, BK)
    m_0 = i_t * BT + o_h < n
    m_1 = i_t * BT + HB + o_h < n
    p = slot * HV + i_hv
    p_q = (row * H + i_h) * K
    p_g = (row * HV + i_hv) * K
    p_r = (slot * H + i_h) * BT
    p_t = p * (3 * BT * K)
    p_w = p * (2 * BT * NK * BK)
    p_b = (i_k * NS * HV + p) * BT
    p_c = p * (2 * BT * BT) + o_h[:, None] * BT + o_h[None, :]
    rate = decay_rate(A_log, i_hv)
    b_gc = tl.load(GC + p * K + o_k, mask=o_k < K, other=0.)                                             # [BK]
    b_sr = tl.load(sr + p * K + o_k, mask=o_k < K, other=0.)
    m_x = row_mask(m_0, o_k, K, BK)
    q_0, k_0, b_0 = _load_rows(q, k, b, rq, rk, p_q, p_r, p * BT, m_x, o_h, o_k, scale, H, K)
    y_0 = k_0 * b_0[:, None]
    g_0 = masked_decay(load_channel_gates(g, dt_bias, p_g, i_hv, m_0, o_h, o_k, HV, K, BK, BIAS), m_x, rate, lower_bound, GATE)
    G_0 = tl.cumsum(g_0, 0)
    d_q = tl.zeros([HB, BK], dtype=tl.float32)
    d_r = tl.zeros([HB, BK], dtype=tl.float32)
    d_w = tl.zeros([HB, BK], dtype=tl.float32)
    b_a = tl.zeros([HB, BK], dtype=tl.float32)
    b_none = tl.zeros([BK], dtype=tl.float32)
    b_later = b_none
    b_da = b_none
    b_db = b_none
    if TWO:
        b_t = tl.sum(g_0, 0)
        b_ec = tl.exp(tl.minimum(b_t[None, :] - G_0, 0.0))
        x_y = (y_0 * b_ec).to(fw.dtype.element_ty)
        b_x = tl.load(ts + p_t + o_h[:, None] * K + o_k[None, :], mask=(o_k < K)[None, :], other=0.).to(tl.float32)
        b_past = tl.sum(b_x * y_0 * tl.exp(tl.minimum(b_gc[None, :] - G_0, 0.0)), 0)
        m_y = row_mask(m_1, o_k, K, BK)
        q_1, k_1, b_1 = _load_rows(q, k, b, rq, rk, p_q + HB * H * K, p_r + HB, p * BT + HB, m_y, o_h, o_k, scale, H, K)
        g_1 = masked_decay(load_channel_gates(g, dt_bias, p_g + HB * HV * K, i_hv, m_1, o_h, o_k, HV, K, BK, BIAS), m_y, rate,
                           lower_bound, GATE)
        G_1 = tl.cumsum(g_1, 0)
        b_er = tl.exp(G_1)
        x_q = (q_1 * b_er).to(fw.dtype.element_ty)
        x_k = (k_1 * b_er).to(fw.dtype.element_ty)
        f_10 = tl.load(fw + p_c + HB * BT)                                                               # [HB, HB]
        w_10 = tl.load(fw + p_c + HB * BT + BT * BT)
        u_q = tl.dot(f_10, x_y, input_precision=PREC)                                                    # [HB, BK]
        u_k = tl.dot(w_10, x_y, input_precision=PREC)
        f_11 = tl.load(fw + p_c + HB * BT + HB)
        w_11 = tl.load(fw + p_c + HB * BT + HB + BT * BT)
        e_q, e_r, e_w, e_a = _half_gradients(
            q_1, k_1, k_1 * b_1[:, None], G_1, g_1, f_11, w_11, b_er * u_q, b_er * u_k, d_w,
            x_q.to(tl.float32) * u_q + x_k.to(tl.float32) * u_k, -7.5 * lower_bound, HB, BK, SAFE, PREC)
        b_later, b_da, b_db = _finish_half(
            g, dt_bias, ts, dg, dqk, pb, p_g + HB * HV * K, p_t + HB * K, p_w + HB * NK * BK, p_b + HB, i_hv, q_1, k_1, b_1,
            G_1 + b_t[None, :], b_gc, f_11, e_q, e_r, e_w, e_a, b_past, b_none, b_sr, m_1, o_h, o_k, rate, lower_bound, scale,
            HV, K, BT, BK, NK, GATE, BIAS, REV_SCAN)
        u_q = tl.dot(tl.trans(f_10), x_q, input_precision=PREC)
        u_q = tl.dot(tl.trans(w_10), x_k, u_q, input_precision=PREC)
        d_w = b_ec * u_q
        b_a = -x_y.to(tl.float32) * u_q
    f_00 = tl.load(fw + p_c)
    w_00 = tl.load(fw + p_c + BT * BT)
    d_q, d_r, d_w, b_a = _half_gradients(q_0, k_0, y_0, G_0, g_0, f_00, w_00, d_q, d_r, d_w, b_a, -7.5 * lower_bound, HB, BK,
                                         SAFE, PREC)
    _, c_da, c_db = _finish_half(
        g, dt_bias, ts, dg, dqk, pb, p_g, p_t, p_w, p_b, i_hv, q_0, k_0, b_0, G_0, b_gc, f_00, d_q, d_r, d_w, b_a, b_none,
        b_later, b_sr, m_0, o_h, o_k, rate, lower_bound, scale, HV, K, BT, BK, NK, GATE, BIAS, REV_SCAN)
    if GATE > 0:
        tl.store(pa + i_k * NS * HV + p, tl.sum(b_da + c_da, 0))
        tl.store(dgate + i_c * (HV + HV * K) + HV + i_hv * K + o_k, b_db + c_db, mask=o_k < K)


@triton.jit(do_not_specialize=["N", "T", "NT", "NTS", "NS"])
def kda_intra_gradients(q, k, g, A_log, dt_bias, GC, b, rq, rk, fw, ts, sr, dg, dqk, pb, pa, dgate, cu, chunks, N, T, NT, NTS, NS,
                        scale, lower_bound, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, BT: tl.constexpr,
                        BK: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr, SAFE: tl.constexpr, VARLEN: tl.constexpr,
                        GRAPH_CAPTURE: tl.constexpr, PREC: tl.constexpr, COPY_LHS: tl.constexpr, REV_SCAN: tl.constexpr):
    """Tasks (chunk, value head, K tile), grid-stride."""
    NK: tl.constexpr = (K + BK - 1) // BK
    for i_task in range(tl.program_id(0), chunk_count(cu, N, T, NT, BT, GRAPH_CAPTURE) * (HV * NK), tl.num_programs(0)):
        i_c = i_task // (HV * NK)
        i_n, i_t = chunk(chunks, i_c, NTS, VARLEN)
        live = True
        if GRAPH_CAPTURE:
            live = (i_n >= 0) & (i_n < N)
        if live:
            _intra_chunk(q, k, g, A_log, dt_bias, GC, b, rq, rk, fw, ts, sr, dg, dqk, pb, pa, dgate, tl.cast(i_c, tl.int64), i_n,
                         i_t, (i_task // NK) % HV, i_task % NK, cu, T, NS, scale, lower_bound, H, HV, K, BT, BK, GATE, BIAS,
                         SAFE, VARLEN, PREC, REV_SCAN)
    if VARLEN:
        zero_rows(dg, active_rows(cu, N, T), T, HV * K, 1024)


@triton.jit(do_not_specialize=["N", "T", "NT", "NTS", "NS"])
def kda_finish_gradients(q, k, A_log, b, rq, rk, pb, pa, dqk, dq, dk, dbeta, dgate, cu, chunks, N, T, NT, NTS, NS,
                         H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
                         L2: tl.constexpr, GATE: tl.constexpr, BETA: tl.constexpr, VARLEN: tl.constexpr,
                         GRAPH_CAPTURE: tl.constexpr):
    """Tasks (chunk, key head), grid-stride; BK is that of kda_intra_gradients, whose tiles it sums."""
    NK: tl.constexpr = (K + BK - 1) // BK
    R: tl.constexpr = HV // H
    PITCH: tl.constexpr = 2 * BT * NK * BK
    o_c = tl.arange(0, BT)
    for i_task in range(tl.program_id(0), chunk_count(cu, N, T, NT, BT, GRAPH_CAPTURE) * H, tl.num_programs(0)):
        i_c = i_task // H
        i_h = i_task % H
        i_n, i_t = chunk(chunks, i_c, NTS, VARLEN)
        live = True
        if GRAPH_CAPTURE:
            live = (i_n >= 0) & (i_n < N)
        if live:
            bos, n = sequence(cu, i_n, T, VARLEN)
            slot = chunk_slot(bos, i_n, i_t, BT, NS)
            row = bos + i_t * BT
            m_t = i_t * BT + o_c < n
            for i_r in range(0, R):
                i_hv = i_h * R + i_r
                p = slot * HV + i_hv
                b_db = tl.zeros([BT], dtype=tl.float32)
                b_da = 0.0
                for i_k in range(0, NK):
                    b_db += tl.load(pb + (i_k * NS * HV + p) * BT + o_c)
                    if GATE > 0:
                        b_da += tl.load(pa + i_k * NS * HV + p)
                b_db = strength_gradient(b_db, tl.load(b + p * BT + o_c), BETA)
                tl.store(dbeta + row * HV + i_hv + o_c * HV, b_db.to(dbeta.dtype.element_ty), mask=m_t)
                if GATE > 0:
                    tl.store(dgate + tl.cast(i_c, tl.int64) * (HV + HV * K) + i_hv, rate_gradient(b_da, A_log, i_hv))
            p_t = (row * H + i_h) * K
            p_r = (slot * H + i_h) * BT
            p_w = (slot * HV + i_h * R) * PITCH
            norm_gradients(q, rq, dq, dqk, p_t, p_r, p_w, m_t, H, K, NK, BT, BK, R, PITCH, L2)
            norm_gradients(k, rk, dk, dqk, p_t, p_r, p_w + BT * NK * BK, m_t, H, K, NK, BT, BK, R, PITCH, L2)
    if VARLEN:
        first = active_rows(cu, N, T)
        zero_rows(dq, first, T, H * K, 1024)
        zero_rows(dk, first, T, H * K, 1024)
        zero_rows(dbeta, first, T, HV, 1024)


def run_gradients(q: torch.Tensor, k: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, do: torch.Tensor, E: torch.Tensor,
                  dv: torch.Tensor, St: torch.Tensor, Rt: torch.Tensor, work: Operands, prologue: Prologue, packing: Packing,
                  scale: float) -> tuple[torch.Tensor, ...]:
    """dq, dk, dg, dbeta like their inputs, and per chunk `[NT, HV + HV * K]` the partials of dA_log and ddt_bias (None without
    gate)."""
    (H, K), (HV, V), BT, NS = q.shape[2:], do.shape[2:], packing.BT, packing.NS
    inter, intra, finish = (record_for(f"kda_{stage}_gradients", q.device, K=K, V=V, BT=BT, dtype=q.dtype)
                            for stage in ("inter", "intra", "finish"))
    BK = intra.tiles["BK"]
    NK = -(-K // BK)

    def float32(*shape: int) -> torch.Tensor:
        return q.new_empty(shape, dtype=torch.float32)

    fw, ts, sr = q.new_empty(NS, HV, 2, BT, BT), q.new_empty(NS, HV, 3, BT, K), float32(NS, HV, K)
    dqk, pb, pa = float32(NS, HV, 2, BT, NK * BK), float32(NK, NS, HV, BT), float32(NK, NS, HV)
    dq, dk, dg, dbeta = (torch.empty_like(x) for x in (q, k, g, beta))
    dgate = float32(packing.NT, HV + HV * K) if prologue.gate else None
    where = (packing.cu, packing.chunks, packing.N, packing.T, packing.NT, packing.NTS, NS)
    common = dict(HV=HV, K=K, BT=BT, VARLEN=packing.varlen, GRAPH_CAPTURE=packing.capture)
    switches = prologue.constexprs
    launch(kda_inter_gradients, grid_stride(packing.NT * HV, inter, q.device), do, E, dv, St, Rt, fw, ts, sr, *where,
           record=inter, **common, V=V)
    launch(kda_intra_gradients, grid_stride(packing.NT * HV * NK, intra, q.device), q, k, g, prologue.A_log, prologue.dt_bias,
           work.G, work.b, work.rq, work.rk, fw, ts, sr, dg, dqk, pb, pa, dgate, *where, scale, prologue.lowest, record=intra,
           **common, H=H, GATE=switches["GATE"], BIAS=switches["BIAS"], SAFE=constant_anchor(prologue, q.dtype))
    launch(kda_finish_gradients, grid_stride(packing.NT * H, finish, q.device), q, k, prologue.A_log, work.b, work.rq, work.rk,
           pb, pa, dqk, dq, dk, dbeta, dgate, *where, record=finish, **common, H=H, BK=BK, L2=switches["L2"],
           GATE=switches["GATE"], BETA=switches["BETA"])
    return dq, dk, dg, dbeta, dgate
