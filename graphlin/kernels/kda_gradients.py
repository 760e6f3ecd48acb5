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
from graphlin.kernels.kda_pairwise import pairwise_gradients
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
                    SAFE: tl.constexpr, PREC: tl.constexpr, PAIRWISE: tl.constexpr):
    """Adds all pairs i > j of one half."""
    if HB == 32:
        b_dq, b_dr, b_dw, b_a = _level_gradients(b_q, b_k, b_y, b_G, b_g, b_f, b_w, b_dq, b_dr, b_dw, b_a, 16, HB, BK, PREC)
    if PAIRWISE:
        b_dq, b_dr, b_dw, b_a = pairwise_gradients(b_q, b_k, b_y, b_G, b_f, b_w, b_dq, b_dr, b_dw, b_a, HB, BK)
    elif SAFE:
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
def _load_half(q, k, g, dt_bias, b, rq, rk, p_q, p_r, p_g, p_b, i_hv, m_t, o_h, o_k, rate, lower_bound, scale, H: tl.constexpr,
               HV: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr):
    """scale q, k, log decays and their sums from the half's first row, `[HB, BK]`; β."""
    p = p_q + o_h[:, None] * (H * K) + o_k[None, :]
    m = row_mask(m_t, o_k, K, BK)
    b_q = tl.load(q + p, mask=m, other=0.).to(tl.float32) * (tl.load(rq + p_r + o_h) * scale)[:, None]
    b_k = tl.load(k + p, mask=m, other=0.).to(tl.float32) * tl.load(rk + p_r + o_h)[:, None]
    b_u = load_channel_gates(g, dt_bias, p_g, i_hv, m_t, o_h, o_k, HV, K, BK, BIAS)
    b_g = masked_decay(b_u, m, rate, lower_bound, GATE)
    return b_q, b_k, b_g, tl.cumsum(b_g, 0), tl.load(b + p_b + o_h)


@triton.jit
def _read_upper(q, k, g, dt_bias, b, rq, rk, fw, ts, p_q, p_r, p_g, p_b, p_c, p_t, i_hv, m_0, b_q, b_k, b_G, b_gc, b_dq, b_dr,
                b_a, o_h, o_k, rate, lower_bound, scale, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, BT: tl.constexpr,
                BK: tl.constexpr, HB: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr, PREC: tl.constexpr):
    """The lower half as a reader of the upper one, whose pointers are given. Returns dq, dr, a; G from the chunk's first row;
    and what dg gets in all rows."""
    _, k_0, g_0, G_0, b_0 = _load_half(q, k, g, dt_bias, b, rq, rk, p_q, p_r, p_g, p_b, i_hv, m_0, o_h, o_k, rate, lower_bound,
                                       scale, H, HV, K, BK, GATE, BIAS)
    k_0 = k_0 * b_0[:, None]
    b_t = tl.sum(g_0, 0)
    b_x = tl.load(ts + p_t + o_h[:, None] * K + o_k[None, :], mask=(o_k < K)[None, :], other=0.).to(tl.float32)
    b_past = tl.sum(b_x * k_0 * tl.exp(tl.minimum(b_gc[None, :] - G_0, 0.0)), 0)
    x_y = (k_0 * tl.exp(tl.minimum(b_t[None, :] - G_0, 0.0))).to(fw.dtype.element_ty)
    b_er = tl.exp(b_G)
    u = tl.dot(tl.load(fw + p_c + HB * BT), x_y, input_precision=PREC)                                   # [HB, BK]
    b_dq += b_er * u
    b_a += (b_q * b_er).to(x_y.dtype).to(tl.float32) * u
    u = tl.dot(tl.load(fw + p_c + HB * BT + BT * BT), x_y, input_precision=PREC)
    b_dr += b_er * u
    b_a += (b_k * b_er).to(x_y.dtype).to(tl.float32) * u
    return b_dq, b_dr, b_a, b_G + b_t[None, :], b_past


@triton.jit
def _write_lower(q, k, g, dt_bias, b, rq, rk, fw, ts, p_q, p_r, p_g, p_b, p_c, p_t, i_hv, m_1, b_y, b_g, b_G, b_dw, o_h, o_k,
                 rate, lower_bound, scale, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, BT: tl.constexpr,
                 BK: tl.constexpr, HB: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr, PREC: tl.constexpr):
    """The upper half as a writer to the lower one, whose pointers are given but for p_c. Returns dw; the terms of dg that a
    writer leaves to the rows behind it; and what dg gets in all rows."""
    q_1, k_1, _, G_1, _ = _load_half(q, k, g, dt_bias, b, rq, rk, p_q, p_r, p_g, p_b, i_hv, m_1, o_h, o_k, rate, lower_bound,
                                     scale, H, HV, K, BK, GATE, BIAS)
    b_t = tl.sum(b_g, 0)[None, :]
    b_er = tl.exp(G_1)
    q_1 = q_1 * b_er
    k_1 = k_1 * b_er
    x_q = q_1.to(fw.dtype.element_ty)
    x_k = k_1.to(fw.dtype.element_ty)
    p = p_t + o_h[:, None] * K + o_k[None, :]
    m = (o_k < K)[None, :]
    b_x = q_1 * tl.load(ts + p + BT * K, mask=m, other=0.).to(tl.float32)
    b_x -= k_1 * tl.load(ts + p + 2 * BT * K, mask=m, other=0.).to(tl.float32)
    b_later = tl.sum(b_x * tl.exp(b_t), 0)
    u = tl.dot(tl.trans(tl.load(fw + p_c + HB * BT)), x_q, input_precision=PREC)                         # [HB, BK]
    u = tl.dot(tl.trans(tl.load(fw + p_c + HB * BT + BT * BT)), x_k, u, input_precision=PREC)
    b_ec = tl.exp(tl.minimum(b_t - b_G, 0.0))
    return b_dw + b_ec * u, b_y * b_ec * u, b_later


@triton.jit
def _finish_half(g, dt_bias, ts, dg, dqk, pb, p_g, p_t, p_w, p_b, i_hv, b_q, b_k, b_b, b_G, b_gc, b_eye, b_dq, b_dr, b_dw, b_a,
                 b_w, b_all, m_t, o_h, o_k, rate, lower_bound, scale, HV: tl.constexpr, K: tl.constexpr, BT: tl.constexpr,
                 BK: tl.constexpr, NK: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr, PREC: tl.constexpr,
                 REV_SCAN: tl.constexpr):
    """Adds what comes from outside the chunk, and stores the half's dq, dk, dg and its share of dβ.

    In dg, a of a row is due to it and the rows before it, w to the rows behind it, all to every row. Returns the sums of the
    half's terms of dA_log and ddt_bias.
    """
    p = p_t + o_h[:, None] * K + o_k[None, :]
    m = (o_k < K)[None, :]
    m_tk = row_mask(m_t, o_k, K, BK)
    b_y = b_k * b_b[:, None]
    b_x = tl.load(ts + p, mask=m, other=0.).to(tl.float32) * tl.exp(tl.minimum(b_gc[None, :] - b_G, 0.0))
    b_dw += b_x + b_eye[:, None] * b_q
    tl.store(pb + p_b + o_h, tl.sum(b_k * b_dw, 1))
    b_w += b_x * b_y
    before = tl.where(o_h[:, None] > o_h[None, :], 1.0, 0.0)     # a difference of sums would lose what decays leave of terms
    b_dg = tl.dot(before, b_w, input_precision=PREC) + b_all[None, :]
    b_eg = tl.exp(b_G)
    b_x = tl.load(ts + p + BT * K, mask=m, other=0.).to(tl.float32) * b_eg
    b_a += b_q * b_x
    p_x = p_w + o_h[:, None] * (NK * BK) + o_k[None, :]
    tl.store(dqk + p_x, (b_dq + b_x + b_eye[:, None] * b_y) * scale)
    b_x = tl.load(ts + p + 2 * BT * K, mask=m, other=0.).to(tl.float32) * b_eg
    b_a -= b_k * b_x
    tl.store(dqk + p_x + BT * NK * BK, b_dr - b_x + b_b[:, None] * b_dw)
    if REV_SCAN:
        b_dg += tl.cumsum(b_a, 0, reverse=True)
    else:
        b_dg += tl.sum(b_a, 0)[None, :] - tl.cumsum(b_a, 0) + b_a
    b_u = load_channel_gates(g, dt_bias, p_g, i_hv, m_t, o_h, o_k, HV, K, BK, BIAS)
    b_dg, b_da = gate_gradients(tl.where(m_tk, b_dg, 0.0), b_u, rate, lower_bound, GATE)
    tl.store(dg + p_g + o_h[:, None] * (HV * K) + o_k[None, :], b_dg.to(dg.dtype.element_ty), mask=m_tk)
    return tl.sum(b_da, 0), tl.sum(b_dg, 0)


@triton.jit
def _intra_half(q, k, g, A_log, dt_bias, GC, b, rq, rk, fw, ts, sr, dg, dqk, pb, pa, i_n, i_t, i_hv, i_k, i_s, cu, T, NS, scale,
                lower_bound, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
                HB: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr, SAFE: tl.constexpr, VARLEN: tl.constexpr,
                PREC: tl.constexpr, REV_SCAN: tl.constexpr, PAIRWISE: tl.constexpr):
    """Half i_s of a chunk, one tile of channels."""
    NK: tl.constexpr = (K + BK - 1) // BK
    bos, n = sequence(cu, i_n, T, VARLEN)
    slot = chunk_slot(bos, i_n, i_t, BT, NS)
    first = i_s * HB
    other = HB - first
    row = bos + i_t * BT
    i_h = i_hv // (HV // H)
    o_h = tl.arange(0, HB)
    o_k = i_k * BK + tl.arange(0, BK)
    m_t = i_t * BT + first + o_h < n
    p = slot * HV + i_hv
    p_q = (row * H + i_h) * K
    p_g = (row * HV + i_hv) * K
    p_r = (slot * H + i_h) * BT
    p_t = p * (3 * BT * K)
    p_c = p * (2 * BT * BT) + o_h[:, None] * BT + o_h[None, :]
    rate = decay_rate(A_log, i_hv)
    b_q, b_k, b_g, b_G, b_b = _load_half(
        q, k, g, dt_bias, b, rq, rk, p_q + first * (H * K), p_r + first, p_g + first * (HV * K), p * BT + first, i_hv, m_t, o_h,
        o_k, rate, lower_bound, scale, H, HV, K, BK, GATE, BIAS)
    b_y = b_k * b_b[:, None]
    b_f = tl.load(fw + p_c + first * (BT + 1))                                                           # [HB, HB]
    b_w = tl.load(fw + p_c + first * (BT + 1) + BT * BT)
    b_eye = tl.sum(tl.where(o_h[:, None] == o_h[None, :], b_f.to(tl.float32), 0.0), 1)                   # [HB]
    b_z = tl.zeros([HB, BK], dtype=tl.float32)
    b_dq, b_dr, b_dw, b_a = _half_gradients(b_q, b_k, b_y, b_G, b_g, b_f, b_w, b_z, b_z, b_z, b_z, -7.5 * lower_bound, HB, BK,
                                            SAFE, PREC, PAIRWISE)
    b_gc = tl.load(GC + p * K + o_k, mask=o_k < K, other=0.)                                             # [BK]
    b_all = tl.exp(b_gc) * tl.load(sr + p * K + o_k, mask=o_k < K, other=0.)
    b_x = b_z
    if BT == 64:
        m_o = i_t * BT + other + o_h < n
        p_q += other * (H * K)
        p_r += other
        p_b = p * BT + other
        if i_s == 1:
            b_dq, b_dr, b_a, b_G, b_more = _read_upper(
                q, k, g, dt_bias, b, rq, rk, fw, ts, p_q, p_r, p_g, p_b, p_c, p_t, i_hv, m_o, b_q, b_k, b_G, b_gc, b_dq, b_dr,
                b_a, o_h, o_k, rate, lower_bound, scale, H, HV, K, BT, BK, HB, GATE, BIAS, PREC)
            b_all += b_more
        else:
            b_dw, b_x, b_more = _write_lower(
                q, k, g, dt_bias, b, rq, rk, fw, ts, p_q, p_r, p_g + HB * HV * K, p_b, p_c, p_t + HB * K, i_hv, m_o, b_y, b_g,
                b_G, b_dw, o_h, o_k, rate, lower_bound, scale, H, HV, K, BT, BK, HB, GATE, BIAS, PREC)
            b_all += b_more
    b_da, b_db = _finish_half(
        g, dt_bias, ts, dg, dqk, pb, p_g + first * (HV * K), p_t + first * K, p * (2 * BT * NK * BK) + first * (NK * BK),
        (i_k * NS * HV + p) * BT + first, i_hv, b_q, b_k, b_b, b_G, b_gc, b_eye, b_dq, b_dr, b_dw, b_a, b_x, b_all, m_t, o_h,
        o_k, rate, lower_bound, scale, HV, K, BT, BK, NK, GATE, BIAS, PREC, REV_SCAN)
    if GATE > 0:
        p_a = p * (2 * BT // HB * NK * BK) + i_s * (NK * BK) + o_k
        tl.store(pa + p_a, b_da)
        tl.store(pa + p_a + BT // HB * NK * BK, b_db)


@triton.jit(do_not_specialize=["N", "T", "NT", "NTS", "NS"])
def kda_intra_gradients(q, k, g, A_log, dt_bias, GC, b, rq, rk, fw, ts, sr, dg, dqk, pb, pa, cu, chunks, N, T, NT, NTS, NS,
                        scale, lower_bound, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, BT: tl.constexpr,
                        BK: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr, SAFE: tl.constexpr, VARLEN: tl.constexpr,
                        GRAPH_CAPTURE: tl.constexpr, PREC: tl.constexpr, COPY_LHS: tl.constexpr, REV_SCAN: tl.constexpr,
                        PAIRWISE: tl.constexpr):
    """Tasks (chunk, value head, K tile, half of 32 rows), grid-stride; a chunk of up to 32 rows is one half."""
    NK: tl.constexpr = (K + BK - 1) // BK
    HB: tl.constexpr = BT if BT < 32 else 32
    NP: tl.constexpr = NK * (BT // HB)
    for i_task in range(tl.program_id(0), chunk_count(cu, N, T, NT, BT, GRAPH_CAPTURE) * (HV * NP), tl.num_programs(0)):
        i_n, i_t = chunk(chunks, i_task // (HV * NP), NTS, VARLEN)
        live = True
        if GRAPH_CAPTURE:
            live = (i_n >= 0) & (i_n < N)
        if live:
            i_p = i_task % NP
            _intra_half(q, k, g, A_log, dt_bias, GC, b, rq, rk, fw, ts, sr, dg, dqk, pb, pa, i_n, i_t, (i_task // NP) % HV,
                        i_p % NK, i_p // NK, cu, T, NS, scale, lower_bound, H, HV, K, BT, BK, HB, GATE, BIAS, SAFE, VARLEN, PREC,
                        REV_SCAN, PAIRWISE)
    if VARLEN:
        zero_rows(dg, active_rows(cu, N, T), T, HV * K, 1024)


@triton.jit
def _sum_halves(pa, dgate, A_log, i_hv, HV: tl.constexpr, K: tl.constexpr, KB: tl.constexpr, NH: tl.constexpr):
    """One chunk's partials of a head's dA_log and ddt_bias, from those of its halves and channels `[2, NH, KB]`."""
    BK: tl.constexpr = triton.next_power_of_2(KB)
    o_k = tl.arange(0, BK)
    b_da = tl.zeros([BK], dtype=tl.float32)
    b_db = tl.zeros([BK], dtype=tl.float32)
    for i in range(0, NH):
        b_da += tl.load(pa + i * KB + o_k, mask=o_k < KB, other=0.)
        b_db += tl.load(pa + (NH + i) * KB + o_k, mask=o_k < KB, other=0.)
    tl.store(dgate + i_hv, rate_gradient(tl.sum(b_da, 0), A_log, i_hv))
    tl.store(dgate + HV + i_hv * K + o_k, b_db, mask=o_k < K)


@triton.jit(do_not_specialize=["N", "T", "NT", "NTS", "NS"])
def kda_finish_gradients(q, k, A_log, b, rq, rk, pb, pa, dqk, dq, dk, dbeta, dgate, cu, chunks, N, T, NT, NTS, NS,
                         H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
                         L2: tl.constexpr, GATE: tl.constexpr, BETA: tl.constexpr, VARLEN: tl.constexpr,
                         GRAPH_CAPTURE: tl.constexpr):
    """Tasks (chunk, key head), grid-stride; BK is that of kda_intra_gradients, whose tiles it sums."""
    NK: tl.constexpr = (K + BK - 1) // BK
    R: tl.constexpr = HV // H
    PITCH: tl.constexpr = 2 * BT * NK * BK
    NH: tl.constexpr = BT // 32 if BT > 32 else 1
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
                for i_k in range(0, NK):
                    b_db += tl.load(pb + (i_k * NS * HV + p) * BT + o_c)
                b_db = strength_gradient(b_db, tl.load(b + p * BT + o_c), BETA)
                tl.store(dbeta + row * HV + i_hv + o_c * HV, b_db.to(dbeta.dtype.element_ty), mask=m_t)
                if GATE > 0:
                    _sum_halves(pa + p * (2 * NH * NK * BK), dgate + tl.cast(i_c, tl.int64) * (HV + HV * K), A_log, i_hv, HV, K,
                                NK * BK, NH)
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
    halves = max(1, BT // 32)

    def float32(*shape: int) -> torch.Tensor:
        return q.new_empty(shape, dtype=torch.float32)

    fw, ts, sr = q.new_empty(NS, HV, 2, BT, BT), q.new_empty(NS, HV, 3, BT, K), float32(NS, HV, K)
    dqk, pb, pa = float32(NS, HV, 2, BT, NK * BK), float32(NK, NS, HV, BT), float32(NS, HV, 2, halves, NK * BK)
    dq, dk, dg, dbeta = (torch.empty_like(x) for x in (q, k, g, beta))
    dgate = float32(packing.NT, HV + HV * K) if prologue.gate else None
    where = (packing.cu, packing.chunks, packing.N, packing.T, packing.NT, packing.NTS, NS)
    common = dict(HV=HV, K=K, BT=BT, VARLEN=packing.varlen, GRAPH_CAPTURE=packing.capture)
    switches = prologue.constexprs
    launch(kda_inter_gradients, grid_stride(packing.NT * HV, inter, q.device), do, E, dv, St, Rt, fw, ts, sr, *where,
           record=inter, **common, V=V)
    launch(kda_intra_gradients, grid_stride(packing.NT * HV * NK * halves, intra, q.device), q, k, g, prologue.A_log,
           prologue.dt_bias, work.G, work.b, work.rq, work.rk, fw, ts, sr, dg, dqk, pb, pa, *where, scale, prologue.lowest,
           record=intra, **common, H=H, GATE=switches["GATE"], BIAS=switches["BIAS"], SAFE=constant_anchor(prologue, q.dtype))
    launch(kda_finish_gradients, grid_stride(packing.NT * H, finish, q.device), q, k, prologue.A_log, work.b, work.rq, work.rk,
           pb, pa, dqk, dq, dk, dbeta, dgate, *where, record=finish, **common, H=H, BK=BK, L2=switches["L2"],
           GATE=switches["GATE"], BETA=switches["BETA"])
    return dq, dk, dg, dbeta, dgate
