"""Gated DeltaNet, the gradients of q and k through the states, with the pairs' products added: a chunk's rows, a tile of K.

Sums over the value heads of a key head, q and k normalised, S and R stored transposed:
    dq = Σ s e^G (dO S) + X k,    dk = Σ e^(G_C − G) β (E R) − Σ e^G (dV S) + Xᵀ q − W k.
Of each value head, for dg and dβ: w, row dots of k with e^(G_C − G) (E R); a, those of q with s e^G (dO S) less those of k with
e^G (dV S); and ⟨S, R⟩.
A task makes all of that, or, SPLIT, one dk, w and its share of a, and another dq and its own.
"""

import triton
import triton.language as tl

from graphlin.kernels.common import chunk, chunk_count, chunk_slot, row_mask, sequence
from graphlin.kernels.gates import norm_gradient


@triton.jit
def _tile(i_n, i_t, i_k, cu, T, NS, K: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, VARLEN: tl.constexpr):
    """A chunk's workspace slot and first row, the columns of a tile of K, the masks of its rows and of [BT, BK]."""
    bos, n = sequence(cu, i_n, T, VARLEN)
    slot = chunk_slot(bos, i_n, i_t, BT, NS)
    row = bos + i_t * BT
    o_c = tl.arange(0, BT)
    o_k = i_k * BK + tl.arange(0, BK)
    m_t = i_t * BT + o_c < n
    return slot, row, o_k, m_t, row_mask(m_t, o_k, K, BK)


@triton.jit
def _value_tile(i, i_h, slot, row, o_k, m_t, HV: tl.constexpr, R: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
                BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    """What round i reads: V tile and value head; place of the head's vectors; place, offsets and mask of values [BT, BV]; offsets
    and mask of states [BV, BK]."""
    NV: tl.constexpr = (V + BV - 1) // BV
    i_v = i % NV
    i_hv = i_h * R + i // NV
    p = slot * HV + i_hv
    o_v = i_v * BV + tl.arange(0, BV)
    m_tv = row_mask(m_t, o_v, V, BV)
    m_s = row_mask(o_v < V, o_k, K, BK)
    p_v = (row * HV + i_hv) * V
    o_x = tl.arange(0, BT)[:, None] * (HV * V) + o_v[None, :]
    o_s = o_v[:, None] * K + o_k[None, :]
    return i_v, i_hv, p, p_v, o_x, m_tv, o_s, m_s


@triton.jit
def _row_sums(b_x, b_r):
    return tl.sum(b_x, 1) * b_r


@triton.jit
def _store_gradient(dx, dqk, b_dx, b_x, b_r, p_x, p_w, m_x, PART: tl.constexpr, NK: tl.constexpr,
                    L2: tl.constexpr):
    """Of rows of q or k: finished where a tile has all of K, else the part that gdn_finish_gradients adds."""
    if NK == 1:
        tl.store(dx + p_x, norm_gradient(b_dx, b_x, b_r, L2).to(dx.dtype.element_ty), mask=m_x)
    else:
        tl.store(dqk + p_w + PART, b_dx)


@triton.jit
def _state_chunk(q, k, do, E, dv, St, Rt, G, b, rq, rk, xw, dq, dk, dqk, pk, psr, i_n, i_t, i_h, i_k, cu, T, NS, scale,
                 H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
                 BV: tl.constexpr, L2: tl.constexpr, VARLEN: tl.constexpr, PREC: tl.constexpr):
    """One loop over value heads and V tiles, so that the loads of the next are on their way while one's products run."""
    R: tl.constexpr = HV // H
    NK: tl.constexpr = (K + BK - 1) // BK
    NV: tl.constexpr = (V + BV - 1) // BV
    slot, row, o_k, m_t, m_tk = _tile(i_n, i_t, i_k, cu, T, NS, K, BT, BK, VARLEN)
    o_c = tl.arange(0, BT)
    p_k = (row * H + i_h) * K + o_c[:, None] * (H * K) + o_k[None, :]
    b_k = tl.load(k + p_k, mask=m_tk, other=0.)                                                          # [BT, BK]
    b_q = tl.load(q + p_k, mask=m_tk, other=0.)
    b_rq = tl.load(rq + (slot * H + i_h) * BT + o_c)
    b_rk = tl.load(rk + (slot * H + i_h) * BT + o_c)
    b_kn = (b_k.to(tl.float32) * b_rk[:, None]).to(b_k.dtype)
    b_qn = (b_q.to(tl.float32) * b_rq[:, None]).to(b_q.dtype)
    p_c = (slot * H + i_h) * (2 * BT * BT) + o_c[:, None] * BT + o_c[None, :]
    b_xs = tl.load(xw + p_c)                                                                             # [BT, BT]
    b_ws = tl.load(xw + p_c + BT * BT)
    b_dq = tl.zeros([BT, BK], dtype=tl.float32)
    b_dk = tl.zeros([BT, BK], dtype=tl.float32)
    b_w, b_a, b_sr = tl.zeros([BT], dtype=tl.float32), tl.zeros([BT], dtype=tl.float32), 0.0
    for i in range(0, R * NV):
        i_v, i_hv, p, p_v, o_x, m_tv, o_s, m_s = _value_tile(i, i_h, slot, row, o_k, m_t, HV, R, K, V, BT, BK, BV)
        b_G = tl.load(G + p * BT + o_c)
        b_gl = tl.load(G + p * BT + BT - 1)
        b_b = tl.load(b + p * BT + o_c)
        b_s = tl.load(St + p * (K * V) + o_s, mask=m_s, other=0.)                                        # [BV, BK]
        b_r = tl.load(Rt + p * (K * V) + o_s, mask=m_s, other=0.)
        b_rr = b_s.to(tl.float32) * b_r.to(tl.float32)
        b_x = tl.dot(tl.load(E + p_v + o_x, mask=m_tv, other=0.), b_r, input_precision=PREC)             # [BT, BK]
        b_eg = tl.exp2(b_G)
        b_et = tl.exp2(b_gl - b_G)
        b_dk += b_x * (b_et * b_b)[:, None]
        b_w1 = _row_sums(b_k.to(tl.float32) * b_x, b_rk * b_et)
        b_x = tl.dot(tl.load(do + p_v + o_x, mask=m_tv, other=0.), b_s, input_precision=PREC)
        b_dq += b_x * (b_eg * scale)[:, None]
        b_a1 = _row_sums(b_q.to(tl.float32) * b_x, b_rq * b_eg * scale)
        b_x = tl.dot(tl.load(dv + p_v + o_x, mask=m_tv, other=0.), b_s, input_precision=PREC)
        b_dk -= b_x * b_eg[:, None]
        b_a1 -= _row_sums(b_k.to(tl.float32) * b_x, b_rk * b_eg)
        b_w = tl.where(i_v > 0, b_w, 0.0) + b_w1
        b_a = tl.where(i_v > 0, b_a, 0.0) + b_a1
        b_sr = tl.where(i_v > 0, b_sr, 0.0) + tl.sum(tl.sum(b_rr, 0), 0)
        p_t = (i_k * NS + slot) * HV + i_hv
        tl.store(pk + p_t * (2 * BT) + o_c, b_w)
        tl.store(pk + p_t * (2 * BT) + BT + o_c, b_a)
        tl.store(psr + p_t, b_sr)
    b_dq = tl.dot(b_xs, b_kn, b_dq, input_precision=PREC)
    b_dk = tl.dot(tl.trans(b_xs), b_qn, b_dk, input_precision=PREC)
    b_dk -= tl.dot(b_ws, b_kn, input_precision=PREC)
    p_w = (slot * H + i_h) * (2 * BT * NK * BK) + o_c[:, None] * (NK * BK) + o_k[None, :]
    _store_gradient(dq, dqk, b_dq, b_q, b_rq, p_k, p_w, m_tk, 0, NK, L2)
    _store_gradient(dk, dqk, b_dk, b_k, b_rk, p_k, p_w, m_tk, BT * NK * BK, NK, L2)


@triton.jit
def _thread_sums(b_x):
    """Sums of a tile that add up to its own, [8, columns / 8]: of what each of 128 threads holds, so that none waits."""
    b_x = tl.reshape(b_x, [b_x.shape[0] // 8, 8, b_x.shape[1] // 8, 8])
    return tl.sum(tl.sum(b_x, 3), 0)


@triton.jit
def _split_chunk(q, k, do, E, dv, St, Rt, G, b, rq, rk, xw, dq, dk, dqk, pk, psr, i_n, i_t, i_h, i_k, cu, T, NS, scale,
                 H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
                 BV: tl.constexpr, L2: tl.constexpr, VARLEN: tl.constexpr, PREC: tl.constexpr, KEYS: tl.constexpr):
    """dk (KEYS) or dq. The pairs' products start the sums, so that nothing has to be loaded again behind the loop."""
    R: tl.constexpr = HV // H
    NK: tl.constexpr = (K + BK - 1) // BK
    NV: tl.constexpr = (V + BV - 1) // BV
    slot, row, o_k, m_t, m_tk = _tile(i_n, i_t, i_k, cu, T, NS, K, BT, BK, VARLEN)
    o_c = tl.arange(0, BT)
    p_k = (row * H + i_h) * K
    o_tk = o_c[:, None] * (H * K) + o_k[None, :]
    p_c = xw + (slot * H + i_h) * (2 * BT * BT)
    o_cc = o_c[:, None] * BT + o_c[None, :]
    b_k = tl.load(k + p_k + o_tk, mask=m_tk, other=0.)                                                   # [BT, BK]
    b_q = tl.load(q + p_k + o_tk, mask=m_tk, other=0.)
    b_rk = tl.load(rk + (slot * H + i_h) * BT + o_c)
    b_rq = tl.load(rq + (slot * H + i_h) * BT + o_c)
    b_xs = tl.load(p_c + o_cc)                                                                           # [BT, BT]
    b_kn = (b_k.to(tl.float32) * b_rk[:, None]).to(b_k.dtype)
    if KEYS:
        b_qn = (b_q.to(tl.float32) * b_rq[:, None]).to(b_q.dtype)
        b_dx = tl.dot(tl.trans(b_xs), b_qn, input_precision=PREC)                                        # [BT, BK]
        b_dx -= tl.dot(tl.load(p_c + BT * BT + o_cc), b_kn, input_precision=PREC)
    else:
        b_dx = tl.dot(b_xs, b_kn, input_precision=PREC)
    b_w, b_a = tl.zeros([BT], dtype=tl.float32), tl.zeros([BT], dtype=tl.float32)
    b_sr = tl.zeros([8, BK // 8], dtype=tl.float32)
    for i in range(0, R * NV):
        i_v, i_hv, p, p_v, o_x, m_tv, o_s, m_s = _value_tile(i, i_h, slot, row, o_k, m_t, HV, R, K, V, BT, BK, BV)
        p_t = (i_k * NS + slot) * HV + i_hv
        b_G = tl.load(G + p * BT + o_c)
        b_eg = tl.exp2(b_G)
        b_s = tl.load(St + p * (K * V) + o_s, mask=m_s, other=0.)                                        # [BV, BK]
        b_a = tl.where(i_v > 0, b_a, 0.0)
        if KEYS:
            b_et = tl.exp2(tl.load(G + p * BT + BT - 1) - b_G)
            b_b = tl.load(b + p * BT + o_c)
            b_r = tl.load(Rt + p * (K * V) + o_s, mask=m_s, other=0.)
            b_sr = tl.where(i_v > 0, b_sr, 0.0) + _thread_sums(b_s.to(tl.float32) * b_r.to(tl.float32))
            b_x = tl.dot(tl.load(E + p_v + o_x, mask=m_tv, other=0.), b_r, input_precision=PREC)         # [BT, BK]
            b_dx += b_x * (b_et * b_b)[:, None]
            b_w = tl.where(i_v > 0, b_w, 0.0) + _row_sums(b_k.to(tl.float32) * b_x, b_rk * b_et)
            b_x = tl.dot(tl.load(dv + p_v + o_x, mask=m_tv, other=0.), b_s, input_precision=PREC)
            b_dx -= b_x * b_eg[:, None]
            b_a -= _row_sums(b_k.to(tl.float32) * b_x, b_rk * b_eg)
            tl.store(pk + p_t * (3 * BT) + o_c, b_w)
            tl.store(pk + p_t * (3 * BT) + BT + o_c, b_a)
            p_sr = psr + p_t * BK + tl.arange(0, 8)[:, None] * (BK // 8) + tl.arange(0, BK // 8)[None, :]
            tl.store(p_sr, b_sr)
        else:
            b_x = tl.dot(tl.load(do + p_v + o_x, mask=m_tv, other=0.), b_s, input_precision=PREC)
            b_dx += b_x * (b_eg * scale)[:, None]
            b_a += _row_sums(b_q.to(tl.float32) * b_x, b_rq * b_eg * scale)
            tl.store(pk + p_t * (3 * BT) + 2 * BT + o_c, b_a)
    p_w = (slot * H + i_h) * (2 * BT * NK * BK) + o_c[:, None] * (NK * BK) + o_k[None, :]
    if KEYS:
        _store_gradient(dk + p_k, dqk, b_dx, b_k, b_rk, o_tk, p_w, m_tk, BT * NK * BK, NK, L2)
    else:
        _store_gradient(dq + p_k, dqk, b_dx, b_q, b_rq, o_tk, p_w, m_tk, 0, NK, L2)


@triton.jit(do_not_specialize=["N", "T", "NT", "NTS", "NS"])
def gdn_state_gradients(q, k, do, E, dv, St, Rt, G, b, rq, rk, xw, dq, dk, dqk, pk, psr, cu, chunks, N, T, NT, NTS, NS, scale,
                        H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr,
                        BK: tl.constexpr, BV: tl.constexpr, SPLIT: tl.constexpr, L2: tl.constexpr, VARLEN: tl.constexpr,
                        GRAPH_CAPTURE: tl.constexpr, PREC: tl.constexpr):
    """Tasks (chunk, key head, K tile), SPLIT: two each, dk and dq, side by side, grid-stride. Writes dq, dk where a tile covers
    K, else their parts dqk."""
    NK: tl.constexpr = (K + BK - 1) // BK
    TASKS: tl.constexpr = H * NK * 2 if SPLIT else H * NK
    for i_task in range(tl.program_id(0), chunk_count(cu, N, T, NT, BT, GRAPH_CAPTURE) * TASKS, tl.num_programs(0)):
        i_n, i_t = chunk(chunks, i_task // TASKS, NTS, VARLEN)
        live = True
        if GRAPH_CAPTURE:
            live = (i_n >= 0) & (i_n < N)
        if live:
            if SPLIT:
                i_pair = i_task // 2
                i_h, i_k = (i_pair // NK) % H, i_pair % NK
                # The other of the two in the next round, so that every program has as much to do.
                if (i_task + i_pair // tl.maximum(tl.num_programs(0) // 2, 1)) % 2 == 0:
                    _split_chunk(q, k, do, E, dv, St, Rt, G, b, rq, rk, xw, dq, dk, dqk, pk, psr, i_n, i_t, i_h, i_k, cu, T, NS,
                                 scale, H, HV, K, V, BT, BK, BV, L2, VARLEN, PREC, True)
                else:
                    _split_chunk(q, k, do, E, dv, St, Rt, G, b, rq, rk, xw, dq, dk, dqk, pk, psr, i_n, i_t, i_h, i_k, cu, T, NS,
                                 scale, H, HV, K, V, BT, BK, BV, L2, VARLEN, PREC, False)
            else:
                _state_chunk(q, k, do, E, dv, St, Rt, G, b, rq, rk, xw, dq, dk, dqk, pk, psr, i_n, i_t, (i_task // NK) % H,
                             i_task % NK, cu, T, NS, scale, H, HV, K, V, BT, BK, BV, L2, VARLEN, PREC)
