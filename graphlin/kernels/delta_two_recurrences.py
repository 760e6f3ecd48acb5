"""The delta rules' serial kernel of the backward: the state from chunk to chunk, once more, and its gradient from the last chunk
to the first. The two need nothing of each other. Their steps are in `delta_steps`.
"""

import torch
import triton
import triton.language as tl

from graphlin.kernels.common import active_rows, chunk_slot, row_mask, sequence, zero_inactive_rows, zero_rows
from graphlin.kernels.delta_problem import Operands
from graphlin.kernels.delta_recurrence import state_loop
from graphlin.kernels.delta_steps import chunk_scales, load_state, previous_gradient, store_rows, store_state, value_gradient
from graphlin.kernels.launch import is_crowded, launch, programs_of, record_for
from graphlin.kernels.packing import Packing


@triton.jit
def _gradient_loop(q, k, kw, do, A, P, G, scales, dht, Rt, dv, dh0, i_n, i_hv, i_v, bos, n, NS,
                   H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
                   BV: tl.constexpr, USE_DHT: tl.constexpr, STORE_DH0: tl.constexpr, V_FIRST: tl.constexpr,
                   PER_CHANNEL: tl.constexpr, PREC: tl.constexpr, COPY_LHS: tl.constexpr, STAGES: tl.constexpr):
    """Carries R over one sequence, last chunk first; stores R after each chunk, dv and dh0."""
    i_nh = i_n * HV + i_hv
    i_h = i_hv // (HV // H)
    o_c = tl.arange(0, BT)
    o_k = tl.arange(0, BK)
    o_v = i_v * BV + tl.arange(0, BV)
    o_tk = o_c[:, None] * (H * K) + o_k[None, :]
    o_tv = o_c[:, None] * (HV * V) + o_v[None, :]
    o_tt = o_c[:, None] * BT + o_c[None, :]
    b_r = tl.zeros([BV, BK], dtype=tl.float32)
    if USE_DHT:
        b_r += load_state(dht, i_nh, o_k, o_v, K, V, V_FIRST)
    NC = (n + BT - 1) // BT
    for i in tl.range(0, NC, num_stages=STAGES):
        i_t = NC - 1 - i
        row = bos + i_t * BT
        left = n - i_t * BT
        p = chunk_slot(bos, i_n, i_t, BT, NS) * HV + i_hv
        p_k = (row * H + i_h) * K
        p_v = (row * HV + i_hv) * V
        m_tk = row_mask(o_c < left, o_k, K, BK)
        b_k = tl.load(k + p_k + o_tk, mask=m_tk, other=0.)                                               # [BT, BK]
        b_kw = b_k
        if PER_CHANNEL:
            b_kw = tl.load(kw + p_k + o_tk, mask=m_tk, other=0.)
        b_dot = tl.trans(tl.load(do + p_v + o_tv, mask=row_mask(o_c < left, o_v, V, BV), other=0.))      # [BV, BT]
        b_p = tl.load(P + p * (BT * BT) + o_tt)                                                          # [BT, BT]
        b_a = tl.load(A + p * (BT * BT) + o_tt)
        b_ro = b_r.to(k.dtype.element_ty)
        p_s = Rt + p * (K * V)
        tl.store(p_s + (o_v[:, None] * K + o_k[None, :]), b_ro.to(Rt.dtype.element_ty), mask=row_mask(o_v < V, o_k, K, BK))
        b_decay, b_read, b_write, b_out = chunk_scales(G, scales, p, o_k, K, BT, PER_CHANNEL)
        b_dv = value_gradient(b_ro, b_dot, b_kw, b_p, b_a, b_write, PER_CHANNEL, PREC, COPY_LHS)
        b_q = tl.load(q + p_k + o_tk, mask=m_tk, other=0.)
        b_r = previous_gradient(b_r, b_dot, b_dv, b_q, b_k, b_decay, b_read, b_out, PER_CHANNEL, PREC)
        m_tv = row_mask(i_t * BT + o_c < n, o_v, V, BV)     # not the loads' mask, which Triton would keep for chunks ahead
        store_rows(dv + p_v + o_tv, b_dv, m_tv, left, not PER_CHANNEL)
    if STORE_DH0:
        store_state(dh0, b_r, i_nh, o_k, o_v, K, V, V_FIRST)


@triton.jit
def _state_task(q, k, kw, v, A, P, G, scales, h0, St, E, i_task, cu, T, NS,
                H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
                BV: tl.constexpr, USE_H0: tl.constexpr, V_FIRST: tl.constexpr, VARLEN: tl.constexpr,
                PER_CHANNEL: tl.constexpr, PREC: tl.constexpr, COPY_LHS: tl.constexpr, STAGES: tl.constexpr):
    NV: tl.constexpr = (V + BV - 1) // BV
    bos, n = sequence(cu, i_task // (HV * NV), T, VARLEN)
    if n > 0:
        state_loop(q, k, kw, v, A, P, G, scales, h0, None, None, St, E, None, None, 0, 0, i_task // (HV * NV), i_task // NV % HV,
                   i_task % NV, bos, n, 0, 0, (n + BT - 1) // BT, NS, H, HV, K, V, BT, BK, BV, USE_H0, False, V_FIRST, False,
                   PER_CHANNEL, PREC, COPY_LHS, 1, False, STAGES)


@triton.jit
def _gradient_task(q, k, kw, do, A, P, G, scales, dht, Rt, dv, dh0, i_task, cu, T, NS,
                   H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
                   BV: tl.constexpr, USE_DHT: tl.constexpr, STORE_DH0: tl.constexpr, V_FIRST: tl.constexpr,
                   VARLEN: tl.constexpr, PER_CHANNEL: tl.constexpr, PREC: tl.constexpr, COPY_LHS: tl.constexpr,
                   STAGES: tl.constexpr):
    NV: tl.constexpr = (V + BV - 1) // BV
    bos, n = sequence(cu, i_task // (HV * NV), T, VARLEN)
    if (n > 0) | STORE_DH0:
        _gradient_loop(q, k, kw, do, A, P, G, scales, dht, Rt, dv, dh0, i_task // (HV * NV), i_task // NV % HV, i_task % NV, bos,
                       n, NS, H, HV, K, V, BT, BK, BV, USE_DHT, STORE_DH0, V_FIRST, PER_CHANNEL, PREC, COPY_LHS, STAGES)


@triton.jit(do_not_specialize=["N", "T", "NS"])
def delta_two_recurrences(q, k, kw, A, P, G, scales, v, do, h0, dht, St, E, Rt, dv, dh0, cu, N, T, NS,
                          H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr,
                          BK: tl.constexpr, BV: tl.constexpr, USE_H0: tl.constexpr, USE_DHT: tl.constexpr,
                          STORE_DH0: tl.constexpr, V_FIRST: tl.constexpr, VARLEN: tl.constexpr, PER_CHANNEL: tl.constexpr,
                          PREC: tl.constexpr, COPY_LHS: tl.constexpr, PERSISTENT: tl.constexpr, LOOPED: tl.constexpr,
                          INTERLEAVED: tl.constexpr, STAGES: tl.constexpr):
    """Tasks 2 x (sequence, value head, V tile): the gradient recurrence, which takes longer, then the state recurrence; a
    program each or, PERSISTENT, grid-stride in each half of the programs; LOOPED as in delta_recurrence. INTERLEAVED: the halves
    are the even and the odd programs, so that no recurrence waits for programs of empty sequences."""
    tasks = N * (HV * ((V + BV - 1) // BV))
    half = tl.num_programs(0) // 2
    if INTERLEAVED:
        i_p = tl.program_id(0) // 2
        backward = tl.program_id(0) % 2 == 0
    else:
        i_p = tl.program_id(0) % half
        backward = tl.program_id(0) < half
    if PERSISTENT or LOOPED:
        if backward:
            for i_task in range(i_p, tasks, half):
                _gradient_task(q, k, kw, do, A, P, G, scales, dht, Rt, dv, dh0, i_task, cu, T, NS, H, HV, K, V, BT, BK, BV,
                               USE_DHT, STORE_DH0, V_FIRST, VARLEN, PER_CHANNEL, PREC, COPY_LHS, STAGES)
        else:
            for i_task in range(i_p, tasks, half):
                _state_task(q, k, kw, v, A, P, G, scales, h0, St, E, i_task, cu, T, NS, H, HV, K, V, BT, BK, BV, USE_H0, V_FIRST,
                            VARLEN, PER_CHANNEL, PREC, COPY_LHS, STAGES)
    elif backward:
        _gradient_task(q, k, kw, do, A, P, G, scales, dht, Rt, dv, dh0, i_p, cu, T, NS, H, HV, K, V, BT, BK, BV, USE_DHT,
                       STORE_DH0, V_FIRST, VARLEN, PER_CHANNEL, PREC, COPY_LHS, STAGES)
    else:
        _state_task(q, k, kw, v, A, P, G, scales, h0, St, E, i_p, cu, T, NS, H, HV, K, V, BT, BK, BV, USE_H0, V_FIRST, VARLEN,
                    PER_CHANNEL, PREC, COPY_LHS, STAGES)
    if VARLEN:
        if LOOPED:
            zero_rows(dv, active_rows(cu, N, T), T, HV * V, 1024)
        else:
            zero_inactive_rows(dv, cu, N, T, HV * V, 1024)


def run_two_recurrences(operands: Operands, v: torch.Tensor, do: torch.Tensor, h0: torch.Tensor | None,
                        dht: torch.Tensor | None, store_dh0: bool, v_first: bool,
                        packing: Packing) -> tuple[torch.Tensor, ...]:
    """St, Rt `[NS, HV, V, K]`, E and dv like v, dh0 like h0 (None unless wanted)."""
    (H, K), (HV, V) = operands.q.shape[2:], v.shape[2:]
    St, Rt = (v.new_empty(packing.NS, HV, V, K) for _ in range(2))
    E, dv = torch.empty_like(v), torch.empty_like(v)
    dh0 = torch.empty_like(h0) if store_dh0 else None
    record = record_for("delta_two_recurrences", v.device, K=K, V=V, BT=packing.BT, dtype=v.dtype)
    grid = 2 * programs_of(packing.N * HV * -(-V // record.tiles["BV"]), record, v.device)
    crowded = is_crowded(grid, v.device)
    # Two stages leave room for a second program on a core, but not with one decay a channel.
    stages = min(record.num_stages, 2) if crowded and not operands.per_channel else record.num_stages
    launch(delta_two_recurrences, grid, *operands.recurrence, v, do, h0, dht, St, E, Rt, dv, dh0, packing.cu, packing.N,
           packing.T, packing.NS, record=record, H=H, HV=HV, K=K, V=V, BT=packing.BT, USE_H0=h0 is not None,
           USE_DHT=dht is not None, STORE_DH0=store_dh0, V_FIRST=v_first, VARLEN=packing.varlen,
           PER_CHANNEL=operands.per_channel, LOOPED=not crowded, STAGES=stages)
    return St, E, Rt, dv, dh0
