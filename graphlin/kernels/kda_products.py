"""Kimi Delta Attention with a bounded gate: a chunk's decayed q and k and the products of its pairs, by matrix products alone.

A half of 32 rows stays in the threads where matrix products leave it. Sums of log decays are products with zeros and ones, which
need no scan from thread to thread. The pairs inside blocks of 16 rows, which have the constant anchor (see kda_anchors), and the
others have accumulators of their own, masked once at the end.
"""

import triton
import triton.language as tl

from graphlin.kernels.common import row_mask
from graphlin.kernels.gates import exp2, load_channel_gates, masked_decay
from graphlin.kernels.triangular import leading_half


@triton.jit
def _summands(SIZE: tl.constexpr, BEHIND: tl.constexpr, HB: tl.constexpr, SUMS: tl.constexpr):
    """[HB, HB] zeros and ones that sum over the rows of a block of SIZE rows, up to a row or BEHIND it."""
    o = tl.arange(0, HB)
    if BEHIND:
        m = o[:, None] < o[None, :]
    else:
        m = o[:, None] >= o[None, :]
    m = m & ((o // SIZE)[:, None] == (o // SIZE)[None, :])
    return tl.where(m, 1.0, 0.0).to(tl.float32 if SUMS == 1 else tl.bfloat16)


@triton.jit
def _sums(b_one, b_g, at, HB: tl.constexpr, BK: tl.constexpr, SUMS: tl.constexpr, PREC: tl.constexpr):
    """at + one g: [HB, BK].

    SUMS 1: as float32. 2: with g rounded to 16 bits, whose bfloat16 halves give exact products. As all sums are over the same
    rounded decays, their differences fit: it is as if the gate were another by 2^-17 of itself.
    """
    b_c = tl.zeros([HB, BK], dtype=tl.float32) + at
    if SUMS == 1:
        b_c = tl.dot(b_one, b_g, b_c, input_precision=PREC)
    else:
        b_h = leading_half(b_g)
        b_c = tl.dot(b_one, (b_g - b_h).to(tl.bfloat16), b_c)
        b_c = tl.dot(b_one, b_h.to(tl.bfloat16), b_c)
    return b_c


@triton.jit
def _block_product(b_x, b_y, b_z, HB: tl.constexpr, BK: tl.constexpr, PREC: tl.constexpr):
    """z + x yᵀ of each block of 16 rows: [HB // 16, 16, 16]."""
    NB: tl.constexpr = HB // 16
    b_y = tl.permute(tl.reshape(b_y, [NB, 16, BK]), (0, 2, 1))
    return tl.dot(tl.reshape(b_x, [NB, 16, BK]), b_y, b_z, input_precision=PREC)


@triton.jit
def _half(q, k, g, dt_bias, c, i_hv, m_t, o_k, rate, lower_bound, l_2, s_block, s_later, s_half, s_rest, n_b, m_b, n_h, m_h,
          H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, HB: tl.constexpr, GATE: tl.constexpr,
          BIAS: tl.constexpr, DT: tl.constexpr, PREC: tl.constexpr, SUMS: tl.constexpr, FAST: tl.constexpr):
    """One half of a chunk, one tile of channels: q and k decayed from its beginning, k decayed to its end (`[HB, BK]`), the sum
    of its log decays; adds the products of the pairs in its blocks and between them. Stores c where a backward will read it."""
    o_h = tl.arange(0, HB)
    m = row_mask(m_t, o_k, K, BK)
    p = o_h[:, None] * (H * K) + o_k[None, :]
    b_g = masked_decay(load_channel_gates(g, dt_bias, 0, i_hv, m_t, o_h, o_k, HV, K, BK, BIAS), m, rate, lower_bound, GATE, FAST)
    b_q = tl.load(q + p, mask=m, other=0.).to(tl.float32)                                                # [HB, BK]
    b_k = tl.load(k + p, mask=m, other=0.).to(tl.float32)
    b_c = _sums(s_block, b_g, l_2, HB, BK, SUMS, PREC)
    if c is not None:
        tl.store(c + o_h[:, None] * K + o_k[None, :], b_c - l_2, mask=(o_k < K)[None, :])
    b_e = exp2(b_c, FAST)
    x_q = (b_q * b_e).to(DT)
    x_k = (b_k * b_e).to(DT)
    b_y = (b_k * exp2(-b_c, FAST)).to(DT)
    n_b = _block_product(x_k, b_y, n_b, HB, BK, PREC)
    m_b = _block_product(x_q, b_y, m_b, HB, BK, PREC)
    b_y = tl.trans((b_k * exp2(_sums(s_later, b_g, -l_2, HB, BK, SUMS, PREC), FAST)).to(DT))
    n_h = tl.dot(x_k, b_y, n_h, input_precision=PREC)
    m_h = tl.dot(x_q, b_y, m_h, input_precision=PREC)
    b_c = _sums(s_half, b_g, 0.0, HB, BK, SUMS, PREC)
    b_t = tl.sum(tl.where((o_h == HB - 1)[:, None], b_c, 0.0), 0)
    b_e = exp2(b_c, FAST)
    b_w = b_k * exp2(_sums(s_rest, b_g, 0.0, HB, BK, SUMS, PREC), FAST)
    return b_q * b_e, b_k * b_e, b_w, b_t, n_b, m_b, n_h, m_h


@triton.jit
def _half_matrix(b_b, b_h, HB: tl.constexpr):
    """`[HB, HB]` of the products in blocks and those between them."""
    NB: tl.constexpr = HB // 16
    o = tl.arange(0, HB) // 16
    b_b = tl.reshape(tl.broadcast_to(b_b[:, :, None, :], [NB, 16, NB, 16]), [HB, HB])
    return tl.where(o[:, None] == o[None, :], b_b, b_h)


@triton.jit
def anchored_products(q, k, g, dt_bias, qd, kd, kw, GC, c, p_q, p_g, p_b, i_hv, rq_0, rk_0, b_0, m_0, rq_1, rk_1, b_1, m_1, rate,
                      lower_bound, lift, scale, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, BT: tl.constexpr,
                      BK: tl.constexpr, HB: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr, PREC: tl.constexpr,
                      SUMS: tl.constexpr, FAST: tl.constexpr):
    """N and M of the blocks of a chunk without β, r_q, r_k; stores q̃, k̃, k_w and G_C on the way, tile by tile."""
    NK: tl.constexpr = (K + BK - 1) // BK
    DT: tl.constexpr = qd.dtype.element_ty
    o_h = tl.arange(0, HB)
    n_b0 = tl.zeros([HB // 16, 16, 16], dtype=tl.float32)
    m_b0 = tl.zeros([HB // 16, 16, 16], dtype=tl.float32)
    n_b1 = tl.zeros([HB // 16, 16, 16], dtype=tl.float32)
    m_b1 = tl.zeros([HB // 16, 16, 16], dtype=tl.float32)
    n_00 = tl.zeros([HB, HB], dtype=tl.float32)
    m_00 = tl.zeros([HB, HB], dtype=tl.float32)
    n_10 = tl.zeros([HB, HB], dtype=tl.float32)
    m_10 = tl.zeros([HB, HB], dtype=tl.float32)
    n_11 = tl.zeros([HB, HB], dtype=tl.float32)
    m_11 = tl.zeros([HB, HB], dtype=tl.float32)
    s_block = _summands(16, False, HB, SUMS)
    s_later = _summands(16, True, HB, SUMS)
    s_half = _summands(HB, False, HB, SUMS)
    s_rest = _summands(HB, True, HB, SUMS)
    l_2 = tl.log2(lift)
    q += p_q
    k += p_q
    g += p_g
    qd += p_g
    kd += p_g
    kw += p_g
    c_1 = c
    if c is not None:
        c += p_b * (BT * K)
        c_1 = c + HB * K
    for i_k in range(0, NK):
        o_k = i_k * BK + tl.arange(0, BK)
        p_y = o_h[:, None] * (HV * K) + o_k[None, :]
        m_y = row_mask(m_0, o_k, K, BK)
        q_0, k_0, w_0, t_0, n_b0, m_b0, n_00, m_00 = _half(
            q, k, g, dt_bias, c, i_hv, m_0, o_k, rate, lower_bound, l_2, s_block, s_later, s_half, s_rest, n_b0, m_b0, n_00, m_00,
            H, HV, K, BK, HB, GATE, BIAS, DT, PREC, SUMS, FAST)
        tl.store(qd + p_y, (q_0 * (rq_0 * scale)[:, None]).to(DT), mask=m_y)
        tl.store(kd + p_y, (k_0 * rk_0[:, None]).to(DT), mask=m_y)
        if BT == 64:
            p_z = p_y + HB * HV * K
            m_z = row_mask(m_1, o_k, K, BK)
            b_y = tl.trans(w_0.to(DT))
            q_1, k_1, w_1, t_1, n_b1, m_b1, n_11, m_11 = _half(
                q + HB * H * K, k + HB * H * K, g + HB * HV * K, dt_bias, c_1, i_hv, m_1, o_k, rate, lower_bound, l_2, s_block,
                s_later, s_half, s_rest, n_b1, m_b1, n_11, m_11, H, HV, K, BK, HB, GATE, BIAS, DT, PREC, SUMS, FAST)
            n_10 = tl.dot(k_1.to(DT), b_y, n_10, input_precision=PREC)
            m_10 = tl.dot(q_1.to(DT), b_y, m_10, input_precision=PREC)
            b_e = exp2(t_0, FAST)[None, :]
            tl.store(qd + p_z, (q_1 * b_e * (rq_1 * scale)[:, None]).to(DT), mask=m_z)
            tl.store(kd + p_z, (k_1 * b_e * rk_1[:, None]).to(DT), mask=m_z)
            tl.store(kw + p_z, (w_1 * (b_1 * rk_1)[:, None]).to(DT), mask=m_z)
            w_0 = w_0 * exp2(t_1, FAST)[None, :]
            t_0 += t_1
        tl.store(kw + p_y, (w_0 * (b_0 * rk_0)[:, None]).to(DT), mask=m_y)
        tl.store(GC + p_b * K + o_k, t_0, mask=o_k < K)
    strict = o_h[:, None] > o_h[None, :]
    lower = o_h[:, None] >= o_h[None, :]
    n_00 = tl.where(strict, _half_matrix(n_b0, n_00, HB), 0.0)
    m_00 = tl.where(lower, _half_matrix(m_b0, m_00, HB), 0.0)
    n_11 = tl.where(strict, _half_matrix(n_b1, n_11, HB), 0.0)
    m_11 = tl.where(lower, _half_matrix(m_b1, m_11, HB), 0.0)
    return n_00, m_00, n_10, m_10, n_11, m_11
