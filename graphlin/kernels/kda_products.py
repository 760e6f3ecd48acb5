"""Kimi Delta Attention with a bounded gate: a chunk's decayed q and k and the products of its pairs, by matrix products alone.

A half of 32 rows stays in the threads where matrix products leave it, a block of 16 rows in a warp. Sums of log decays are
products with zeros and ones, which need no scan from thread to thread. The pairs inside blocks, which have the constant anchor
(see kda_anchors), and the others have accumulators of their own, masked once at the end.

What bounds the kernel is registers: a program's accumulators take half of them, and what spills is waited for. The second half
lies with its two blocks swapped: the products between its blocks then fall into columns that the first half leaves zero, and one
accumulator serves both. Of the first half nothing but its keys, decayed to its end, and its whole decay wait for the second;
addresses are a scalar and offsets that stay the same.
"""

import triton
import triton.language as tl

from graphlin.kernels.common import row_mask
from graphlin.kernels.gates import exp2, masked_decay
from graphlin.kernels.triangular import leading_half


@triton.jit
def _summands(SUMS: tl.constexpr):
    """Zeros and ones that sum over the rows of a block of 16 up to a row, or behind it (`[2, 16, 16]`), and over those of the
    other block, or of both (`[32, 32]`)."""
    DT: tl.constexpr = tl.float32 if SUMS == 1 else tl.bfloat16
    i = tl.arange(0, 16)
    o_b = tl.arange(0, 32) // 16
    upto = tl.broadcast_to((i[:, None] >= i[None, :])[None, :, :], [2, 16, 16])
    behind = tl.broadcast_to((i[:, None] < i[None, :])[None, :, :], [2, 16, 16])
    return (tl.where(upto, 1.0, 0.0).to(DT), tl.where(behind, 1.0, 0.0).to(DT),
            tl.where(o_b[:, None] != o_b[None, :], 1.0, 0.0).to(DT), tl.full([32, 32], 1.0, DT))


@triton.jit
def _sums(b_one, b_h, b_l, SUMS: tl.constexpr, PREC: tl.constexpr):
    """Sums of log decays, given as _decays has them."""
    if SUMS == 1:
        b_c = tl.dot(b_one, b_h, input_precision=PREC)
    else:
        b_c = tl.dot(b_one, b_h, tl.dot(b_one, b_l))
    return b_c


@triton.jit
def _decays(g, dt_bias, k_0, o_x, m, m_k, rate, lower_bound, BK: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr,
            SUMS: tl.constexpr, FAST: tl.constexpr):
    """Log decays of a half, a tile of channels from k_0 on, as operands of sums: of rows, and of rows in blocks.

    SUMS 1: as float32. 2: rounded to 16 bits, whose two bfloat16 halves give exact products. As all sums are over the same
    rounded decays, their differences fit: it is as if the gate were another by 2^-17 of itself.
    """
    b_u = tl.load(g + k_0 + o_x, mask=m, other=0.).to(tl.float32)
    if BIAS:
        b_u += tl.load(dt_bias + k_0 + tl.arange(0, BK), mask=m_k, other=0.).to(tl.float32)[None, :]
    b_h = masked_decay(b_u, m, rate, lower_bound, GATE, FAST)
    b_l = b_h
    if SUMS == 2:
        b_h = leading_half(b_h)
        b_l = (b_l - b_h).to(tl.bfloat16)
        b_h = b_h.to(tl.bfloat16)
    return b_h, b_l, tl.reshape(b_h, [2, 16, BK]), tl.reshape(b_l, [2, 16, BK])


@triton.jit
def _half(q, k, c, g_h, g_l, h_b, l_b, o_x, o_c, m, m_k, first, lift, s_upto, s_behind, s_other, n_b, m_b, n_h, m_h,
          BK: tl.constexpr, DT: tl.constexpr, PREC: tl.constexpr, SUMS: tl.constexpr, FAST: tl.constexpr):
    """One half of a chunk, one tile of channels: q and k decayed from its beginning, k decayed to its end, the sum of all its
    log decays and their decay, in every row (`[HB, BK]`); adds the products of the pairs in its blocks and between them. Stores
    c where a backward will read it. first tells its first block. Readers depend on no later gate, not even by rounding.
    """
    b_q = tl.reshape(tl.load(q + o_x, mask=m, other=0.).to(tl.float32), [2, 16, BK])
    b_k = tl.reshape(tl.load(k + o_x, mask=m, other=0.).to(tl.float32), [2, 16, BK])
    b_a = tl.reshape(_sums(s_other, g_h, g_l, SUMS, PREC), [2, 16, BK])
    b_c = _sums(s_upto, h_b, l_b, SUMS, PREC)
    b_r = _sums(s_behind, h_b, l_b, SUMS, PREC)
    if c is not None:
        tl.store(c + o_c, tl.reshape(b_c, [32, BK]), mask=m_k[None, :])
    b_e = exp2(b_c, FAST)
    x_q = (b_q * (b_e * lift)).to(DT)
    x_k = (b_k * (b_e * lift)).to(DT)
    b_y = tl.permute((b_k * (exp2(-b_c, FAST) * (1.0 / lift))).to(DT), (0, 2, 1))
    n_b = tl.dot(x_k, b_y, n_b, input_precision=PREC)
    m_b = tl.dot(x_q, b_y, m_b, input_precision=PREC)
    b_w = exp2(b_r, FAST)
    b_y = tl.trans(tl.reshape((b_k * (b_w * tl.where(first, 1.0 / lift, 0.0))).to(DT), [32, BK]))
    n_h = tl.dot(tl.reshape(x_k, [32, BK]), b_y, n_h, input_precision=PREC)
    m_h = tl.dot(tl.reshape(x_q, [32, BK]), b_y, m_h, input_precision=PREC)
    b_o = exp2(b_a, FAST)
    b_e *= tl.where(first, 1.0, b_o)
    b_w *= tl.where(first, b_o, 1.0)
    return (tl.reshape(b_q * b_e, [32, BK]), tl.reshape(b_k * b_e, [32, BK]), tl.reshape(b_k * b_w, [32, BK]),
            tl.reshape(b_c + b_r + b_a, [32, BK]), tl.reshape(b_e * b_w, [32, BK]), n_b, m_b, n_h, m_h)


@triton.jit
def _half_matrix(b_b, b_h, first, STRICT: tl.constexpr):
    """`[HB, HB]` of the products in blocks and those between them, of pairs i > j or i >= j."""
    o = tl.arange(0, 32)
    b_b = tl.reshape(tl.broadcast_to(b_b[:, :, None, :], [2, 16, 2, 16]), [32, 32])
    if STRICT:
        b_b = tl.where(o[:, None] > o[None, :], b_b, 0.0)
    else:
        b_b = tl.where(o[:, None] >= o[None, :], b_b, 0.0)
    return tl.where((o // 16)[:, None] == (o // 16)[None, :], b_b, tl.where(first, 0.0, b_h))


@triton.jit
def anchored_products(q, k, g, dt_bias, qd, kd, kw, GC, c, p_q, p_g, p_b, i_hv, rq_0, rk_0, b_0, m_0, rq_1, rk_1, b_1, m_1, o_1,
                      rate, lower_bound, lift, scale, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, BT: tl.constexpr,
                      BK: tl.constexpr, HB: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr, PREC: tl.constexpr,
                      SUMS: tl.constexpr, FAST: tl.constexpr):
    """N and M of the blocks of a chunk without β, r_q, r_k; stores q̃, k̃, k_w and G_C on the way, tile by tile. o_1 are the rows
    of the second half, its blocks swapped."""
    NK: tl.constexpr = (K + BK - 1) // BK
    TWO: tl.constexpr = BT == 64
    DT: tl.constexpr = qd.dtype.element_ty
    tl.static_assert(HB == 32 and NK <= HB)
    n_b0 = tl.zeros([2, 16, 16], dtype=tl.float32)
    m_b0 = tl.zeros([2, 16, 16], dtype=tl.float32)
    n_b1 = tl.zeros([2, 16, 16], dtype=tl.float32)
    m_b1 = tl.zeros([2, 16, 16], dtype=tl.float32)
    n_h = tl.zeros([HB, HB], dtype=tl.float32)
    m_h = tl.zeros([HB, HB], dtype=tl.float32)
    n_10 = tl.zeros([HB, HB], dtype=tl.float32)
    m_10 = tl.zeros([HB, HB], dtype=tl.float32)
    b_G = tl.zeros([HB, BK], dtype=tl.float32)                                                           # row i: G_C of tile i
    s_upto, s_behind, s_other, s_all = _summands(SUMS)
    q += p_q
    k += p_q
    g += p_g
    qd += p_g
    kd += p_g
    kw += p_g
    if BIAS:
        dt_bias += i_hv * K
    if c is not None:
        c += p_b * (BT * K)
    o_h = tl.arange(0, HB)
    o_k = tl.arange(0, BK)
    first_0 = (tl.arange(0, 2) == 0)[:, None, None]
    first_1 = (tl.arange(0, 2) == 1)[:, None, None]
    x_0 = o_h[:, None] * (H * K) + o_k[None, :]
    x_1 = (HB + o_1)[:, None] * (H * K) + o_k[None, :]
    y_0 = o_h[:, None] * (HV * K) + o_k[None, :]
    y_1 = (HB + o_1)[:, None] * (HV * K) + o_k[None, :]
    z_0 = o_h[:, None] * K + o_k[None, :]
    z_1 = (HB + o_1)[:, None] * K + o_k[None, :]
    for i_k in range(0, NK):
        p = i_k * BK
        m_k = p + o_k < K
        m_y = row_mask(m_0, p + o_k, K, BK)
        m_z = row_mask(m_1, p + o_k, K, BK)
        g_0, l_0, gb_0, lb_0 = _decays(g, dt_bias, p, y_0, m_y, m_k, rate, lower_bound, BK, GATE, BIAS, SUMS, FAST)
        if TWO:
            g_1, l_1, gb_1, lb_1 = _decays(g, dt_bias, p, y_1, m_z, m_k, rate, lower_bound, BK, GATE, BIAS, SUMS, FAST)
        b_q, b_k, b_w, t_0, d_0, n_b0, m_b0, n_h, m_h = _half(
            q + p, k + p, c, g_0, l_0, gb_0, lb_0, x_0, p + z_0, m_y, m_k, first_0, lift, s_upto, s_behind, s_other, n_b0, m_b0,
            n_h, m_h, BK, DT, PREC, SUMS, FAST)
        tl.store(qd + p + y_0, (b_q * (rq_0 * scale)[:, None]).to(DT), mask=m_y)
        tl.store(kd + p + y_0, (b_k * rk_0[:, None]).to(DT), mask=m_y)
        b_y = tl.trans(b_w.to(DT))
        if TWO:
            t_1 = _sums(s_all, g_1, l_1, SUMS, PREC)
            b_w = b_w * exp2(t_1, FAST)
            t_0 += t_1
        tl.store(kw + p + y_0, (b_w * (b_0 * rk_0)[:, None]).to(DT), mask=m_y)
        b_G = tl.where((o_h == i_k)[:, None], t_0, b_G)
        if TWO:
            b_q, b_k, b_w, _, _, n_b1, m_b1, n_h, m_h = _half(
                q + p, k + p, c, g_1, l_1, gb_1, lb_1, x_1, p + z_1, m_z, m_k, first_1, lift, s_upto, s_behind, s_other, n_b1,
                m_b1, n_h, m_h, BK, DT, PREC, SUMS, FAST)
            n_10 = tl.dot(b_k.to(DT), b_y, n_10, input_precision=PREC)
            m_10 = tl.dot(b_q.to(DT), b_y, m_10, input_precision=PREC)
            tl.store(qd + p + y_1, (b_q * d_0 * (rq_1 * scale)[:, None]).to(DT), mask=m_z)
            tl.store(kd + p + y_1, (b_k * d_0 * rk_1[:, None]).to(DT), mask=m_z)
            tl.store(kw + p + y_1, (b_w * (b_1 * rk_1)[:, None]).to(DT), mask=m_z)
    o_G = o_h[:, None] * BK + o_k[None, :]
    tl.store(GC + p_b * K + o_G, b_G, mask=o_G < K)
    n_00 = _half_matrix(n_b0, n_h, (o_h < 16)[:, None], True)
    m_00 = _half_matrix(m_b0, m_h, (o_h < 16)[:, None], False)
    n_11 = _half_matrix(n_b1, n_h, (o_1 < 16)[:, None], True)
    m_11 = _half_matrix(m_b1, m_h, (o_1 < 16)[:, None], False)
    return n_00, m_00, n_10, m_10, n_11, m_11
