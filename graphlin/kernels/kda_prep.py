"""Kimi Delta Attention, first kernel: gates, row norms, decayed queries and keys, and the two C x C matrices of every chunk.

With G `[C, K]` the chunk sum of log decays, `N_ij = Σ_d k_id k_jd e^(G_id - G_jd)` for i > j, M likewise with q_i for i >= j,
and `B = diag(β)`:
    q̃ = scale q∘e^G,   k̃ = k∘e^G,   k_w = β k∘e^(G_C - G),   A = (I + N B)⁻¹,   P = scale · M B
A chunk of 64 rows is two halves of 32: a block 00 (upper), 11 (lower) within one half, 10 between them.
"""

import torch
import triton
import triton.language as tl

from graphlin.kernels.common import chunk, chunk_count, chunk_slot, keep, row_mask, sequence
from graphlin.kernels.delta_problem import Operands, Prologue
from graphlin.kernels.gates import decay_rate, inverse_norm, load_channel_gates, load_strength, masked_decay
from graphlin.kernels.kda_anchors import bounded_decay, bounded_pairs, level_decay, level_pairs
from graphlin.kernels.kda_pairwise import pairwise_products
from graphlin.kernels.launch import grid_stride, launch, record_for
from graphlin.kernels.packing import Packing
from graphlin.kernels.triangular import unit_lower_inverse


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
def _products(b_q, b_k, b_er, b_ec, m, b_n, b_m, DT: tl.constexpr, PREC: tl.constexpr, COPY_LHS: tl.constexpr):
    """Adds the pairs of mask m, decayed by er of the reader and ec of the writer, to k kᵀ and q kᵀ: [HB, HB]."""
    y = tl.trans((b_k * b_ec).to(DT))
    b_n += tl.where(m, tl.dot(keep((b_k * b_er).to(DT), COPY_LHS), y, input_precision=PREC), 0.0)
    b_m += tl.where(m, tl.dot((b_q * b_er).to(DT), y, input_precision=PREC), 0.0)
    return b_n, b_m


@triton.jit
def _level_products(b_q, b_k, b_G, b_g, b_n, b_m, h: tl.constexpr, HB: tl.constexpr, BK: tl.constexpr, DT: tl.constexpr,
                    PREC: tl.constexpr, COPY_LHS: tl.constexpr):
    f = level_decay(b_G, b_g, h, HB, BK)
    return _products(b_q, b_k, f, f, level_pairs(h, HB), b_n, b_m, DT, PREC, COPY_LHS)


@triton.jit
def _half_products(b_q, b_k, b_G, b_g, b_n, b_m, middle, HB: tl.constexpr, BK: tl.constexpr, SAFE: tl.constexpr,
                   DT: tl.constexpr, PREC: tl.constexpr, COPY_LHS: tl.constexpr, PAIRWISE: tl.constexpr):
    """All pairs i > j of one half, added to b_n and b_m."""
    if HB == 32:
        b_n, b_m = _level_products(b_q, b_k, b_G, b_g, b_n, b_m, 16, HB, BK, DT, PREC, COPY_LHS)
    if PAIRWISE:
        b_n, b_m = pairwise_products(b_q, b_k, b_G, b_n, b_m, HB, BK)
    elif SAFE:
        b_er, b_ec = bounded_decay(b_G, middle, HB, BK)
        b_n, b_m = _products(b_q, b_k, b_er, b_ec, bounded_pairs(HB), b_n, b_m, DT, PREC, COPY_LHS)
    else:
        b_n, b_m = _level_products(b_q, b_k, b_G, b_g, b_n, b_m, 8, HB, BK, DT, PREC, COPY_LHS)
        b_n, b_m = _level_products(b_q, b_k, b_G, b_g, b_n, b_m, 4, HB, BK, DT, PREC, COPY_LHS)
        b_n, b_m = _level_products(b_q, b_k, b_G, b_g, b_n, b_m, 2, HB, BK, DT, PREC, COPY_LHS)
        b_n, b_m = _level_products(b_q, b_k, b_G, b_g, b_n, b_m, 1, HB, BK, DT, PREC, COPY_LHS)
    return b_n, b_m


@triton.jit
def _chunk_products(q, k, g, dt_bias, qd, kd, kw, GC, p_q, p_g, p_b, i_hv, rq_0, rk_0, b_0, m_0, rq_1, rk_1, b_1, m_1,
                    rate, lower_bound, middle, scale, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, BK: tl.constexpr,
                    HB: tl.constexpr, TWO: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr, SAFE: tl.constexpr,
                    PREC: tl.constexpr, COPY_LHS: tl.constexpr, PAIRWISE: tl.constexpr):
    """N and M of the blocks of a chunk without β, r_q, r_k; stores q̃, k̃, k_w and G_C on the way, tile by tile."""
    NK: tl.constexpr = (K + BK - 1) // BK
    DT: tl.constexpr = qd.dtype.element_ty
    o_h = tl.arange(0, HB)
    eye = o_h[:, None] == o_h[None, :]
    n_00 = tl.zeros([HB, HB], dtype=tl.float32)
    m_00 = tl.zeros([HB, HB], dtype=tl.float32)
    n_10 = tl.zeros([HB, HB], dtype=tl.float32)
    m_10 = tl.zeros([HB, HB], dtype=tl.float32)
    n_11 = tl.zeros([HB, HB], dtype=tl.float32)
    m_11 = tl.zeros([HB, HB], dtype=tl.float32)
    for i_k in range(0, NK):
        o_k = i_k * BK + tl.arange(0, BK)
        p_x = p_q + o_h[:, None] * (H * K) + o_k[None, :]
        p_y = p_g + o_h[:, None] * (HV * K) + o_k[None, :]
        m_x = row_mask(m_0, o_k, K, BK)
        q_0 = tl.load(q + p_x, mask=m_x, other=0.).to(tl.float32)                                        # [HB, BK]
        k_0 = tl.load(k + p_x, mask=m_x, other=0.).to(tl.float32)
        g_0 = masked_decay(load_channel_gates(g, dt_bias, p_g, i_hv, m_0, o_h, o_k, HV, K, BK, BIAS), m_x, rate,
                           lower_bound, GATE)
        G_0 = tl.cumsum(g_0, 0)
        t_0 = tl.sum(g_0, 0)
        n_00, m_00 = _half_products(q_0, k_0, G_0, g_0, n_00, m_00, middle, HB, BK, SAFE, DT, PREC, COPY_LHS, PAIRWISE)
        m_00 += tl.where(eye, tl.sum(q_0 * k_0, 1)[:, None], 0.0)
        b_e = tl.exp(G_0)
        tl.store(qd + p_y, (q_0 * b_e * (rq_0 * scale)[:, None]).to(DT), mask=m_x)
        tl.store(kd + p_y, (k_0 * b_e * rk_0[:, None]).to(DT), mask=m_x)
        b_w = k_0 * tl.exp(tl.minimum(t_0[None, :] - G_0, 0.0))
        if TWO:
            m_z = row_mask(m_1, o_k, K, BK)
            p_z = p_y + HB * HV * K
            q_1 = tl.load(q + p_x + HB * H * K, mask=m_z, other=0.).to(tl.float32)
            k_1 = tl.load(k + p_x + HB * H * K, mask=m_z, other=0.).to(tl.float32)
            g_1 = masked_decay(load_channel_gates(g, dt_bias, p_g + HB * HV * K, i_hv, m_1, o_h, o_k, HV, K, BK, BIAS), m_z,
                               rate, lower_bound, GATE)
            G_1 = tl.cumsum(g_1, 0)
            t_1 = tl.sum(g_1, 0)
            n_11, m_11 = _half_products(q_1, k_1, G_1, g_1, n_11, m_11, middle, HB, BK, SAFE, DT, PREC, COPY_LHS, PAIRWISE)
            m_11 += tl.where(eye, tl.sum(q_1 * k_1, 1)[:, None], 0.0)
            tl.store(kw + p_z, (k_1 * tl.exp(tl.minimum(t_1[None, :] - G_1, 0.0)) * (b_1 * rk_1)[:, None]).to(DT), mask=m_z)
            b_e = tl.exp(G_1)
            q_1 = q_1 * b_e
            k_1 = k_1 * b_e
            b_y = tl.trans(b_w.to(DT))
            n_10 = tl.dot(k_1.to(DT), b_y, n_10, input_precision=PREC)
            m_10 = tl.dot(q_1.to(DT), b_y, m_10, input_precision=PREC)
            b_e = tl.exp(t_0)[None, :]
            tl.store(qd + p_z, (q_1 * b_e * (rq_1 * scale)[:, None]).to(DT), mask=m_z)
            tl.store(kd + p_z, (k_1 * b_e * rk_1[:, None]).to(DT), mask=m_z)
            b_w = b_w * tl.exp(t_1)[None, :]
            t_0 += t_1
        tl.store(kw + p_y, (b_w * (b_0 * rk_0)[:, None]).to(DT), mask=m_x)
        tl.store(GC + p_b * K + o_k, t_0, mask=o_k < K)
    return n_00, m_00, n_10, m_10, n_11, m_11


@triton.jit
def _prep_chunk(q, k, g, beta, A_log, dt_bias, qd, kd, kw, A, P, GC, b, rq, rk, i_n, i_t, i_hv, cu, T, NS, scale, lower_bound,
                H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, L2: tl.constexpr,
                GATE: tl.constexpr, BIAS: tl.constexpr, BETA: tl.constexpr, SAFE: tl.constexpr, VARLEN: tl.constexpr,
                PREC: tl.constexpr, PREC_INV: tl.constexpr, COPY_LHS: tl.constexpr, DOT_BLOCKS: tl.constexpr,
                PAIRWISE: tl.constexpr):
    R: tl.constexpr = HV // H
    TWO: tl.constexpr = BT == 64
    HB: tl.constexpr = 32 if TWO else BT
    bos, n = sequence(cu, i_n, T, VARLEN)
    slot = chunk_slot(bos, i_n, i_t, BT, NS)
    row = bos + i_t * BT
    i_h = i_hv // R
    o_h = tl.arange(0, HB)
    m_0 = i_t * BT + o_h < n
    m_1 = i_t * BT + HB + o_h < n
    p = slot * HV + i_hv
    p_q = (row * H + i_h) * K
    p_r = (slot * H + i_h) * BT + o_h
    rq_0, rk_0 = _inverse_norms(q, k, p_q, o_h, m_0, H, K, BK, HB, L2)
    b_0 = load_strength(beta, row * HV + i_hv, m_0, o_h, HV, BETA)
    tl.store(b + p * BT + o_h, b_0)
    rq_1 = rq_0
    rk_1 = rk_0
    b_1 = b_0
    if TWO:
        rq_1, rk_1 = _inverse_norms(q, k, p_q + HB * H * K, o_h, m_1, H, K, BK, HB, L2)
        b_1 = load_strength(beta, (row + HB) * HV + i_hv, m_1, o_h, HV, BETA)
        tl.store(b + p * BT + HB + o_h, b_1)
    if i_hv % R == 0:
        tl.store(rq + p_r, rq_0)
        tl.store(rk + p_r, rk_0)
        if TWO:
            tl.store(rq + p_r + HB, rq_1)
            tl.store(rk + p_r + HB, rk_1)
    n_00, m_00, n_10, m_10, n_11, m_11 = _chunk_products(
        q, k, g, dt_bias, qd, kd, kw, GC, p_q, (row * HV + i_hv) * K, p, i_hv, rq_0, rk_0, b_0, m_0, rq_1, rk_1, b_1, m_1,
        decay_rate(A_log, i_hv), lower_bound, -7.5 * lower_bound, scale, H, HV, K, BK, HB, TWO, GATE, BIAS, SAFE, PREC,
        COPY_LHS, PAIRWISE)
    p_c = p * (BT * BT) + o_h[:, None] * BT + o_h[None, :]
    b_w = (rk_0 * b_0)[None, :]
    tl.store(P + p_c, (m_00 * (rq_0 * scale)[:, None] * b_w).to(P.dtype.element_ty))
    a_0 = unit_lower_inverse(n_00 * rk_0[:, None] * b_w, HB, PREC_INV, DOT_BLOCKS)
    tl.store(A + p_c, a_0.to(A.dtype.element_ty))
    if TWO:
        tl.store(P + p_c + HB * BT, (m_10 * (rq_1 * scale)[:, None] * b_w).to(P.dtype.element_ty))
        n_10 = tl.dot(n_10 * rk_1[:, None] * b_w, a_0, input_precision=PREC_INV)
        b_w = (rk_1 * b_1)[None, :]
        tl.store(P + p_c + HB * BT + HB, (m_11 * (rq_1 * scale)[:, None] * b_w).to(P.dtype.element_ty))
        a_1 = unit_lower_inverse(n_11 * rk_1[:, None] * b_w, HB, PREC_INV, DOT_BLOCKS)
        tl.store(A + p_c + HB * BT + HB, a_1.to(A.dtype.element_ty))
        n_10 = tl.dot(a_1, n_10, input_precision=PREC_INV)
        tl.store(A + p_c + HB * BT, (-n_10).to(A.dtype.element_ty))
        b_z = tl.zeros([HB, HB], dtype=tl.float32)
        tl.store(P + p_c + HB, b_z.to(P.dtype.element_ty))
        tl.store(A + p_c + HB, b_z.to(A.dtype.element_ty))


@triton.jit(do_not_specialize=["N", "T", "NT", "NTS", "NS"])
def kda_prep(q, k, g, beta, A_log, dt_bias, qd, kd, kw, A, P, GC, b, rq, rk, cu, chunks, N, T, NT, NTS, NS, scale, lower_bound,
             H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, L2: tl.constexpr,
             GATE: tl.constexpr, BIAS: tl.constexpr, BETA: tl.constexpr, SAFE: tl.constexpr, VARLEN: tl.constexpr,
             GRAPH_CAPTURE: tl.constexpr, PREC: tl.constexpr, PREC_INV: tl.constexpr, COPY_LHS: tl.constexpr,
             DOT_BLOCKS: tl.constexpr, PAIRWISE: tl.constexpr):
    """Tasks (chunk, value head), grid-stride; the first value head of a key head stores rq and rk."""
    for i_task in range(tl.program_id(0), chunk_count(cu, N, T, NT, BT, GRAPH_CAPTURE) * HV, tl.num_programs(0)):
        i_n, i_t = chunk(chunks, i_task // HV, NTS, VARLEN)
        live = True
        if GRAPH_CAPTURE:
            live = (i_n >= 0) & (i_n < N)
        if live:
            _prep_chunk(q, k, g, beta, A_log, dt_bias, qd, kd, kw, A, P, GC, b, rq, rk, i_n, i_t, i_task % HV, cu, T, NS, scale,
                        lower_bound, H, HV, K, BT, BK, L2, GATE, BIAS, BETA, SAFE, VARLEN, PREC, PREC_INV, COPY_LHS,
                        DOT_BLOCKS, PAIRWISE)


def constant_anchor(prologue: Prologue, dtype: torch.dtype) -> bool:
    """Whether a promise allows the constant anchor, whose factors float16 can't hold."""
    return prologue.safe_gate and dtype != torch.float16


def run_prep(q: torch.Tensor, k: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, prologue: Prologue, packing: Packing,
             scale: float) -> Operands:
    """q̃, k̃, k_w `[B, T, HV, K]`, A, P `[NS, HV, BT, BT]` in q's dtype; G_C `[NS, HV, K]`, b `[NS, HV, BT]`, rq, rk
    `[NS, H, BT]` float32; all but the first three indexed by chunk slot."""
    (B, T, H, K), HV, BT, NS = q.shape, g.shape[2], packing.BT, packing.NS
    rows = [q.new_empty(B, T, HV, K) for _ in range(3)]
    square = [q.new_empty(NS, HV, BT, BT) for _ in "AP"]
    vectors = [q.new_empty(NS, *shape, dtype=torch.float32) for shape in ((HV, K), (HV, BT), (H, BT), (H, BT))]
    operands = Operands(*rows, *square, *vectors)
    record = record_for("kda_prep", q.device, K=K, BT=BT, dtype=q.dtype)
    launch(kda_prep, grid_stride(packing.NT * HV, record, q.device), q, k, g, beta, prologue.A_log, prologue.dt_bias, *operands,
           packing.cu, packing.chunks, packing.N, packing.T, packing.NT, packing.NTS, NS, scale, prologue.lowest, record=record,
           H=H, HV=HV, K=K, BT=BT, **prologue.constexprs, SAFE=constant_anchor(prologue, q.dtype), VARLEN=packing.varlen,
           GRAPH_CAPTURE=packing.capture)
    return operands
