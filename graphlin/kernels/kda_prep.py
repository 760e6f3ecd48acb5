"""Kimi Delta Attention, first kernel: gates, row norms, decayed queries and keys, and the two C x C matrices of every chunk.

With G `[C, K]` the chunk sum of log decays (base 2), `N_ij = Σ_d k_id k_jd 2^(G_id - G_jd)` for i > j, M likewise with q_i for
i >= j, and `B = diag(β)`:
    q̃ = scale q∘2^G,   k̃ = k∘2^G,   k_w = β k∘2^(G_C - G),   A = (I + N B)⁻¹,   P = scale · M B
A chunk of 64 rows is two halves of 32: a block 00 (upper), 11 (lower) within one half, 10 between them. A backward also reads c,
the sums from the first row of each block of 16 rows on (see kda_intra).
"""

import torch
import triton
import triton.language as tl

from graphlin.kernels.common import chunk, chunk_count, chunk_slot, keep, row_mask, sequence
from graphlin.kernels.delta_problem import Operands, Prologue
from graphlin.kernels.gates import decay_rate, inverse_norm, load_channel_gates, load_strength, masked_decay
from graphlin.kernels.kda_anchors import anchoring, block_cumsum, block_pairs, level_decay, level_pairs
from graphlin.kernels.kda_pairwise import block_scans, pairwise_products
from graphlin.kernels.kda_products import anchored_products
from graphlin.kernels.launch import launch, programs_of, record_for
from graphlin.kernels.packing import Packing
from graphlin.kernels.triangular import float32_dot, two_unit_lower_inverses, unit_lower_inverse


@triton.jit
def _inverse_norms(q, k, p_0, o_h, m_t, H: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, HB: tl.constexpr,
                   L2: tl.constexpr):
    """r_q and r_k of HB rows."""
    NK: tl.constexpr = (K + BK - 1) // BK
    b_q = tl.zeros([HB], dtype=tl.float32)
    b_k = tl.zeros([HB], dtype=tl.float32)
    if L2:
        for i_k in range(0, NK):
            o_k = i_k * BK + tl.arange(0, BK)
            p = p_0 + o_h[:, None] * (H * K) + o_k[None, :]
            m = row_mask(m_t, o_k, K, BK)
            x_q = tl.load(q + p, mask=m, other=0.).to(tl.float32)                                        # [HB, BK]
            x_k = tl.load(k + p, mask=m, other=0.).to(tl.float32)
            b_q += tl.sum(x_q * x_q, 1)
            b_k += tl.sum(x_k * x_k, 1)
    return inverse_norm(b_q, L2), inverse_norm(b_k, L2)


@triton.jit
def _add_squares(b_s, x, p, m):
    b_x = tl.load(x + p, mask=m, other=0.).to(tl.float32)
    return b_s + b_x * b_x


@triton.jit
def _both_inverse_norms(q, k, o_0, o_1, m_0, m_1, H: tl.constexpr, K: tl.constexpr, L2: tl.constexpr):
    """r_q and r_k of two halves of 32 rows: their loads are in flight together, where a loop would wait for each."""
    NK: tl.constexpr = (K + 15) // 16
    q_0 = tl.zeros([32, 16], dtype=tl.float32)
    k_0 = tl.zeros([32, 16], dtype=tl.float32)
    q_1 = tl.zeros([32, 16], dtype=tl.float32)
    k_1 = tl.zeros([32, 16], dtype=tl.float32)
    if L2:
        for i_k in tl.static_range(0, NK):
            o_k = i_k * 16 + tl.arange(0, 16)
            p_0 = o_0[:, None] * (H * K) + o_k[None, :]
            p_1 = o_1[:, None] * (H * K) + o_k[None, :]
            q_0 = _add_squares(q_0, q, p_0, row_mask(m_0, o_k, K, 16))
            k_0 = _add_squares(k_0, k, p_0, row_mask(m_0, o_k, K, 16))
            q_1 = _add_squares(q_1, q, p_1, row_mask(m_1, o_k, K, 16))
            k_1 = _add_squares(k_1, k, p_1, row_mask(m_1, o_k, K, 16))
    return (inverse_norm(tl.sum(q_0, 1), L2), inverse_norm(tl.sum(k_0, 1), L2), inverse_norm(tl.sum(q_1, 1), L2),
            inverse_norm(tl.sum(k_1, 1), L2))


@triton.jit
def _products(x_q, x_k, b_y, m, b_n, b_m, PREC: tl.constexpr, COPY_LHS: tl.constexpr):
    """Sets the pairs of mask m in k kᵀ and q kᵀ, `[HB, HB]`, to the products of decayed readers and writers."""
    b_y = tl.trans(b_y)
    b_n = tl.where(m, tl.dot(keep(x_k, COPY_LHS), b_y, input_precision=PREC), b_n)
    b_m = tl.where(m, tl.dot(keep(x_q, COPY_LHS), b_y, input_precision=PREC), b_m)
    return b_n, b_m


@triton.jit
def _level_products(b_q, b_k, b_c, b_n, b_m, h: tl.constexpr, HB: tl.constexpr, BK: tl.constexpr, DT: tl.constexpr,
                    PREC: tl.constexpr, COPY_LHS: tl.constexpr):
    b_e = level_decay(b_c, h, HB, BK)
    b_y = (b_k * b_e).to(DT)
    return _products((b_q * b_e).to(DT), b_y, b_y, level_pairs(h, HB), b_n, b_m, PREC, COPY_LHS)


@triton.jit
def _half_products(b_q, b_k, b_c, b_er, b_ew, lift, HB: tl.constexpr, BK: tl.constexpr, SAFE: tl.constexpr,
                   PAIRWISE: tl.constexpr, DT: tl.constexpr, PREC: tl.constexpr, COPY_LHS: tl.constexpr):
    """k kᵀ and q kᵀ over the pairs i > j of one half, and q kᵀ's diagonal: `[HB, HB]`."""
    o_h = tl.arange(0, HB)
    b_n = tl.zeros([HB, HB], dtype=tl.float32)
    b_m = tl.where(o_h[:, None] == o_h[None, :], tl.sum(b_q * b_k, 1)[:, None], 0.0)
    x_q = (b_q * b_er).to(DT)
    x_k = (b_k * b_er).to(DT)
    if HB == 32:
        b_n, b_m = _products(x_q, x_k, (b_k * b_ew).to(DT), (o_h[:, None] >= 16) & (o_h[None, :] < 16), b_n, b_m, PREC, COPY_LHS)
    if PAIRWISE:
        b_n, b_m = pairwise_products(b_q, b_k, b_c, b_n, b_m, HB, BK)
    elif SAFE:
        b_n, b_m = _products(x_q, x_k, (b_k * tl.exp2(-b_c) * (1.0 / lift)).to(DT), block_pairs(HB), b_n, b_m, PREC, COPY_LHS)
    else:
        b_n, b_m = _level_products(b_q, b_k, b_c, b_n, b_m, 8, HB, BK, DT, PREC, COPY_LHS)
        b_n, b_m = _level_products(b_q, b_k, b_c, b_n, b_m, 4, HB, BK, DT, PREC, COPY_LHS)
        b_n, b_m = _level_products(b_q, b_k, b_c, b_n, b_m, 2, HB, BK, DT, PREC, COPY_LHS)
        b_n, b_m = _level_products(b_q, b_k, b_c, b_n, b_m, 1, HB, BK, DT, PREC, COPY_LHS)
    return b_n, b_m


@triton.jit
def _half(q, k, g, dt_bias, c, p_q, p_g, p_c, i_hv, m_t, o_k, rate, lower_bound, lift, H: tl.constexpr, HV: tl.constexpr,
          K: tl.constexpr, BK: tl.constexpr, HB: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr, SAFE: tl.constexpr,
          PAIRWISE: tl.constexpr, DT: tl.constexpr, PREC: tl.constexpr, COPY_LHS: tl.constexpr):
    """One half of a chunk, one tile of channels: q and k decayed from its beginning, k decayed to its end (`[HB, BK]`), the sum
    of its log decays, and the products of its own pairs. Stores the sums of its blocks where a backward will read them."""
    o_h = tl.arange(0, HB)
    m = row_mask(m_t, o_k, K, BK)
    p = p_q + o_h[:, None] * (H * K) + o_k[None, :]
    b_q = tl.load(q + p, mask=m, other=0.).to(tl.float32)                                                # [HB, BK]
    b_k = tl.load(k + p, mask=m, other=0.).to(tl.float32)
    b_g = masked_decay(load_channel_gates(g, dt_bias, p_g, i_hv, m_t, o_h, o_k, HV, K, BK, BIAS), m, rate, lower_bound, GATE)
    if PAIRWISE:
        b_c = block_scans(b_g, HB, BK)
    else:
        b_c = block_cumsum(b_g, HB, BK)
    if c is not None:
        tl.store(c + p_c + o_h[:, None] * K + o_k[None, :], b_c, mask=(o_k < K)[None, :])
    first = (o_h < 16)[:, None]
    t_0 = tl.sum(tl.where(first, b_g, 0.0), 0)[None, :]
    t_1 = tl.sum(tl.where(first, 0.0, b_g), 0)[None, :]
    b_er = tl.exp2(b_c) * lift
    b_ew = tl.exp2(tl.where(first, t_0, t_1) - b_c) * (1.0 / lift)
    b_n, b_m = _half_products(b_q, b_k, b_c, b_er, b_ew, lift, HB, BK, SAFE, PAIRWISE, DT, PREC, COPY_LHS)
    b_er = b_er * (tl.where(first, 1.0, tl.exp2(t_0)) * (1.0 / lift))
    b_ew = b_ew * (tl.where(first, tl.exp2(t_1), 1.0) * lift)
    return b_q * b_er, b_k * b_er, b_k * b_ew, tl.sum(t_0 + t_1, 0), b_n, b_m


@triton.jit
def _chunk_products(q, k, g, dt_bias, qd, kd, kw, GC, c, p_q, p_g, p_b, i_hv, rq_0, rk_0, b_0, m_0, rq_1, rk_1, b_1, m_1,
                    rate, lower_bound, lift, scale, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, BT: tl.constexpr,
                    BK: tl.constexpr, HB: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr, SAFE: tl.constexpr,
                    PAIRWISE: tl.constexpr, PREC: tl.constexpr, COPY_LHS: tl.constexpr):
    """N and M of the blocks of a chunk without β, r_q, r_k; stores q̃, k̃, k_w and G_C on the way, tile by tile."""
    NK: tl.constexpr = (K + BK - 1) // BK
    DT: tl.constexpr = qd.dtype.element_ty
    o_h = tl.arange(0, HB)
    n_00 = tl.zeros([HB, HB], dtype=tl.float32)
    m_00 = tl.zeros([HB, HB], dtype=tl.float32)
    n_10 = tl.zeros([HB, HB], dtype=tl.float32)
    m_10 = tl.zeros([HB, HB], dtype=tl.float32)
    n_11 = tl.zeros([HB, HB], dtype=tl.float32)
    m_11 = tl.zeros([HB, HB], dtype=tl.float32)
    for i_k in range(0, NK):
        o_k = i_k * BK + tl.arange(0, BK)
        p_y = p_g + o_h[:, None] * (HV * K) + o_k[None, :]
        m_y = row_mask(m_0, o_k, K, BK)
        q_0, k_0, w_0, t_0, b_n, b_m = _half(q, k, g, dt_bias, c, p_q, p_g, p_b * (BT * K), i_hv, m_0, o_k, rate, lower_bound,
                                             lift, H, HV, K, BK, HB, GATE, BIAS, SAFE, PAIRWISE, DT, PREC, COPY_LHS)
        n_00 += b_n
        m_00 += b_m
        tl.store(qd + p_y, (q_0 * (rq_0 * scale)[:, None]).to(DT), mask=m_y)
        tl.store(kd + p_y, (k_0 * rk_0[:, None]).to(DT), mask=m_y)
        if BT == 64:
            p_z = p_y + HB * HV * K
            m_z = row_mask(m_1, o_k, K, BK)
            q_1, k_1, w_1, t_1, b_n, b_m = _half(
                q, k, g, dt_bias, c, p_q + HB * H * K, p_g + HB * HV * K, p_b * (BT * K) + HB * K, i_hv, m_1, o_k, rate,
                lower_bound, lift, H, HV, K, BK, HB, GATE, BIAS, SAFE, PAIRWISE, DT, PREC, COPY_LHS)
            n_11 += b_n
            m_11 += b_m
            b_y = tl.trans(w_0.to(DT))
            n_10 = tl.dot(k_1.to(DT), b_y, n_10, input_precision=PREC)
            m_10 = tl.dot(q_1.to(DT), b_y, m_10, input_precision=PREC)
            b_e = tl.exp2(t_0)[None, :]
            tl.store(qd + p_z, (q_1 * b_e * (rq_1 * scale)[:, None]).to(DT), mask=m_z)
            tl.store(kd + p_z, (k_1 * b_e * rk_1[:, None]).to(DT), mask=m_z)
            tl.store(kw + p_z, (w_1 * (b_1 * rk_1)[:, None]).to(DT), mask=m_z)
            w_0 = w_0 * tl.exp2(t_1)[None, :]
            t_0 += t_1
        tl.store(kw + p_y, (w_0 * (b_0 * rk_0)[:, None]).to(DT), mask=m_y)
        tl.store(GC + p_b * K + o_k, t_0, mask=o_k < K)
    return n_00, m_00, n_10, m_10, n_11, m_11


@triton.jit
def _prep_chunk(q, k, g, beta, A_log, dt_bias, qd, kd, kw, A, P, GC, b, rq, rk, c, i_n, i_t, i_hv, cu, T, NS, scale, lower_bound,
                lift, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, L2: tl.constexpr,
                GATE: tl.constexpr, BIAS: tl.constexpr, BETA: tl.constexpr, SAFE: tl.constexpr, VARLEN: tl.constexpr,
                PREC: tl.constexpr, PREC_INV: tl.constexpr, BI: tl.constexpr, DOT_BLOCKS: tl.constexpr,
                COPY_LHS: tl.constexpr, PAIRWISE: tl.constexpr, SUMS: tl.constexpr, FAST: tl.constexpr):
    R: tl.constexpr = HV // H
    TWO: tl.constexpr = BT == 64
    HB: tl.constexpr = 32 if TWO else BT
    ANCHORED: tl.constexpr = (SAFE and HB == 32) and SUMS > 0
    SWAPPED: tl.constexpr = TWO and ANCHORED
    bos, n = sequence(cu, i_n, T, VARLEN)
    slot = chunk_slot(bos, i_n, i_t, BT, NS)
    row = bos + i_t * BT
    i_h = i_hv // R
    o_h = tl.arange(0, HB)
    o_1 = o_h
    if SWAPPED:
        o_1 = (o_h + 16) % 32
    m_0 = i_t * BT + o_h < n
    m_1 = i_t * BT + HB + o_1 < n
    p = slot * HV + i_hv
    p_q = (row * H + i_h) * K
    p_r = (slot * H + i_h) * BT
    if SWAPPED:
        rq_0, rk_0, rq_1, rk_1 = _both_inverse_norms(q + p_q, k + p_q, o_h, HB + o_1, m_0, m_1, H, K, L2)
    else:
        rq_0, rk_0 = _inverse_norms(q, k, p_q, o_h, m_0, H, K, BK, HB, L2)
        rq_1 = rq_0
        rk_1 = rk_0
    b_0 = load_strength(beta, row * HV + i_hv, m_0, o_h, HV, BETA)
    tl.store(b + p * BT + o_h, b_0)
    b_1 = b_0
    if TWO:
        if not SWAPPED:
            rq_1, rk_1 = _inverse_norms(q, k, p_q + HB * H * K, o_1, m_1, H, K, BK, HB, L2)
        b_1 = load_strength(beta, (row + HB) * HV + i_hv, m_1, o_1, HV, BETA)
        tl.store(b + p * BT + HB + o_1, b_1)
    if i_hv % R == 0:
        tl.store(rq + p_r + o_h, rq_0)
        tl.store(rk + p_r + o_h, rk_0)
        if TWO:
            tl.store(rq + p_r + HB + o_1, rq_1)
            tl.store(rk + p_r + HB + o_1, rk_1)
    p_g = (row * HV + i_hv) * K
    rate = decay_rate(A_log, i_hv)
    if ANCHORED:
        n_00, m_00, n_10, m_10, n_11, m_11 = anchored_products(
            q, k, g, dt_bias, qd, kd, kw, GC, c, p_q, p_g, p, i_hv, rq_0, rk_0, b_0, m_0, rq_1, rk_1, b_1, m_1, o_1, rate,
            lower_bound, lift, scale, H, HV, K, BT, BK, HB, GATE, BIAS, PREC, SUMS, FAST)
    else:
        n_00, m_00, n_10, m_10, n_11, m_11 = _chunk_products(
            q, k, g, dt_bias, qd, kd, kw, GC, c, p_q, p_g, p, i_hv, rq_0, rk_0, b_0, m_0, rq_1, rk_1, b_1, m_1, rate, lower_bound,
            lift, scale, H, HV, K, BT, BK, HB, GATE, BIAS, SAFE, PAIRWISE, PREC, COPY_LHS)
    p_c = p * (BT * BT)
    p_0 = p_c + o_h[:, None] * BT + o_h[None, :]
    b_w = (rk_0 * b_0)[None, :]
    tl.store(P + p_0, (m_00 * (rq_0 * scale)[:, None] * b_w).to(P.dtype.element_ty))
    n_00 = n_00 * rk_0[:, None] * b_w
    if SWAPPED:
        a_0, a_1 = two_unit_lower_inverses(n_00, n_11 * rk_1[:, None] * (rk_1 * b_1)[None, :], BI, PREC_INV, DOT_BLOCKS,
                                           True)
    else:
        a_0 = unit_lower_inverse(n_00, HB, BI, PREC_INV, DOT_BLOCKS)
    tl.store(A + p_0, a_0.to(A.dtype.element_ty))
    if TWO:
        p_10 = p_c + HB * BT + o_1[:, None] * BT + o_h[None, :]
        p_11 = p_c + HB * BT + HB + o_1[:, None] * BT + o_1[None, :]
        tl.store(P + p_10, (m_10 * (rq_1 * scale)[:, None] * b_w).to(P.dtype.element_ty))
        n_10 = float32_dot(n_10 * rk_1[:, None] * b_w, a_0, PREC_INV)
        b_w = (rk_1 * b_1)[None, :]
        tl.store(P + p_11, (m_11 * (rq_1 * scale)[:, None] * b_w).to(P.dtype.element_ty))
        if not SWAPPED:
            a_1 = unit_lower_inverse(n_11 * rk_1[:, None] * b_w, HB, BI, PREC_INV, DOT_BLOCKS)
        tl.store(A + p_11, a_1.to(A.dtype.element_ty))
        n_10 = float32_dot(a_1, n_10, PREC_INV)
        tl.store(A + p_10, (-n_10).to(A.dtype.element_ty))
        b_z = tl.zeros([HB, HB], dtype=tl.float32)
        tl.store(P + p_0 + HB, b_z.to(P.dtype.element_ty))
        tl.store(A + p_0 + HB, b_z.to(A.dtype.element_ty))


@triton.jit
def _prep_task(q, k, g, beta, A_log, dt_bias, qd, kd, kw, A, P, GC, b, rq, rk, c, i_task, cu, chunks, N, T, NTS, NS, scale,
               lower_bound, lift, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
               L2: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr, BETA: tl.constexpr, SAFE: tl.constexpr,
               VARLEN: tl.constexpr, GRAPH_CAPTURE: tl.constexpr, PREC: tl.constexpr, PREC_INV: tl.constexpr, BI: tl.constexpr,
               DOT_BLOCKS: tl.constexpr, COPY_LHS: tl.constexpr, PAIRWISE: tl.constexpr, SUMS: tl.constexpr, FAST: tl.constexpr):
    i_n, i_t = chunk(chunks, i_task // HV, NTS, VARLEN)
    live = True
    if GRAPH_CAPTURE:
        live = (i_n >= 0) & (i_n < N)
    if live:
        _prep_chunk(q, k, g, beta, A_log, dt_bias, qd, kd, kw, A, P, GC, b, rq, rk, c, i_n, i_t, i_task % HV, cu, T, NS, scale,
                    lower_bound, lift, H, HV, K, BT, BK, L2, GATE, BIAS, BETA, SAFE, VARLEN, PREC, PREC_INV, BI, DOT_BLOCKS,
                    COPY_LHS, PAIRWISE, SUMS, FAST)


@triton.jit(do_not_specialize=["N", "T", "NT", "NTS", "NS"])
def kda_prep(q, k, g, beta, A_log, dt_bias, qd, kd, kw, A, P, GC, b, rq, rk, c, cu, chunks, N, T, NT, NTS, NS, scale,
             lower_bound, lift, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
             L2: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr, BETA: tl.constexpr, SAFE: tl.constexpr,
             VARLEN: tl.constexpr, GRAPH_CAPTURE: tl.constexpr, PREC: tl.constexpr, PREC_INV: tl.constexpr,
             BI: tl.constexpr, DOT_BLOCKS: tl.constexpr, COPY_LHS: tl.constexpr, PAIRWISE: tl.constexpr,
             SUMS: tl.constexpr, FAST: tl.constexpr, PERSISTENT: tl.constexpr):
    """Tasks (chunk, value head), a program each or, PERSISTENT, grid-stride; the first value head of a key head stores rq, rk."""
    tasks = chunk_count(cu, N, T, NT, BT, GRAPH_CAPTURE) * HV
    first = tl.program_id(0)
    if PERSISTENT:
        for i_task in range(first, tasks, tl.num_programs(0)):
            _prep_task(q, k, g, beta, A_log, dt_bias, qd, kd, kw, A, P, GC, b, rq, rk, c, i_task, cu, chunks, N, T, NTS, NS,
                       scale, lower_bound, lift, H, HV, K, BT, BK, L2, GATE, BIAS, BETA, SAFE, VARLEN, GRAPH_CAPTURE, PREC,
                       PREC_INV, BI, DOT_BLOCKS, COPY_LHS, PAIRWISE, SUMS, FAST)
    elif first < tasks:
        _prep_task(q, k, g, beta, A_log, dt_bias, qd, kd, kw, A, P, GC, b, rq, rk, c, first, cu, chunks, N, T, NTS, NS,
                   scale, lower_bound, lift, H, HV, K, BT, BK, L2, GATE, BIAS, BETA, SAFE, VARLEN, GRAPH_CAPTURE, PREC,
                   PREC_INV, BI, DOT_BLOCKS, COPY_LHS, PAIRWISE, SUMS, FAST)


def run_prep(q: torch.Tensor, k: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, prologue: Prologue, packing: Packing,
             scale: float) -> Operands:
    """q̃, k̃, k_w `[B, T, HV, K]`, A, P `[NS, HV, BT, BT]` in q's dtype; G_C `[NS, HV, K]`, b `[NS, HV, BT]`, rq, rk
    `[NS, H, BT]`, c `[NS, HV, BT, K]` float32; all but the first three indexed by chunk slot."""
    (B, T, H, K), HV, BT, NS = q.shape, g.shape[2], packing.BT, packing.NS
    rows = [q.new_empty(B, T, HV, K) for _ in range(3)]
    square = [q.new_empty(NS, HV, BT, BT) for _ in "AP"]
    G, *vectors = (q.new_empty(NS, *shape, dtype=torch.float32) for shape in ((HV, K), (HV, BT), (H, BT), (H, BT)))
    sums = q.new_empty(NS, HV, BT, K, dtype=torch.float32) if prologue.needs_grad else None
    operands = Operands(*rows, *square, G, None, *vectors, sums)
    record = record_for("kda_prep", q.device, K=K, BT=BT, dtype=q.dtype)
    safe, lift = anchoring(prologue, q.dtype, record)
    launch(kda_prep, programs_of(packing.NT * HV, record, q.device), q, k, g, beta, prologue.A_log, prologue.dt_bias, *rows,
           *square, G, *vectors, sums, packing.cu, packing.chunks, packing.N, packing.T, packing.NT, packing.NTS, NS, scale,
           prologue.lowest, lift, record=record, H=H, HV=HV, K=K, BT=BT, **prologue.constexprs, SAFE=safe, VARLEN=packing.varlen,
           GRAPH_CAPTURE=packing.capture)
    return operands
