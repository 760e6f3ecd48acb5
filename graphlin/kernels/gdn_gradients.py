"""Gated DeltaNet, the gradients of q, k, g and beta, in three launches that split by the tiles they hold.

pairs (C x C tiles): with F = dO Eᵀ, H = dV Eᵀ, D = stril(Γ∘(s q kᵀ∘F − k kᵀ∘H)),
    X = (s stril(Γ∘F) + diag(s F))B and W = stril(Γ∘H)B, summed over the value heads of a key head, and the pairs' share of
    dg and dβ.
states (C x K tiles, gdn_states): dq, dk through S and R plus the pairs' products, and the states' share of dg, dβ; the l2
    norm's own gradients, where a tile has all of K.
finish: the gate's and the sigmoid's own gradients, and the l2 norm's where K is in several tiles.
dg takes pair terms from C x C tiles: a pair outside j < t <= i then cancels exactly, which row dots of rounded products do not.
"""

import torch
import triton
import triton.language as tl

from graphlin.kernels.common import active_rows, chunk, chunk_count, chunk_slot, keep, row_mask, sequence, zero_rows
from graphlin.kernels.delta_problem import Operands, Prologue
from graphlin.kernels.delta_products import error_products
from graphlin.kernels.gates import (
    decay_matrix,
    decay_rate,
    gate_gradients,
    load_head_gates,
    norm_gradients,
    rate_gradient,
    strength_gradient,
)
from graphlin.kernels.gdn_states import gdn_state_gradients
from graphlin.kernels.launch import grid_stride, launch, record_for
from graphlin.kernels.packing import Packing


@triton.jit
def _key_products(q, k, p_t, m_t, H: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, PREC: tl.constexpr,
                  COPY_LHS: tl.constexpr):
    """k kᵀ and q kᵀ, [BT, BT]."""
    NK: tl.constexpr = (K + BK - 1) // BK
    o_c = tl.arange(0, BT)
    b_kk = tl.zeros([BT, BT], dtype=tl.float32)
    b_qk = tl.zeros([BT, BT], dtype=tl.float32)
    for i_k in range(0, NK):
        o_k = i_k * BK + tl.arange(0, BK)
        m_tk = row_mask(m_t, o_k, K, BK)
        p = p_t + o_c[:, None] * (H * K) + o_k[None, :]
        b_k = tl.load(k + p, mask=m_tk, other=0.)                                                        # [BT, BK]
        b_kt = tl.trans(b_k)
        b_kk = tl.dot(keep(b_k, COPY_LHS), b_kt, b_kk, input_precision=PREC)
        b_qk = tl.dot(tl.load(q + p, mask=m_tk, other=0.), b_kt, b_qk, input_precision=PREC)
    return b_kk, b_qk


@triton.jit
def _pair_chunk(q, k, do, E, dv, G, b, rq, rk, xw, pv, i_n, i_t, i_h, cu, T, NS, scale,
                H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
                BV: tl.constexpr, VARLEN: tl.constexpr, PREC: tl.constexpr, COPY_LHS: tl.constexpr):
    R: tl.constexpr = HV // H
    bos, n = sequence(cu, i_n, T, VARLEN)
    slot = chunk_slot(bos, i_n, i_t, BT, NS)
    row = bos + i_t * BT
    o_c = tl.arange(0, BT)
    m_t = i_t * BT + o_c < n
    low = o_c[:, None] > o_c[None, :]
    eye = o_c[:, None] == o_c[None, :]
    b_rq = tl.load(rq + (slot * H + i_h) * BT + o_c)
    b_rk = tl.load(rk + (slot * H + i_h) * BT + o_c)
    b_kk, b_qk = _key_products(q, k, (row * H + i_h) * K, m_t, H, K, BT, BK, PREC, COPY_LHS)
    b_kk = b_kk * b_rk[:, None] * b_rk[None, :]
    b_qk = b_qk * b_rq[:, None] * b_rk[None, :] * scale
    b_qkd = tl.sum(tl.where(eye, b_qk, 0.0), 1)
    b_xs = tl.zeros([BT, BT], dtype=tl.float32)
    b_ws = tl.zeros([BT, BT], dtype=tl.float32)
    for i_r in range(0, R):
        i_hv = i_h * R + i_r
        p = slot * HV + i_hv
        b_b = tl.load(b + p * BT + o_c)
        b_G = tl.load(G + p * BT + o_c)
        b_f, b_h = error_products(do, dv, E, (row * HV + i_hv) * V, m_t, HV, V, BT, BV, PREC)
        b_gam = decay_matrix(b_G, BT)
        b_f = b_f * b_gam
        b_h = tl.where(low, b_h * b_gam, 0.0)
        b_d0 = tl.where(low, b_qk * b_f, 0.0) - b_kk * b_h                                               # [BT, BT]
        tl.store(pv + p * (3 * BT) + o_c, tl.sum(b_d0 * b_b[None, :], 1))
        tl.store(pv + p * (3 * BT) + BT + o_c, tl.sum(b_d0, 0))
        tl.store(pv + p * (3 * BT) + 2 * BT + o_c, tl.sum(tl.where(eye, b_f, 0.0), 1) * b_qkd)
        b_xs += b_f * (b_b * scale)[None, :]
        b_ws += b_h * b_b[None, :]
    p_c = (slot * H + i_h) * (2 * BT * BT) + o_c[:, None] * BT + o_c[None, :]
    tl.store(xw + p_c, b_xs.to(xw.dtype.element_ty))
    tl.store(xw + p_c + BT * BT, (b_ws + tl.trans(b_ws)).to(xw.dtype.element_ty))


@triton.jit(do_not_specialize=["N", "T", "NT", "NTS", "NS"])
def gdn_pair_gradients(q, k, do, E, dv, G, b, rq, rk, xw, pv, cu, chunks, N, T, NT, NTS, NS, scale,
                       H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr,
                       BK: tl.constexpr, BV: tl.constexpr, VARLEN: tl.constexpr, GRAPH_CAPTURE: tl.constexpr,
                       PREC: tl.constexpr, COPY_LHS: tl.constexpr):
    """Tasks (chunk, key head), grid-stride."""
    for i_task in range(tl.program_id(0), chunk_count(cu, N, T, NT, BT, GRAPH_CAPTURE) * H, tl.num_programs(0)):
        i_n, i_t = chunk(chunks, i_task // H, NTS, VARLEN)
        live = True
        if GRAPH_CAPTURE:
            live = (i_n >= 0) & (i_n < N)
        if live:
            _pair_chunk(q, k, do, E, dv, G, b, rq, rk, xw, pv, i_n, i_t, i_task % H, cu, T, NS, scale,
                        H, HV, K, V, BT, BK, BV, VARLEN, PREC, COPY_LHS)


@triton.jit
def _finish_head(g, A_log, dt_bias, G, b, pv, pk, psr, dg, dbeta, dgate, i_c, slot, row, i_hv, m_t, NS,
                 HV: tl.constexpr, PARTS: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr,
                 GATE: tl.constexpr, BIAS: tl.constexpr, BETA: tl.constexpr, REV_SCAN: tl.constexpr):
    """dg = reverse cumsum(a) + exclusive cumsum(β w) + e^(G_C) ⟨S, R⟩, then the gate's and the sigmoid's own gradients.

    The exclusive sum adds the rows one place up: inclusive minus own would leave the rounding of a large last row in a small dg.
    """
    o_c = tl.arange(0, BT)
    p = slot * HV + i_hv
    p_g = row * HV + i_hv
    b_b = tl.load(b + p * BT + o_c)
    b_cs = tl.load(pv + p * (3 * BT) + BT + o_c)
    b_a = tl.load(pv + p * (3 * BT) + o_c) - b_b * b_cs
    b_db = b_cs + tl.load(pv + p * (3 * BT) + 2 * BT + o_c)
    b_w = tl.zeros([BT], dtype=tl.float32)
    b_bw = tl.zeros([BT], dtype=tl.float32)
    b_sr = 0.0
    SUM_ROWS: tl.constexpr = 3 if SPLIT else 2
    for i in range(0, PARTS):
        p_t = (i * NS + slot) * HV + i_hv
        p_k = pk + p_t * (SUM_ROWS * BT)
        b_w += tl.load(p_k + o_c)
        b_a += tl.load(p_k + BT + o_c)
        if SPLIT:
            b_a += tl.load(p_k + 2 * BT + o_c)
            b_sr += tl.sum(tl.load(psr + p_t * BK + tl.arange(0, BK)), 0)
        else:
            b_sr += tl.load(psr + p_t)
        b_bw += tl.load(p_k + o_c - 1, mask=o_c >= 1, other=0.)
    b_db += b_w
    b_bw = b_bw * tl.load(b + p * BT + o_c - 1, mask=o_c >= 1, other=0.)
    if REV_SCAN:
        b_dg = tl.cumsum(b_a, 0, reverse=True)
    else:
        b_dg = tl.sum(b_a, 0) - tl.cumsum(b_a, 0) + b_a
    b_dg += tl.cumsum(b_bw, 0) + tl.exp2(tl.load(G + p * BT + BT - 1)) * b_sr
    b_dg = tl.where(m_t, b_dg, 0.0)
    b_u = load_head_gates(g, dt_bias, p_g, i_hv, m_t, o_c, HV, BIAS)
    b_dg, b_da = gate_gradients(b_dg, b_u, decay_rate(A_log, i_hv), 0.0, GATE)
    if GATE > 0:
        tl.store(dgate + (i_c * 2) * HV + i_hv, rate_gradient(tl.sum(b_da, 0), A_log, i_hv))
        tl.store(dgate + (i_c * 2 + 1) * HV + i_hv, tl.sum(b_dg, 0))
    b_db = strength_gradient(b_db, b_b, BETA)
    tl.store(dg + p_g + o_c * HV, b_dg.to(dg.dtype.element_ty), mask=m_t)
    tl.store(dbeta + p_g + o_c * HV, b_db.to(dbeta.dtype.element_ty), mask=m_t)


@triton.jit(do_not_specialize=["N", "T", "NT", "NTS", "NS"])
def gdn_finish_gradients(q, k, g, A_log, dt_bias, G, b, rq, rk, pv, pk, psr, dqk, dq, dk, dg, dbeta, dgate, cu, chunks,
                         N, T, NT, NTS, NS, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, BT: tl.constexpr,
                         BK: tl.constexpr, SPLIT: tl.constexpr, L2: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr,
                         BETA: tl.constexpr, VARLEN: tl.constexpr, GRAPH_CAPTURE: tl.constexpr, REV_SCAN: tl.constexpr):
    """Tasks (chunk, key head), grid-stride; BK and SPLIT are those of gdn_state_gradients, whose parts it sums."""
    NK: tl.constexpr = (K + BK - 1) // BK
    R: tl.constexpr = HV // H
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
            m_t = i_t * BT + tl.arange(0, BT) < n
            for i_r in range(0, R):
                i_hv = i_h * R + i_r
                _finish_head(g, A_log, dt_bias, G, b, pv, pk, psr, dg, dbeta, dgate, i_c, slot, row,
                             i_hv, m_t, NS, HV, NK, BT, BK, SPLIT, GATE, BIAS, BETA, REV_SCAN)
            if NK > 1:
                p_t = (row * H + i_h) * K
                p_r = (slot * H + i_h) * BT
                p_w = (slot * H + i_h) * (2 * BT * NK * BK)
                norm_gradients(q, rq, dq, dqk, p_t, p_r, p_w, m_t, H, K, NK * BK, BT, BK, 1, 0, L2)
                norm_gradients(k, rk, dk, dqk, p_t, p_r, p_w + BT * NK * BK, m_t, H, K, NK * BK, BT, BK, 1, 0, L2)
    if VARLEN:
        first = active_rows(cu, N, T)
        zero_rows(dq, first, T, H * K, 1024)
        zero_rows(dk, first, T, H * K, 1024)
        zero_rows(dg, first, T, HV, 1024)
        zero_rows(dbeta, first, T, HV, 1024)


def _float32(like: torch.Tensor, *shape: int) -> torch.Tensor:
    return like.new_empty(shape, dtype=torch.float32)


def run_gradients(q: torch.Tensor, k: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, do: torch.Tensor, E: torch.Tensor,
                  dv: torch.Tensor, St: torch.Tensor, Rt: torch.Tensor, work: Operands, prologue: Prologue, packing: Packing,
                  scale: float) -> tuple[torch.Tensor, ...]:
    """dq, dk, dg, dbeta like their inputs, and the partials of dA_log, ddt_bias `[NT, 2, HV]` by chunk (None without gate)."""
    (H, K), (HV, V), BT, NS = q.shape[2:], do.shape[2:], packing.BT, packing.NS
    pairs = record_for("gdn_pair_gradients", q.device, K=K, V=V, BT=BT, dtype=q.dtype)
    states = record_for("gdn_state_gradients", q.device, K=K, V=V, R=HV // H, BT=BT, dtype=q.dtype)
    finish = record_for("gdn_finish_gradients", q.device, K=K, V=V, BT=BT, dtype=q.dtype)
    BK, split = states.tiles["BK"], states.tiles["SPLIT"]
    NK = -(-K // BK)
    xw = q.new_empty(NS, H, 2, BT, BT)
    pv, pk = _float32(work.G, NS, HV, 3, BT), _float32(work.G, NK, NS, HV, 3 if split else 2, BT)
    psr = _float32(work.G, NK, NS, HV, BK if split else 1)
    dqk = _float32(work.G, NS, H, 2, BT, NK * BK) if NK > 1 else None
    dq, dk, dg, dbeta = (torch.empty_like(x) for x in (q, k, g, beta))
    dgate = _float32(work.G, packing.NT, 2, HV) if prologue.gate else None
    rows = (work.G, work.b, work.rq, work.rk)
    where = (packing.cu, packing.chunks, packing.N, packing.T, packing.NT, packing.NTS, NS)
    common = dict(H=H, HV=HV, K=K, BT=BT, VARLEN=packing.varlen, GRAPH_CAPTURE=packing.capture)
    launch(gdn_pair_gradients, grid_stride(packing.NT * H, pairs, q.device), q, k, do, E, dv, *rows, xw, pv, *where, scale,
           record=pairs, **common, V=V)
    tasks = packing.NT * H * NK * (2 if split else 1)
    launch(gdn_state_gradients, grid_stride(tasks, states, q.device), q, k, do, E, dv, St, Rt, *rows, xw, dq, dk, dqk, pk, psr,
           *where, scale, record=states, **common, V=V, L2=prologue.constexprs["L2"])
    launch(gdn_finish_gradients, grid_stride(packing.NT * H, finish, q.device), q, k, g, prologue.A_log, prologue.dt_bias,
           *rows, pv, pk, psr, dqk, dq, dk, dg, dbeta, dgate, *where, record=finish, **common, BK=BK,
           SPLIT=split, **prologue.constexprs)
    return dq, dk, dg, dbeta, dgate
