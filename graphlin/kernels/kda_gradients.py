"""Kimi Delta Attention, the gradients of q, k, g and beta, in three launches.

inter: what needs no decay. F = tril(dO Eᵀ), W = -stril(dV Eᵀ), T1 = E Rᵀ, T2 = dO Sᵀ, T3 = dV Sᵀ and Σ_v S∘R.
intra (kda_intra): tiles of channels. With y = β∘k and Γ_ijd = 2^(G_id - G_jd), gradients of q, of k as a reader (ρ) and as a
writer (κ):
    dq = s (2^G∘T2 + Σ_j F_ij y_j Γ_ij),   ρ = -2^G∘T3 + Σ_j W_ij y_j Γ_ij,
    κ = 2^(G_C-G)∘T1 + Σ_i (s F_ij q_i + W_ij k_i) Γ_ij,   dk = ρ + β∘κ,   dβ = k·κ
    dg_t = Σ_{i>=t} a_i + Σ_{j<t} y_j∘2^(G_C-G_j)∘T1_j + 2^(G_C)∘Σ_v S∘R,   a = q∘dq + k∘ρ - y∘κ of the pairs and q, k's T terms
finish: sums over the value heads of a key head and over tiles of channels, and the l2 norm's and the sigmoid's own gradients.
"""

import torch
import triton
import triton.language as tl

from graphlin.kernels.common import active_rows, chunk, chunk_count, chunk_slot, sequence, zero_rows
from graphlin.kernels.delta_problem import Operands, Prologue
from graphlin.kernels.delta_products import error_products, state_products
from graphlin.kernels.gates import norm_gradients, rate_gradient, strength_gradient
from graphlin.kernels.kda_anchors import anchoring
from graphlin.kernels.kda_intra import kda_intra_gradients
from graphlin.kernels.launch import grid_stride, launch, programs_of, record_for
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


@triton.jit(do_not_specialize=["N", "T", "NT", "NTS", "NS"])
def kda_finish_gradients(q, k, A_log, b, rq, rk, pb, pa, dqk, dq, dk, dbeta, dgate, cu, chunks, N, T, NT, NTS, NS,
                         H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
                         BD: tl.constexpr, L2: tl.constexpr, GATE: tl.constexpr, BETA: tl.constexpr, VARLEN: tl.constexpr,
                         GRAPH_CAPTURE: tl.constexpr):
    """Tasks (chunk, key head), grid-stride; BK is that of kda_intra_gradients, whose tiles it sums, BD its own."""
    NK: tl.constexpr = (K + BK - 1) // BK
    KB: tl.constexpr = triton.next_power_of_2(NK * BK)
    R: tl.constexpr = HV // H
    PITCH: tl.constexpr = 2 * BT * NK * BK
    o_c = tl.arange(0, BT)
    o_k = tl.arange(0, KB)
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
                    b_db += tl.load(pb + (i_k * NS * HV + p) * BT + o_c, mask=m_t, other=0.)
                b_db = strength_gradient(b_db, tl.load(b + p * BT + o_c), BETA)
                tl.store(dbeta + row * HV + i_hv + o_c * HV, b_db.to(dbeta.dtype.element_ty), mask=m_t)
                if GATE > 0:
                    p_a = tl.cast(i_c, tl.int64) * (HV + HV * K)
                    b_da = tl.sum(tl.load(pa + p * (2 * NK * BK) + o_k, mask=o_k < K, other=0.), 0)
                    tl.store(dgate + p_a + i_hv, rate_gradient(b_da, A_log, i_hv))
                    b_db = tl.load(pa + p * (2 * NK * BK) + NK * BK + o_k, mask=o_k < K, other=0.)
                    tl.store(dgate + p_a + HV + i_hv * K + o_k, b_db, mask=o_k < K)
            p_t = (row * H + i_h) * K
            p_r = (slot * H + i_h) * BT
            p_w = (slot * HV + i_h * R) * PITCH
            norm_gradients(q, rq, dq, dqk, p_t, p_r, p_w, m_t, H, K, NK * BK, BT, BD, R, PITCH, L2)
            norm_gradients(k, rk, dk, dqk, p_t, p_r, p_w + BT * NK * BK, m_t, H, K, NK * BK, BT, BD, R, PITCH, L2)
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
    dq, dk, dg, dbeta = (torch.empty_like(x) for x in (q, k, g, beta))
    dgate = float32(packing.NT, HV + HV * K) if prologue.gate else None
    # one value head a key head: what is not summed any more is rounded as dq and dk are, where that can't overflow
    rounded = HV == H and q.dtype == torch.bfloat16
    dqk = q.new_empty(NS, HV, 2, BT, NK * BK, dtype=torch.bfloat16 if rounded else torch.float32)
    pb, pa = float32(NK, NS, HV, BT), float32(NS, HV, 2, NK * BK)
    where = (packing.cu, packing.chunks, packing.N, packing.T, packing.NT, packing.NTS, NS)
    common = dict(HV=HV, K=K, BT=BT, VARLEN=packing.varlen, GRAPH_CAPTURE=packing.capture)
    switches = prologue.constexprs
    safe, lift = anchoring(prologue, q.dtype, intra)
    launch(kda_inter_gradients, grid_stride(packing.NT * HV, inter, q.device), do, E, dv, St, Rt, fw, ts, sr, *where,
           record=inter, **common, V=V)
    programs = max(1, programs_of(packing.NT * HV * NK, intra, q.device))     # without a chunk it zeroes the rows of dg
    launch(kda_intra_gradients, programs, q, k, g, prologue.A_log, prologue.dt_bias,
           work.G, work.c, work.b, work.rq, work.rk, fw, ts, sr, dg, dqk, pb, pa, *where, scale, prologue.lowest, lift,
           record=intra, **common, H=H, GATE=switches["GATE"], BIAS=switches["BIAS"], SAFE=safe)
    launch(kda_finish_gradients, grid_stride(packing.NT * H, finish, q.device), q, k, prologue.A_log, work.b, work.rq, work.rk,
           pb, pa, dqk, dq, dk, dbeta, dgate, *where, record=finish, **common, H=H, BK=BK, L2=switches["L2"],
           GATE=switches["GATE"], BETA=switches["BETA"])
    return dq, dk, dg, dbeta, dgate
