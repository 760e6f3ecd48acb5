"""The delta rules' products of a chunk for the gradients: of outputs' and values' gradients with errors and with states."""

import triton
import triton.language as tl

from graphlin.kernels.common import row_mask


@triton.jit
def error_products(do, dv, E, p_v, m_t, HV: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr,
                   PREC: tl.constexpr):
    """F = dO Eᵀ and H = dV Eᵀ, [BT, BT]."""
    NV: tl.constexpr = (V + BV - 1) // BV
    o_c = tl.arange(0, BT)
    b_f = tl.zeros([BT, BT], dtype=tl.float32)
    b_h = tl.zeros([BT, BT], dtype=tl.float32)
    for i_v in range(0, NV):
        o_v = i_v * BV + tl.arange(0, BV)
        m_tv = row_mask(m_t, o_v, V, BV)
        p = p_v + o_c[:, None] * (HV * V) + o_v[None, :]
        b_et = tl.trans(tl.load(E + p, mask=m_tv, other=0.))                                             # [BV, BT]
        b_f = tl.dot(tl.load(do + p, mask=m_tv, other=0.), b_et, b_f, input_precision=PREC)
        b_h = tl.dot(tl.load(dv + p, mask=m_tv, other=0.), b_et, b_h, input_precision=PREC)
    return b_f, b_h


@triton.jit
def state_products(do, E, dv, St, Rt, p_v, p_s, i_k, m_t, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
                   BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PREC: tl.constexpr):
    """E Rᵀ, dO Sᵀ and dV Sᵀ for one K tile, [BT, BK], and ⟨S, R⟩ over it; the states are stored transposed."""
    NV: tl.constexpr = (V + BV - 1) // BV
    o_c = tl.arange(0, BT)
    o_k = i_k * BK + tl.arange(0, BK)
    b_er = tl.zeros([BT, BK], dtype=tl.float32)
    b_os = tl.zeros([BT, BK], dtype=tl.float32)
    b_vs = tl.zeros([BT, BK], dtype=tl.float32)
    b_sr = tl.zeros([BK], dtype=tl.float32)
    for i_v in range(0, NV):
        o_v = i_v * BV + tl.arange(0, BV)
        m_tv = row_mask(m_t, o_v, V, BV)
        m_s = row_mask(o_v < V, o_k, K, BK)
        p_x = p_v + o_c[:, None] * (HV * V) + o_v[None, :]
        p_h = p_s + o_v[:, None] * K + o_k[None, :]
        b_s = tl.load(St + p_h, mask=m_s, other=0.)                                                      # [BV, BK]
        b_r = tl.load(Rt + p_h, mask=m_s, other=0.)
        b_er = tl.dot(tl.load(E + p_x, mask=m_tv, other=0.), b_r, b_er, input_precision=PREC)
        b_os = tl.dot(tl.load(do + p_x, mask=m_tv, other=0.), b_s, b_os, input_precision=PREC)
        b_vs = tl.dot(tl.load(dv + p_x, mask=m_tv, other=0.), b_s, b_vs, input_precision=PREC)
        b_sr += tl.sum(b_s.to(tl.float32) * b_r.to(tl.float32), 0)
    return b_er, b_os, b_vs, b_sr


@triton.jit
def state_product(x, St, p_v, p_s, o_k, m_t, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr,
                  BK: tl.constexpr, BV: tl.constexpr, PREC: tl.constexpr):
    """x Sᵀ for the K tile `o_k`, [BT, BK]; x `[T, HV, V]`, the state is stored transposed."""
    NV: tl.constexpr = (V + BV - 1) // BV
    o_c = tl.arange(0, BT)
    b_y = tl.zeros([BT, BK], dtype=tl.float32)
    for i_v in range(0, NV):
        o_v = i_v * BV + tl.arange(0, BV)
        b_x = tl.load(x + p_v + o_c[:, None] * (HV * V) + o_v[None, :], mask=row_mask(m_t, o_v, V, BV), other=0.)
        b_s = tl.load(St + p_s + o_v[:, None] * K + o_k[None, :], mask=row_mask(o_v < V, o_k, K, BK), other=0.)
        b_y = tl.dot(b_x, b_s, b_y, input_precision=PREC)
    return b_y


@triton.jit
def states_inner(St, Rt, p_s, o_k, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    """⟨S, R⟩ over the K tile `o_k`."""
    NV: tl.constexpr = (V + BV - 1) // BV
    b_sr = tl.zeros([BK], dtype=tl.float32)
    for i_v in range(0, NV):
        o_v = i_v * BV + tl.arange(0, BV)
        p = p_s + o_v[:, None] * K + o_k[None, :]
        m = row_mask(o_v < V, o_k, K, BK)
        b_sr += tl.sum(tl.load(St + p, mask=m, other=0.).to(tl.float32) * tl.load(Rt + p, mask=m, other=0.).to(tl.float32), 0)
    return tl.sum(b_sr, 0)
