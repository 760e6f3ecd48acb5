"""Gated DeltaNet, first kernel: gates, chunk sums, row norms and the two C x C matrices of every chunk.

With `G` the chunk sum of log decays (base 2), `Γ_ij = 2^(G_i - G_j)` for `i >= j` and `B = diag(β)`:
    A = (I + stril(Γ∘k kᵀ) B)⁻¹,   P = scale · tril(Γ∘q kᵀ) B
"""

import torch
import triton
import triton.language as tl

from graphlin.backends import get_backend
from graphlin.kernels.common import chunk, chunk_count, chunk_cumsum, chunk_slot, keep, row_mask, sequence
from graphlin.kernels.delta_problem import Operands, Prologue
from graphlin.kernels.gates import decay_matrix, decay_rate, inverse_norm, load_head_gates, load_strength, masked_decay
from graphlin.kernels.launch import grid_stride, launch, record_for
from graphlin.kernels.packing import Packing
from graphlin.kernels.triangular import float32_dot, two_unit_lower_inverses, unit_lower_inverse


@triton.jit
def _key_products(q, k, p_0, m_0, m_1, H: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, HB: tl.constexpr,
                  TWO: tl.constexpr, PREC: tl.constexpr, COPY_LHS: tl.constexpr):
    """k kᵀ and q kᵀ in halves of HB rows (00 upper, 10 lower left, 11 lower right) and the rows' sums of squares."""
    NK: tl.constexpr = (K + BK - 1) // BK
    o_h = tl.arange(0, HB)
    kk_00 = tl.zeros([HB, HB], dtype=tl.float32)
    qk_00 = tl.zeros([HB, HB], dtype=tl.float32)
    kk_10 = tl.zeros([HB, HB], dtype=tl.float32)
    qk_10 = tl.zeros([HB, HB], dtype=tl.float32)
    kk_11 = tl.zeros([HB, HB], dtype=tl.float32)
    qk_11 = tl.zeros([HB, HB], dtype=tl.float32)
    sq_0 = tl.zeros([HB], dtype=tl.float32)
    sk_0 = tl.zeros([HB], dtype=tl.float32)
    sq_1 = tl.zeros([HB], dtype=tl.float32)
    sk_1 = tl.zeros([HB], dtype=tl.float32)
    for i_k in range(0, NK):
        o_k = i_k * BK + tl.arange(0, BK)
        p_x = p_0 + o_h[:, None] * (H * K) + o_k[None, :]
        m_x = row_mask(m_0, o_k, K, BK)
        k_0 = tl.load(k + p_x, mask=m_x, other=0.)                                                       # [HB, BK]
        q_0 = tl.load(q + p_x, mask=m_x, other=0.)
        sq_0 += tl.sum(q_0.to(tl.float32) * q_0.to(tl.float32), 1)
        sk_0 += tl.sum(k_0.to(tl.float32) * k_0.to(tl.float32), 1)
        kt_0 = tl.trans(k_0)
        kk_00 = tl.dot(keep(k_0, COPY_LHS), kt_0, kk_00, input_precision=PREC)
        qk_00 = tl.dot(q_0, kt_0, qk_00, input_precision=PREC)
        if TWO:
            p_y = p_x + HB * H * K
            m_y = row_mask(m_1, o_k, K, BK)
            k_1 = tl.load(k + p_y, mask=m_y, other=0.)
            q_1 = tl.load(q + p_y, mask=m_y, other=0.)
            sq_1 += tl.sum(q_1.to(tl.float32) * q_1.to(tl.float32), 1)
            sk_1 += tl.sum(k_1.to(tl.float32) * k_1.to(tl.float32), 1)
            kt_1 = tl.trans(k_1)
            kk_10 = tl.dot(keep(k_1, COPY_LHS), kt_0, kk_10, input_precision=PREC)
            kk_11 = tl.dot(keep(k_1, COPY_LHS), kt_1, kk_11, input_precision=PREC)
            qk_10 = tl.dot(keep(q_1, COPY_LHS), kt_0, qk_10, input_precision=PREC)
            qk_11 = tl.dot(q_1, kt_1, qk_11, input_precision=PREC)
    return kk_00, qk_00, kk_10, qk_10, kk_11, qk_11, sq_0, sk_0, sq_1, sk_1


@triton.jit
def _store_scales(scales, p, BT: tl.constexpr, b_G, b_gl, b_b, b_rq, b_rk):
    """The rows' scales of what is read with k, e^G r_k, of what is written, β r_k e^(G_C−G), and of the output, s r_q e^G.

    b_gl is the last of G itself, not another sum of the same numbers: two sums of large decays differ by more than their ends.
    """
    b_eg = tl.exp2(b_G)
    tl.store(scales + p, b_eg * b_rk)
    tl.store(scales + p + BT, b_b * b_rk * tl.exp2(b_gl - b_G))
    tl.store(scales + p + 2 * BT, b_eg * b_rq)


@triton.jit
def _prep_chunk(q, k, g, beta, A_log, dt_bias, A, P, G, scales, b, rq, rk, i_n, i_t, i_h, first, heads, cu, T, NS, scale,
                H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, L2: tl.constexpr,
                GATE: tl.constexpr, BIAS: tl.constexpr, BETA: tl.constexpr, VARLEN: tl.constexpr,
                PREC: tl.constexpr, PREC_INV: tl.constexpr, BI: tl.constexpr, DOT_BLOCKS: tl.constexpr,
                COPY_LHS: tl.constexpr):
    """rq and rk of key head i_h, and A, P, G, scales and b of its value heads `first` to `first + heads - 1`."""
    TWO: tl.constexpr = BT == 64
    HB: tl.constexpr = 32 if TWO else BT
    bos, n = sequence(cu, i_n, T, VARLEN)
    slot = chunk_slot(bos, i_n, i_t, BT, NS)
    row = bos + i_t * BT
    o_h = tl.arange(0, HB)
    m_0 = i_t * BT + o_h < n
    m_1 = i_t * BT + HB + o_h < n
    kk_00, qk_00, kk_10, qk_10, kk_11, qk_11, sq_0, sk_0, sq_1, sk_1 = _key_products(
        q, k, (row * H + i_h) * K, m_0, m_1, H, K, BK, HB, TWO, PREC, COPY_LHS)
    p_r = (slot * H + i_h) * BT + o_h
    rq_0 = inverse_norm(sq_0, L2)
    rk_0 = inverse_norm(sk_0, L2)
    tl.store(rq + p_r, rq_0)
    tl.store(rk + p_r, rk_0)
    kk_00 = kk_00 * rk_0[:, None] * rk_0[None, :]
    qk_00 = qk_00 * (rq_0 * scale)[:, None] * rk_0[None, :]
    if TWO:
        rq_1 = inverse_norm(sq_1, L2)
        rk_1 = inverse_norm(sk_1, L2)
        tl.store(rq + p_r + HB, rq_1)
        tl.store(rk + p_r + HB, rk_1)
        kk_10 = kk_10 * rk_1[:, None] * rk_0[None, :]
        qk_10 = qk_10 * (rq_1 * scale)[:, None] * rk_0[None, :]
        kk_11 = kk_11 * rk_1[:, None] * rk_1[None, :]
        qk_11 = qk_11 * (rq_1 * scale)[:, None] * rk_1[None, :]
    low = o_h[:, None] > o_h[None, :]
    for i_r in range(first, first + heads):
        i_hv = i_h * (HV // H) + i_r
        p = slot * HV + i_hv
        p_g = row * HV + i_hv
        p_c = p * (BT * BT) + o_h[:, None] * BT + o_h[None, :]
        rate = decay_rate(A_log, i_hv)
        b_0 = load_strength(beta, p_g, m_0, o_h, HV, BETA)
        g_0 = masked_decay(load_head_gates(g, dt_bias, p_g, i_hv, m_0, o_h, HV, BIAS), m_0, rate, 0.0, GATE)
        G_0 = chunk_cumsum(g_0, False)
        tl.store(G + p * BT + o_h, G_0)
        tl.store(b + p * BT + o_h, b_0)
        b_w = decay_matrix(G_0, HB) * b_0[None, :]                                                       # [HB, HB]
        tl.store(P + p_c, (b_w * qk_00).to(P.dtype.element_ty))
        b_x = tl.where(low, b_w * kk_00, 0.0)
        if TWO:
            b_1 = load_strength(beta, p_g + HB * HV, m_1, o_h, HV, BETA)
            g_1 = masked_decay(load_head_gates(g, dt_bias, p_g + HB * HV, i_hv, m_1, o_h, HV, BIAS), m_1, rate, 0.0, GATE)
            G_1 = chunk_cumsum(g_1, False) + tl.sum(g_0, 0)
            tl.store(G + p * BT + HB + o_h, G_1)
            tl.store(b + p * BT + HB + o_h, b_1)
            b_w = decay_matrix(G_1, HB) * b_1[None, :]
            tl.store(P + p_c + HB * BT + HB, (b_w * qk_11).to(P.dtype.element_ty))
            a_0, a_1 = two_unit_lower_inverses(b_x, tl.where(low, b_w * kk_11, 0.0), BI, PREC_INV, DOT_BLOCKS, False)
            tl.store(A + p_c, a_0.to(A.dtype.element_ty))
            tl.store(A + p_c + HB * BT + HB, a_1.to(A.dtype.element_ty))
            b_w = tl.exp2(G_1[:, None] - G_0[None, :]) * b_0[None, :]
            tl.store(P + p_c + HB * BT, (b_w * qk_10).to(P.dtype.element_ty))
            b_x = float32_dot(b_w * kk_10, a_0, PREC_INV)
            b_x = float32_dot(a_1, b_x, PREC_INV)
            tl.store(A + p_c + HB * BT, (-b_x).to(A.dtype.element_ty))
            b_gl = tl.sum(tl.where(o_h == HB - 1, G_1, 0.0), 0)
            _store_scales(scales, p * (3 * BT) + HB + o_h, BT, G_1, b_gl, b_1, rq_1 * scale, rk_1)
            b_z = tl.zeros([HB, HB], dtype=tl.float32)
            tl.store(P + p_c + HB, b_z.to(P.dtype.element_ty))
            tl.store(A + p_c + HB, b_z.to(A.dtype.element_ty))
        else:
            a_0 = unit_lower_inverse(b_x, HB, BI, PREC_INV, DOT_BLOCKS)
            tl.store(A + p_c, a_0.to(A.dtype.element_ty))
            b_gl = tl.sum(tl.where(o_h == HB - 1, G_0, 0.0), 0)
        _store_scales(scales, p * (3 * BT) + o_h, BT, G_0, b_gl, b_0, rq_0 * scale, rk_0)


@triton.jit
def _at_most(few, chunks, NT, GRAPH_CAPTURE: tl.constexpr):
    """Whether there are no more than `few` chunks, behind which a static table has sentinels."""
    is_few = few >= NT
    if GRAPH_CAPTURE:
        is_few = is_few | (tl.load(chunks + tl.minimum(few, NT - 1) * 2) < 0)
    return is_few


@triton.jit(do_not_specialize=["N", "T", "NT", "NTS", "NS", "few"])
def gdn_prep(q, k, g, beta, A_log, dt_bias, A, P, G, scales, b, rq, rk, cu, chunks, N, T, NT, NTS, NS, few, scale,
             H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, L2: tl.constexpr,
             GATE: tl.constexpr, BIAS: tl.constexpr, BETA: tl.constexpr, VARLEN: tl.constexpr,
             GRAPH_CAPTURE: tl.constexpr, PREC: tl.constexpr, PREC_INV: tl.constexpr, BI: tl.constexpr, DOT_BLOCKS: tl.constexpr,
             COPY_LHS: tl.constexpr):
    """Tasks (chunk, key head), grid-stride; each makes rq and rk, and A, P, G, scales, b of its value heads. Of no more than
    `few` chunks each value head is a task, though it makes the products of keys again."""
    parts = tl.where(_at_most(few, chunks, NT, GRAPH_CAPTURE), HV // H, 1)
    heads = HV // H // parts
    for i_task in range(tl.program_id(0), chunk_count(cu, N, T, NT, BT, GRAPH_CAPTURE) * (H * parts), tl.num_programs(0)):
        i_n, i_t = chunk(chunks, i_task // (H * parts), NTS, VARLEN)
        live = True
        if GRAPH_CAPTURE:
            live = (i_n >= 0) & (i_n < N)
        if live:
            _prep_chunk(q, k, g, beta, A_log, dt_bias, A, P, G, scales, b, rq, rk, i_n, i_t, i_task // parts % H,
                        i_task % parts * heads, heads, cu, T, NS, scale, H, HV, K, BT, BK, L2, GATE, BIAS, BETA, VARLEN, PREC,
                        PREC_INV, BI, DOT_BLOCKS, COPY_LHS)


def run_prep(q: torch.Tensor, k: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, prologue: Prologue, packing: Packing,
             scale: float) -> Operands:
    """A, P `[NS, HV, BT, BT]` in q's dtype; G, b `[NS, HV, BT]`, scales `[NS, HV, 3, BT]`, rq, rk `[NS, H, BT]` float32; indexed
    by chunk slot."""
    H, K, HV, BT, NS = q.shape[2], q.shape[3], g.shape[2], packing.BT, packing.NS
    square = [q.new_empty(NS, HV, BT, BT) for _ in "AP"]
    rows = [q.new_empty(NS, *shape, BT, dtype=torch.float32) for shape in ((HV,), (HV, 3), (HV,), (H,), (H,))]
    record = record_for("gdn_prep", q.device, K=K, BT=BT, dtype=q.dtype)
    operands = Operands(q, k, None, *square, *rows, c=None)
    # Up to two programs a core the products made again cost less than value heads that wait for one another.
    few = 2 * get_backend(q.device).num_cores(q.device) // HV
    tasks = max(packing.NT * H, min(packing.NT, few) * HV)
    launch(gdn_prep, grid_stride(tasks, record, q.device), q, k, g, beta, prologue.A_log, prologue.dt_bias,
           *operands[3:-1], packing.cu, packing.chunks, packing.N, packing.T, packing.NT, packing.NTS, NS, few, scale,
           record=record, H=H, HV=HV, K=K, BT=BT, **prologue.constexprs, VARLEN=packing.varlen, GRAPH_CAPTURE=packing.capture)
    return operands
