"""Kimi Delta Attention, the gradients inside a chunk.

A chunk is walked through from its last block of 16 rows to its first. With c the sums of log decays (base 2) from the first row
of a row's block and T those of whole blocks, a reader i of block I and a writer j of an earlier block J meet at J's end:
    Γ_ij = 2^(c_i) · 2^(ΣT between J and I) · 2^(T_J - c_j),
pairs of one block meet as `kda_anchors` says. Every exponent is <= 0, or bounded. q, k of a reader and y = β∘k of a writer are
rounded once with their decay and used in both directions (a, see kda_gradients): what a pair gives to dg outside j < t <= i then
cancels to the last digit of float32.
"""

import triton
import triton.language as tl

from graphlin.kernels.common import active_rows, chunk, chunk_count, chunk_slot, row_mask, sequence, zero_rows
from graphlin.kernels.gates import decay_rate, gate_gradients, load_channel_gates
from graphlin.kernels.kda_block import block_gradients, log_decay_gradient
from graphlin.kernels.kda_unrolled import unrolled_chunk_gradients


@triton.jit
def _rows(x, r, p_x, p_r, m_t, o_b, o_k, scale, H: tl.constexpr, K: tl.constexpr, BK: tl.constexpr):
    """scale r∘x of a block of rows, `[16, BK]`."""
    b_x = tl.load(x + p_x + (o_b[:, None] * (H * K) + o_k[None, :]), mask=row_mask(m_t, o_k, K, BK), other=0.).to(tl.float32)
    return b_x * (tl.load(r + p_r + o_b) * scale)[:, None]


@triton.jit
def _sums(c, p_c, o_b, o_k, K: tl.constexpr):
    """c of a block's rows `[16, BK]`, and T `[BK]`."""
    m = o_k < K
    return (tl.load(c + p_c + (o_b[:, None] * K + o_k[None, :]), mask=m[None, :], other=0.),
            tl.load(c + p_c + 15 * K + o_k, mask=m, other=0.))


@triton.jit
def _product(ts, p_t, o_b, o_k, K: tl.constexpr):
    """A block's rows of one of T1, T2, T3, `[16, BK]`."""
    return tl.load(ts + p_t + (o_b[:, None] * K + o_k[None, :]), mask=(o_k < K)[None, :], other=0.).to(tl.float32)


@triton.jit
def _write_later(q, k, c, rq, rk, fw, p_q, p_r, p_c, p_f, i_b, o_b, o_k, first_row, n, b_y, b_a, scale, lift, H: tl.constexpr,
                 K: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, PREC: tl.constexpr):
    """Block i_b, whose decayed y is given, as a writer to the later blocks. Returns κ without the decay of y; a; ΣT of them."""
    DT: tl.constexpr = fw.dtype.element_ty
    b_w = tl.zeros([16, BK], dtype=tl.float32)
    b_t = tl.zeros([BK], dtype=tl.float32)
    for j in range(i_b + 1, BT // 16):
        m_t = first_row + j * 16 + o_b < n
        b_c, b_next = _sums(c, p_c + j * (16 * K), o_b, o_k, K)
        b_er = tl.exp2(b_c) * lift
        x_q = (_rows(q, rq, p_q + j * (16 * H * K), p_r + j * 16, m_t, o_b, o_k, scale, H, K, BK) * b_er).to(DT)
        x_k = (_rows(k, rk, p_q + j * (16 * H * K), p_r + j * 16, m_t, o_b, o_k, 1.0, H, K, BK) * b_er).to(DT)
        p = fw + p_f + (j * BT + i_b) * 16 + (o_b[None, :] * BT + o_b[:, None])                          # transposed
        u = tl.dot(tl.load(p), x_q, input_precision=PREC)                                                # [16, BK]
        u = tl.dot(tl.load(p + BT * BT), x_k, u, input_precision=PREC)
        b_e = tl.exp2(b_t)[None, :]
        b_a -= (b_y * b_e).to(DT).to(tl.float32) * u
        b_w += b_e * u
        b_t += b_next
    return b_w, b_a, b_t


@triton.jit
def _read_earlier(k, c, b, rk, fw, ts, p_q, p_r, p_b, p_c, p_f, p_t, i_b, o_b, o_k, first_row, n, b_rest, lift, H: tl.constexpr,
                  K: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, PREC: tl.constexpr):
    """Block i_b as a reader of the earlier blocks: F y and W y of them; ΣT of them; what dg gets from all their rows, with
    `2^b_rest` from the beginning of i_b to the end of the chunk."""
    DT: tl.constexpr = fw.dtype.element_ty
    u_q = tl.zeros([16, BK], dtype=tl.float32)
    u_k = tl.zeros([16, BK], dtype=tl.float32)
    b_t = tl.zeros([BK], dtype=tl.float32)
    b_past = tl.zeros([16, BK], dtype=tl.float32)
    for i in range(0, i_b):
        j = i_b - 1 - i
        m_t = first_row + j * 16 + o_b < n
        b_c, b_next = _sums(c, p_c + j * (16 * K), o_b, o_k, K)
        b_y = _rows(k, rk, p_q + j * (16 * H * K), p_r + j * 16, m_t, o_b, o_k, 1.0, H, K, BK)
        b_y = b_y * tl.load(b + p_b + j * 16 + o_b)[:, None] * (tl.exp2(b_next[None, :] - b_c) * (1.0 / lift))
        b_past += (tl.exp2(b_t + b_rest) * lift)[None, :] * (b_y * _product(ts, p_t + j * (16 * K), o_b, o_k, K))
        x_y = (b_y * tl.exp2(b_t)[None, :]).to(DT)
        p = fw + p_f + (i_b * BT + j) * 16 + (o_b[:, None] * BT + o_b[None, :])
        u_q = tl.dot(tl.load(p), x_y, u_q, input_precision=PREC)                                         # [16, BK]
        u_k = tl.dot(tl.load(p + BT * BT), x_y, u_k, input_precision=PREC)
        b_t += b_next
    return u_q, u_k, b_t, tl.sum(b_past, 0)


@triton.jit
def _intra_block(q, k, g, dt_bias, c, b, rq, rk, fw, ts, dg, dqk, pb, p_q, p_r, p_g, p_b, p_c, p_f, p_t, p_w, p_d, i_hv, i_b,
                 o_k, first_row, n, b_all, rate, lower_bound, lift, scale, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr,
                 BT: tl.constexpr, BK: tl.constexpr, NK: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr,
                 SAFE: tl.constexpr, PREC: tl.constexpr, REV_SCAN: tl.constexpr, PAIRWISE: tl.constexpr):
    """Block i_b of a chunk, one tile of channels; b_all is what dg gets in all of its rows from elsewhere.

    Returns the sum of a, and the terms of dA_log and ddt_bias.
    """
    DT: tl.constexpr = fw.dtype.element_ty
    o_b = tl.arange(0, 16)
    first = i_b * 16
    m_t = first_row + first + o_b < n
    p_x = p_q + first * (H * K)
    b_q = _rows(q, rq, p_x, p_r + first, m_t, o_b, o_k, scale, H, K, BK)
    b_k = _rows(k, rk, p_x, p_r + first, m_t, o_b, o_k, 1.0, H, K, BK)
    b_b = tl.load(b + p_b + first + o_b)
    b_c, b_t = _sums(c, p_c + first * K, o_b, o_k, K)
    b_er = tl.exp2(b_c) * lift
    b_ew = tl.exp2(b_t[None, :] - b_c) * (1.0 / lift)
    b_y = b_k * b_b[:, None]

    b_dw, b_a, b_later = _write_later(q, k, c, rq, rk, fw, p_q, p_r, p_c, p_f, i_b, o_b, o_k, first_row, n, b_y * b_ew,
                                      tl.zeros([16, BK], dtype=tl.float32), scale, lift, H, K, BT, BK, PREC)
    u_q, u_k, b_earlier, b_past = _read_earlier(k, c, b, rk, fw, ts, p_q, p_r, p_b, p_c, p_f, p_t, i_b, o_b, o_k, first_row, n,
                                                b_t + b_later, lift, H, K, BT, BK, PREC)
    p = fw + p_f + first * (BT + 1) + (o_b[:, None] * BT + o_b[None, :])
    b_f = tl.load(p)                                                                                     # [16, 16]
    b_eye = tl.sum(tl.where(o_b[:, None] == o_b[None, :], b_f.to(tl.float32), 0.0), 1)                   # [16]
    b_dq, b_dr, b_dw, b_a = block_gradients(
        b_q, b_k, b_y, b_c, b_er, u_q, u_k, tl.where(o_b[:, None] > o_b[None, :], b_f, 0.0).to(DT), tl.load(p + BT * BT),
        b_ew * b_dw, b_a, lift, BK, SAFE, PAIRWISE, PREC)

    b_x = _product(ts, p_t + first * K, o_b, o_k, K) * b_ew * (tl.exp2(b_later) * lift)[None, :]
    b_dw += b_x + b_eye[:, None] * b_q
    tl.store(pb + p_d + first + o_b, tl.sum(b_k * b_dw, 1))
    b_w = b_x * b_y
    b_er = b_er * (tl.exp2(b_earlier) * (1.0 / lift))[None, :]
    b_x = _product(ts, p_t + BT * K + first * K, o_b, o_k, K) * b_er
    b_a += b_q * b_x
    b_dq = (b_dq + b_x + b_eye[:, None] * b_y) * scale
    b_x = _product(ts, p_t + 2 * BT * K + first * K, o_b, o_k, K) * b_er
    b_a -= b_k * b_x
    b_dr += b_b[:, None] * b_dw - b_x
    p = dqk + p_w + first * (NK * BK) + (o_b[:, None] * (NK * BK) + o_k[None, :])
    tl.store(p, b_dq.to(dqk.dtype.element_ty))
    tl.store(p + BT * NK * BK, b_dr.to(dqk.dtype.element_ty))

    m_tk = row_mask(m_t, o_k, K, BK)
    p_x = p_g + first * (HV * K)
    b_dg = log_decay_gradient(b_a, b_w, b_all + b_past, o_b, PREC, REV_SCAN)
    b_u = load_channel_gates(g, dt_bias, p_x, i_hv, m_t, o_b, o_k, HV, K, BK, BIAS)
    b_dg, b_da = gate_gradients(tl.where(m_tk, b_dg, 0.0), b_u, rate, lower_bound, GATE)
    tl.store(dg + p_x + (o_b[:, None] * (HV * K) + o_k[None, :]), b_dg.to(dg.dtype.element_ty), mask=m_tk)
    return tl.sum(b_a, 0), b_da, b_dg


@triton.jit
def _intra_chunk(q, k, g, A_log, dt_bias, GC, c, b, rq, rk, fw, ts, sr, dg, dqk, pb, pa, i_n, i_t, i_hv, i_k, cu, T, NS, scale,
                 lower_bound, lift, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
                 GATE: tl.constexpr, BIAS: tl.constexpr, SAFE: tl.constexpr, VARLEN: tl.constexpr, PREC: tl.constexpr,
                 REV_SCAN: tl.constexpr, PAIRWISE: tl.constexpr, UNROLLED: tl.constexpr, FAST: tl.constexpr):
    NK: tl.constexpr = (K + BK - 1) // BK
    bos, n = sequence(cu, i_n, T, VARLEN)
    slot = chunk_slot(bos, i_n, i_t, BT, NS)
    row = bos + i_t * BT
    i_h = i_hv // (HV // H)
    p = slot * HV + i_hv
    o_k = i_k * BK + tl.arange(0, BK)
    if (SAFE and BT == 64) and UNROLLED:
        unrolled_chunk_gradients(
            q, k, g, dt_bias, GC, c, b, rq, rk, fw, ts, sr, dg, dqk, pb, pa, (row * H + i_h) * K, (slot * H + i_h) * BT,
            (row * HV + i_hv) * K, p, (i_k * NS * HV + p) * BT, i_hv, o_k, i_t * BT, n, decay_rate(A_log, i_hv), lower_bound,
            lift, scale, H, HV, K, BT, BK, GATE, BIAS, PREC, FAST)
    else:
        b_all = tl.exp2(tl.load(GC + p * K + o_k, mask=o_k < K, other=0.))                                   # [BK]
        b_all = b_all * tl.load(sr + p * K + o_k, mask=o_k < K, other=0.)
        b_da = tl.zeros([16, BK], dtype=tl.float32)
        b_db = tl.zeros([16, BK], dtype=tl.float32)
        for i in range(0, BT // 16):
            a, da, db = _intra_block(
                q, k, g, dt_bias, c, b, rq, rk, fw, ts, dg, dqk, pb, (row * H + i_h) * K, (slot * H + i_h) * BT,
                (row * HV + i_hv) * K, p * BT, p * (BT * K), p * (2 * BT * BT), p * (3 * BT * K), p * (2 * BT * NK * BK),
                (i_k * NS * HV + p) * BT, i_hv, BT // 16 - 1 - i, o_k, i_t * BT, n, b_all, decay_rate(A_log, i_hv), lower_bound,
                lift, scale, H, HV, K, BT, BK, NK, GATE, BIAS, SAFE, PREC, REV_SCAN, PAIRWISE)
            b_all += a
            b_da += da
            b_db += db
        if GATE > 0:
            p_a = p * (2 * NK * BK) + o_k
            tl.store(pa + p_a, tl.sum(b_da, 0))
            tl.store(pa + p_a + NK * BK, tl.sum(b_db, 0))


@triton.jit
def _intra_task(q, k, g, A_log, dt_bias, GC, c, b, rq, rk, fw, ts, sr, dg, dqk, pb, pa, i_task, cu, chunks, N, T, NTS, NS, scale,
                lower_bound, lift, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
                GATE: tl.constexpr, BIAS: tl.constexpr, SAFE: tl.constexpr, VARLEN: tl.constexpr, GRAPH_CAPTURE: tl.constexpr,
                PREC: tl.constexpr, REV_SCAN: tl.constexpr, PAIRWISE: tl.constexpr, UNROLLED: tl.constexpr, FAST: tl.constexpr):
    NK: tl.constexpr = (K + BK - 1) // BK
    i_n, i_t = chunk(chunks, i_task // (HV * NK), NTS, VARLEN)
    live = True
    if GRAPH_CAPTURE:
        live = (i_n >= 0) & (i_n < N)
    if live:
        _intra_chunk(q, k, g, A_log, dt_bias, GC, c, b, rq, rk, fw, ts, sr, dg, dqk, pb, pa, i_n, i_t, (i_task // NK) % HV,
                     i_task % NK, cu, T, NS, scale, lower_bound, lift, H, HV, K, BT, BK, GATE, BIAS, SAFE, VARLEN, PREC,
                     REV_SCAN, PAIRWISE, UNROLLED, FAST)


@triton.jit(do_not_specialize=["N", "T", "NT", "NTS", "NS"])
def kda_intra_gradients(q, k, g, A_log, dt_bias, GC, c, b, rq, rk, fw, ts, sr, dg, dqk, pb, pa, cu, chunks, N, T, NT, NTS, NS,
                        scale, lower_bound, lift, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, BT: tl.constexpr,
                        BK: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr, SAFE: tl.constexpr, VARLEN: tl.constexpr,
                        GRAPH_CAPTURE: tl.constexpr, PREC: tl.constexpr, COPY_LHS: tl.constexpr, REV_SCAN: tl.constexpr,
                        PAIRWISE: tl.constexpr, UNROLLED: tl.constexpr, FAST: tl.constexpr, PERSISTENT: tl.constexpr):
    """Tasks (chunk, value head, K tile), a program each or, PERSISTENT, grid-stride."""
    NK: tl.constexpr = (K + BK - 1) // BK
    tasks = chunk_count(cu, N, T, NT, BT, GRAPH_CAPTURE) * (HV * NK)
    first = tl.program_id(0)
    if PERSISTENT:
        for i_task in range(first, tasks, tl.num_programs(0)):
            _intra_task(q, k, g, A_log, dt_bias, GC, c, b, rq, rk, fw, ts, sr, dg, dqk, pb, pa, i_task, cu, chunks, N, T, NTS, NS,
                        scale, lower_bound, lift, H, HV, K, BT, BK, GATE, BIAS, SAFE, VARLEN, GRAPH_CAPTURE, PREC, REV_SCAN,
                        PAIRWISE, UNROLLED, FAST)
    elif first < tasks:
        _intra_task(q, k, g, A_log, dt_bias, GC, c, b, rq, rk, fw, ts, sr, dg, dqk, pb, pa, first, cu, chunks, N, T, NTS, NS,
                    scale, lower_bound, lift, H, HV, K, BT, BK, GATE, BIAS, SAFE, VARLEN, GRAPH_CAPTURE, PREC, REV_SCAN, PAIRWISE,
                    UNROLLED, FAST)
    if VARLEN:
        zero_rows(dg, active_rows(cu, N, T), T, HV * K, 1024)
