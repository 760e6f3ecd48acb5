"""The delta rules' serial kernels: the state from chunk to chunk, forward, and its gradient, backward.

With S the state entering a chunk and R the gradient of the state leaving it through later chunks:
    E = A (V − k̃ S),         O = q̃ S + P E,     S ← e^(G_C) S + k_wᵀ E
    dE = Pᵀ dO + k_w R,      dV = Aᵀ dE,        R ← e^(G_C) R + q̃ᵀ dO − k̃ᵀ dV
with q̃ = s e^G∘q, k̃ = e^G∘k, k_w = β e^(G_C−G)∘k. Where each channel has its decay (PER_CHANNEL), e^(G_C) scales the rows of
S, and q̃, k̃, k_w come from memory. Where a head has one, row scales of the prep kernel, with the l2 norms' inverses in them,
multiply `[BT, BV]` tiles instead: k̃ S = (e^G r_k)∘(k S). The two recurrences need nothing of each other. States are kept
transposed, `Sᵀ [BV, BK]`, always the left dot operand, so that they stay in registers.
"""

import torch
import triton
import triton.language as tl

from graphlin.kernels.common import active_rows, chunk_slot, keep, row_mask, sequence, zero_rows
from graphlin.kernels.delta_problem import Operands
from graphlin.kernels.launch import launch, programs_of, record_for, stages_of
from graphlin.kernels.packing import Packing
from graphlin.kernels.split import HALVES, JOIN, same_bits, second_half, worth_splitting


@triton.jit
def load_state(p_h, i_nh, o_k, o_v, K: tl.constexpr, V: tl.constexpr, V_FIRST: tl.constexpr):
    """A tile of an `[N, HV, K, V]` (or `[N, HV, V, K]`) state, transposed: [BV, BK] float32."""
    p = p_h + tl.cast(i_nh, tl.int64) * (K * V)
    if V_FIRST:
        b_h = tl.load(p + o_v[:, None] * K + o_k[None, :], mask=(o_v < V)[:, None] & (o_k < K)[None, :], other=0.)
    else:
        b_h = tl.trans(tl.load(p + o_k[:, None] * V + o_v[None, :], mask=(o_k < K)[:, None] & (o_v < V)[None, :], other=0.))
    return b_h.to(tl.float32)


@triton.jit
def _store_state(p_h, b_h, i_nh, o_k, o_v, K: tl.constexpr, V: tl.constexpr, V_FIRST: tl.constexpr):
    p = p_h + tl.cast(i_nh, tl.int64) * (K * V)
    b_h = b_h.to(p_h.dtype.element_ty)
    if V_FIRST:
        tl.store(p + o_v[:, None] * K + o_k[None, :], b_h, mask=(o_v < V)[:, None] & (o_k < K)[None, :])
    else:
        tl.store(p + o_k[:, None] * V + o_v[None, :], tl.trans(b_h), mask=(o_k < K)[:, None] & (o_v < V)[None, :])


@triton.jit
def chunk_scales(G, scales, p, o_k, K: tl.constexpr, BT: tl.constexpr, PER_CHANNEL: tl.constexpr):
    """What a chunk decays S and R by, and the scales `[BT]` of its rows that are read with k, written and output (PER_CHANNEL:
    none, q, k and kw hold them)."""
    if PER_CHANNEL:
        b_decay = tl.exp2(tl.load(G + p * K + o_k, mask=o_k < K, other=0.))[None, :]
        b_read, b_write, b_out = b_decay, b_decay, b_decay
    else:
        b_decay = tl.exp2(tl.load(G + p * BT + BT - 1))
        p_r = scales + p * (3 * BT) + tl.arange(0, BT)
        b_read, b_write, b_out = tl.load(p_r), tl.load(p_r + BT), tl.load(p_r + 2 * BT)
    return b_decay, b_read, b_write, b_out


@triton.jit
def next_state(b_s, b_e, b_z, b_k, b_kw, b_at, b_decay, b_read, b_write, PER_CHANNEL: tl.constexpr, PREC: tl.constexpr):
    """E, transposed, and S after a chunk, from (A V)ᵀ and z = Sᵀ kᵀ."""
    if PER_CHANNEL:
        b_e = tl.dot((-b_z).to(b_k.dtype), b_at, b_e, input_precision=PREC)
        b_s = tl.dot(b_e.to(b_k.dtype), b_kw, b_s * b_decay, input_precision=PREC)
    else:
        b_e = tl.dot((-(b_z * b_read[None, :])).to(b_k.dtype), b_at, b_e, input_precision=PREC)
        b_s = tl.dot((b_e * b_write[None, :]).to(b_k.dtype), b_k, b_s * b_decay, input_precision=PREC)
    return b_e, b_s


@triton.jit
def value_gradient(b_ro, b_dot, b_kw, b_p, b_a, b_write, PER_CHANNEL: tl.constexpr, PREC: tl.constexpr,
                   COPY_LHS: tl.constexpr):
    """dV of a chunk, transposed: [BV, BT]."""
    b_de = tl.dot(b_ro, tl.trans(b_kw), input_precision=PREC)                                            # [BV, BT]
    if not PER_CHANNEL:
        b_de = b_de * b_write[None, :]
    b_de = tl.dot(keep(b_dot, COPY_LHS), b_p, b_de, input_precision=PREC)
    return tl.dot(b_de.to(b_kw.dtype), b_a, input_precision=PREC)


@triton.jit
def previous_gradient(b_r, b_dot, b_dv, b_q, b_k, b_decay, b_read, b_out, PER_CHANNEL: tl.constexpr, PREC: tl.constexpr):
    """R before a chunk."""
    if PER_CHANNEL:
        b_r = tl.dot(b_dot, b_q, b_r * b_decay, input_precision=PREC)
        b_r = tl.dot((-b_dv).to(b_k.dtype), b_k, b_r, input_precision=PREC)
    else:
        b_qs = (b_dot.to(tl.float32) * b_out[None, :]).to(b_q.dtype)
        b_r = tl.dot(b_qs, b_q, b_r * b_decay, input_precision=PREC)
        b_r = tl.dot((-b_dv * b_read[None, :]).to(b_k.dtype), b_k, b_r, input_precision=PREC)
    return b_r


@triton.jit
def _store_rows(p_x, b_x, m_x, left, LAST: tl.constexpr):
    """A chunk's rows of a tensor from their transpose. LAST: in an `if`, which always holds, and which Triton's pipeliner puts
    behind the loads for later chunks."""
    if LAST:
        if left > 0:
            tl.store(p_x, tl.trans(b_x).to(p_x.dtype.element_ty), mask=m_x)
    else:
        tl.store(p_x, tl.trans(b_x).to(p_x.dtype.element_ty), mask=m_x)


@triton.jit
def _store_output(p_o, b_so, b_e, b_q, b_p, b_out, m_tv, PER_CHANNEL: tl.constexpr, PREC: tl.constexpr):
    b_o = tl.dot(b_so, tl.trans(b_q), input_precision=PREC)                                              # [BV, BT]
    if not PER_CHANNEL:
        b_o = b_o * b_out[None, :]
    b_o = tl.dot(b_e.to(b_p.dtype), tl.trans(b_p), b_o, input_precision=PREC)
    tl.store(p_o, tl.trans(b_o).to(p_o.dtype.element_ty), mask=m_tv)


@triton.jit
def _walk(b_s, q, k, kw, v, A, P, G, scales, o, St, E, i_n, i_hv, i_h, o_v, bos, n, start, end, begin, NS,
          H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
          BV: tl.constexpr, OUTPUT: tl.constexpr, PER_CHANNEL: tl.constexpr, PREC: tl.constexpr, COPY_LHS: tl.constexpr,
          STAGES: tl.constexpr):
    """S after the chunks start to end - 1, of which those from `begin` on are output."""
    o_c = tl.arange(0, BT)
    o_k = tl.arange(0, BK)
    o_tk = o_c[:, None] * (H * K) + o_k[None, :]
    o_tv = o_c[:, None] * (HV * V) + o_v[None, :]
    o_tt = o_c[:, None] * BT + o_c[None, :]
    for i_t in tl.range(start, end, num_stages=STAGES):
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
        b_v = tl.load(v + p_v + o_tv, mask=row_mask(o_c < left, o_v, V, BV), other=0.)                   # [BT, BV]
        b_at = tl.trans(tl.load(A + p * (BT * BT) + o_tt))                                               # [BT, BT]
        b_decay, b_read, b_write, b_out = chunk_scales(G, scales, p, o_k, K, BT, PER_CHANNEL)
        b_so = b_s.to(k.dtype.element_ty)
        if not OUTPUT:
            p_s = St + p * (K * V)
            tl.store(p_s + (o_v[:, None] * K + o_k[None, :]), b_so.to(St.dtype.element_ty), mask=row_mask(o_v < V, o_k, K, BK))
        b_e = tl.dot(tl.trans(b_v), b_at, input_precision=PREC)                                          # [BV, BT]
        b_z = tl.dot(keep(b_so, COPY_LHS), tl.trans(b_k), input_precision=PREC)
        b_e, b_s = next_state(b_s, b_e, b_z, b_k, b_kw, b_at, b_decay, b_read, b_write, PER_CHANNEL, PREC)
        m_tv = row_mask(i_t * BT + o_c < n, o_v, V, BV)
        if OUTPUT:
            b_q = tl.load(q + p_k + o_tk, mask=m_tk, other=0.)
            b_p = tl.load(P + p * (BT * BT) + o_tt)
            if not PER_CHANNEL:
                if (left > 0) & (i_t >= begin):     # left > 0: as in _store_rows
                    _store_output(o + p_v + o_tv, b_so, b_e, b_q, b_p, b_out, m_tv, PER_CHANNEL, PREC)
            else:
                _store_output(o + p_v + o_tv, b_so, b_e, b_q, b_p, b_out, m_tv, PER_CHANNEL, PREC)
        else:
            _store_rows(E + p_v + o_tv, b_e, m_tv, left, not PER_CHANNEL)
    return b_s


@triton.jit
def _state_loop(q, k, kw, v, A, P, G, scales, h0, o, ht, St, E, reached, assumed, i_n, i_hv, i_v, bos, n, start, begin, end, NS,
                H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
                BV: tl.constexpr, USE_H0: tl.constexpr, STORE_HT: tl.constexpr, V_FIRST: tl.constexpr,
                OUTPUT: tl.constexpr, PER_CHANNEL: tl.constexpr, PREC: tl.constexpr, COPY_LHS: tl.constexpr,
                SPLIT: tl.constexpr, STAGES: tl.constexpr):
    """Carries S over the chunks begin to end - 1 of one sequence, from h0 if `begin` is its first; else from what the chunks from
    `start` on make of nothing or, JOIN, from what was reached.

    OUTPUT: writes o (and ht at the end of the sequence, S where a half ends or begins); else stores what the gradients need, S
    before each chunk and E.
    """
    i_nh = i_n * HV + i_hv
    i_h = i_hv // (HV // H)
    o_k = tl.arange(0, BK)
    o_v = i_v * BV + tl.arange(0, BV)
    b_s = tl.zeros([BV, BK], dtype=tl.float32)
    if SPLIT == JOIN:
        b_s += load_state(reached, i_nh, o_k, o_v, K, V, True)
    elif USE_H0:
        if begin == 0:
            b_s += load_state(h0, i_nh, o_k, o_v, K, V, V_FIRST)
    if SPLIT == HALVES:
        # One loop for both, since a second one's addresses would not fit the registers.
        for i in range(tl.where(begin > 0, 0, 1), 2):
            b_s = _walk(b_s, q, k, kw, v, A, P, G, scales, o, St, E, i_n, i_hv, i_h, o_v, bos, n, tl.where(i == 0, start, begin),
                        tl.where(i == 0, begin, end), begin, NS, H, HV, K, V, BT, BK, BV, OUTPUT, PER_CHANNEL, PREC, COPY_LHS,
                        STAGES)
            if i == 0:
                _store_state(assumed, b_s, i_nh, o_k, o_v, K, V, True)
        if end * BT < n:
            _store_state(reached, b_s, i_nh, o_k, o_v, K, V, True)
    else:
        b_s = _walk(b_s, q, k, kw, v, A, P, G, scales, o, St, E, i_n, i_hv, i_h, o_v, bos, n, begin, end, begin, NS, H, HV, K, V,
                    BT, BK, BV, OUTPUT, PER_CHANNEL, PREC, COPY_LHS, STAGES)
    if STORE_HT:
        if end * BT >= n:
            _store_state(ht, b_s, i_nh, o_k, o_v, K, V, V_FIRST)


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
        m_tv = row_mask(i_t * BT + o_c < n, o_v, V, BV)
        _store_rows(dv + p_v + o_tv, b_dv, m_tv, left, not PER_CHANNEL)
    if STORE_DH0:
        _store_state(dh0, b_r, i_nh, o_k, o_v, K, V, V_FIRST)


@triton.jit
def _output_task(q, k, kw, A, P, G, scales, v, h0, o, ht, reached, assumed, i_task, cu, N, T, NS,
                 H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
                 BV: tl.constexpr, USE_H0: tl.constexpr, STORE_HT: tl.constexpr, V_FIRST: tl.constexpr, VARLEN: tl.constexpr,
                 PER_CHANNEL: tl.constexpr, PREC: tl.constexpr, COPY_LHS: tl.constexpr, SEGMENT: tl.constexpr,
                 SPLIT: tl.constexpr, STAGES: tl.constexpr):
    """A sequence, value head and V tile. HALVES: one more task for each, behind all others, takes the second half if it is worth
    a try; JOIN: where that was and started from another state, it is taken again."""
    NV: tl.constexpr = (V + BV - 1) // BV
    i_half = i_task // (N * (HV * NV))
    i_hv = i_task // NV % HV
    i_n = i_task // (HV * NV) % N
    bos, n = sequence(cu, i_n, T, VARLEN)
    start = 0
    begin = 0
    end = (n + BT - 1) // BT
    # A sequence has rows, or at least a state to hand on. An empty loop is not free: its loads ahead are set up.
    work = (n > 0) | STORE_HT
    if SPLIT > 0:
        cut, chunks = second_half(G, bos, i_n, end, i_hv, NS, HV, BT, SEGMENT)
        if SPLIT == JOIN:
            work = cut < end
            if work:
                o_k = tl.arange(0, BK)
                o_v = i_task % NV * BV + tl.arange(0, BV)
                work = not same_bits(load_state(reached, i_n * HV + i_hv, o_k, o_v, K, V, True),
                                     load_state(assumed, i_n * HV + i_hv, o_k, o_v, K, V, True))
            start = cut
            begin = cut
        elif i_half == 1:
            work = cut < end
            start = cut - chunks
            begin = cut
        else:
            end = cut
    if work:
        _state_loop(q, k, kw, v, A, P, G, scales, h0, o, ht, None, None, reached, assumed, i_n, i_hv, i_task % NV, bos, n, start,
                    begin, end, NS, H, HV, K, V, BT, BK, BV, USE_H0, STORE_HT, V_FIRST, True, PER_CHANNEL, PREC, COPY_LHS, SPLIT,
                    STAGES)


@triton.jit(do_not_specialize=["N", "T", "NS"])
def delta_recurrence(q, k, kw, A, P, G, scales, v, h0, o, ht, reached, assumed, cu, N, T, NS,
                     H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
                     BV: tl.constexpr, USE_H0: tl.constexpr, STORE_HT: tl.constexpr, V_FIRST: tl.constexpr,
                     VARLEN: tl.constexpr, PER_CHANNEL: tl.constexpr, PREC: tl.constexpr, COPY_LHS: tl.constexpr,
                     PERSISTENT: tl.constexpr, SEGMENT: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr):
    """Tasks (sequence, value head, V tile), a program each or, PERSISTENT, grid-stride. Writes o and ht; BK covers K. SPLIT: see
    `split`; the tasks of HALVES are twice as many."""
    PARTS: tl.constexpr = 2 if SPLIT == HALVES else 1
    if PERSISTENT:
        for i_task in range(tl.program_id(0), N * (PARTS * HV * ((V + BV - 1) // BV)), tl.num_programs(0)):
            _output_task(q, k, kw, A, P, G, scales, v, h0, o, ht, reached, assumed, i_task, cu, N, T, NS, H, HV, K, V, BT, BK, BV,
                         USE_H0, STORE_HT, V_FIRST, VARLEN, PER_CHANNEL, PREC, COPY_LHS, SEGMENT, SPLIT, STAGES)
    else:
        _output_task(q, k, kw, A, P, G, scales, v, h0, o, ht, reached, assumed, tl.program_id(0), cu, N, T, NS, H, HV, K, V, BT,
                     BK, BV, USE_H0, STORE_HT, V_FIRST, VARLEN, PER_CHANNEL, PREC, COPY_LHS, SEGMENT, SPLIT, STAGES)
    if VARLEN and SPLIT != JOIN:
        zero_rows(o, active_rows(cu, N, T), T, HV * V, 1024)


@triton.jit
def _state_task(q, k, kw, v, A, P, G, scales, h0, St, E, i_task, cu, T, NS,
                H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
                BV: tl.constexpr, USE_H0: tl.constexpr, V_FIRST: tl.constexpr, VARLEN: tl.constexpr,
                PER_CHANNEL: tl.constexpr, PREC: tl.constexpr, COPY_LHS: tl.constexpr, STAGES: tl.constexpr):
    NV: tl.constexpr = (V + BV - 1) // BV
    bos, n = sequence(cu, i_task // (HV * NV), T, VARLEN)
    if n > 0:
        _state_loop(q, k, kw, v, A, P, G, scales, h0, None, None, St, E, None, None, i_task // (HV * NV), i_task // NV % HV,
                    i_task % NV, bos, n, 0, 0, (n + BT - 1) // BT, NS, H, HV, K, V, BT, BK, BV, USE_H0, False, V_FIRST, False,
                    PER_CHANNEL, PREC, COPY_LHS, 0, STAGES)


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
                          PREC: tl.constexpr, COPY_LHS: tl.constexpr, PERSISTENT: tl.constexpr,
                          INTERLEAVED: tl.constexpr, STAGES: tl.constexpr):
    """Tasks 2 x (sequence, value head, V tile): the gradient recurrence, which takes longer, then the state recurrence; a
    program each or, PERSISTENT, grid-stride in each half of the programs. INTERLEAVED: the halves are the even and the odd
    programs, so that no recurrence waits for programs of empty sequences."""
    tasks = N * (HV * ((V + BV - 1) // BV))
    half = tl.num_programs(0) // 2
    if INTERLEAVED:
        i_p = tl.program_id(0) // 2
        backward = tl.program_id(0) % 2 == 0
    else:
        i_p = tl.program_id(0) % half
        backward = tl.program_id(0) < half
    if PERSISTENT:
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
        zero_rows(dv, active_rows(cu, N, T), T, HV * V, 1024)


def run_recurrence(operands: Operands, v: torch.Tensor, h0: torch.Tensor | None, store_ht: bool, v_first: bool,
                   packing: Packing) -> tuple[torch.Tensor, torch.Tensor | None]:
    """o like v, and the final state float32 if wanted."""
    (H, K), (HV, V) = operands.q.shape[2:], v.shape[2:]
    o = torch.empty_like(v)
    ht = v.new_empty(packing.N, HV, *((V, K) if v_first else (K, V)), dtype=torch.float32) if store_ht else None
    record = record_for("delta_recurrence", v.device, K=K, V=V, BT=packing.BT, dtype=v.dtype)
    tasks = packing.N * HV * -(-V // record.tiles["BV"])

    def run(programs: int, split: int, *seam: torch.Tensor | None) -> None:
        launch(delta_recurrence, programs, *operands.recurrence, v, h0, o, ht, *seam, packing.cu, packing.N, packing.T,
               packing.NS, record=record, H=H, HV=HV, K=K, V=V, BT=packing.BT, USE_H0=h0 is not None, STORE_HT=store_ht,
               V_FIRST=v_first, VARLEN=packing.varlen, PER_CHANNEL=operands.per_channel, SPLIT=split, STAGES=record.num_stages)

    if operands.per_channel or not worth_splitting(packing, tasks, record, v.device):
        run(programs_of(tasks, record, v.device), 0, None, None)
    else:
        seam = [v.new_empty(packing.N, HV, V, K, dtype=torch.float32) for _ in range(2)]
        run(2 * tasks, HALVES.value, *seam)
        run(tasks, JOIN.value, *seam)
    return o, ht


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
    stages = record.num_stages if operands.per_channel else stages_of(grid, record, v.device)
    launch(delta_two_recurrences, grid, *operands.recurrence, v, do, h0, dht, St, E, Rt, dv, dh0, packing.cu, packing.N,
           packing.T, packing.NS, record=record, H=H, HV=HV, K=K, V=V, BT=packing.BT, USE_H0=h0 is not None,
           USE_DHT=dht is not None, STORE_DH0=store_dh0, V_FIRST=v_first, VARLEN=packing.varlen,
           PER_CHANNEL=operands.per_channel, STAGES=stages)
    return St, E, Rt, dv, dh0
