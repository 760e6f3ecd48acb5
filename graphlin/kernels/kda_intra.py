"""Kimi Delta Attention, the gradients inside a chunk: all rows of a tile of channels at once.

With c the sums of log decays (base 2) from the first row of a row's block of 16 and T those of whole blocks, a reader i of block
I and a writer j of block J, d = I - J > 0 blocks before, meet at J's end:
    Γ_ij = 2^(c_i) · 2^(T_{J+1} + … + T_{J+d-1}) · 2^(T_J - c_j).
Readers are the same at every distance d and writers are decayed once more from one to the next, so that each distance is a
product of a whole chunk, masked to its pairs. Pairs of one block meet as `kda_anchors` says. Every exponent is <= 0, or bounded.
q, k of a reader and y = β∘k of a writer are rounded once with their decay and used in both directions (a, see kda_gradients):
what a pair gives to dg outside j < t <= i then cancels to the last digit of float32.
"""

import triton
import triton.language as tl

from graphlin.kernels.common import active_rows, chunk, chunk_count, chunk_slot, row_mask, sequence, zero_rows
from graphlin.kernels.gates import decay_rate, gate_gradients, load_channel_gates
from graphlin.kernels.kda_anchors import block_distance, level_pairs
from graphlin.kernels.kda_blocks import intra_blocks, load_rows, load_tile


@triton.jit
def _block_decay(c, p_c, o_c, o_k, d, K: tl.constexpr, BT: tl.constexpr):
    """`2^T` of the block d blocks behind a row's own, 1 behind the chunk: [BT, BK]."""
    b_e = tl.zeros([BT, 1], dtype=tl.float32) + 1.0
    for i in tl.static_range(0, BT // 16):
        b_i = tl.exp2(tl.load(c + p_c + (i * 16 + 15) * K + o_k, mask=o_k < K, other=0.))
        b_e = tl.where((o_c // 16 + d == i)[:, None], b_i[None, :], b_e)
    return b_e


@triton.jit
def _own_sum(c, p_c, o_c, o_k, K: tl.constexpr, BT: tl.constexpr):
    """`T` of a row's block: [BT, BK]."""
    b_t = tl.zeros([BT, 1], dtype=tl.float32)
    for i in tl.static_range(0, BT // 16):
        b_i = tl.load(c + p_c + (i * 16 + 15) * K + o_k, mask=o_k < K, other=0.)
        b_t = tl.where((o_c // 16 == i)[:, None], b_i[None, :], b_t)
    return b_t


@triton.jit
def _past_decay(c, p_c, o_c, o_k, K: tl.constexpr, BT: tl.constexpr):
    """`2^ΣT` over the blocks before a row's own: [BT, BK]."""
    b_e = tl.zeros([BT, 1], dtype=tl.float32) + 1.0
    for i in tl.static_range(0, BT // 16 - 1):
        b_i = tl.exp2(tl.load(c + p_c + (i * 16 + 15) * K + o_k, mask=o_k < K, other=0.))
        b_e = b_e * tl.where((o_c // 16 > i)[:, None], b_i[None, :], 1.0)
    return b_e


@triton.jit
def _as_product(b_x, BT: tl.constexpr, BK: tl.constexpr, DT: tl.constexpr, PREC: tl.constexpr):
    """b_x plus a product of zeros. Triton keeps what follows from loads in the loads' layout and makes it once more in that of
    products where both meet; what follows from this is in the products' alone."""
    return tl.dot(tl.zeros([BT, 16], dtype=DT), tl.zeros([16, BK], dtype=DT), b_x, input_precision=PREC)


@triton.jit
def _pair_sums(p_f, x_q, x_k, x_y, u_q, u_k, m, BT: tl.constexpr, PREC: tl.constexpr):
    """The pairs of mask m of decayed readers q, k and writers y: adds F y and W y to u_q and u_k, returns Fᵀq + Wᵀk as well.
    What is loaded for a product alone reaches the tensor cores without passing through registers' layouts, transposed too."""
    b_f = tl.load(p_f, mask=m, other=0.)                                                                 # [BT, BT]
    b_w = tl.load(p_f + BT * BT, mask=m, other=0.)
    u_q = tl.dot(b_f, x_y, u_q, input_precision=PREC)                                                    # [BT, BK]
    u_k = tl.dot(b_w, x_y, u_k, input_precision=PREC)
    u_y = tl.dot(tl.trans(b_f), x_q, input_precision=PREC)
    u_y = tl.dot(tl.trans(b_w), x_k, u_y, input_precision=PREC)
    return u_q, u_k, u_y


@triton.jit
def _level_gradients(c, p_c, p_f, b_q, b_k, b_b, b_c, b_dq, b_dr, b_dw, b_a, o_c, o_k, K: tl.constexpr, BT: tl.constexpr,
                     BK: tl.constexpr, PREC: tl.constexpr):
    """Adds the pairs of the dyadic levels, which meet at the last row of a lower half."""
    DT: tl.constexpr = p_f.dtype.scalar.element_ty
    for i in range(0, 4):
        h = 8 >> i
        p = p_c + (o_c // (2 * h) * (2 * h) + h - 1)[:, None] * K + o_k[None, :]
        b_e = tl.exp2(-tl.abs(b_c - tl.load(c + p, mask=(o_k < K)[None, :], other=0.)))
        x_q = (b_q * b_e).to(DT)
        x_k = (b_k * b_e).to(DT)
        x_y = (b_k * b_b * b_e).to(DT)
        b_0 = tl.zeros([BT, BK], dtype=tl.float32)
        u_q, u_k, u_y = _pair_sums(p_f, x_q, x_k, x_y, b_0, b_0, level_pairs(h, BT), BT, PREC)
        b_dq += b_e * u_q
        b_dr += b_e * u_k
        b_dw += b_e * u_y
        b_a += x_q.to(tl.float32) * u_q + x_k.to(tl.float32) * u_k - x_y.to(tl.float32) * u_y
    return b_dq, b_dr, b_dw, b_a


@triton.jit
def _tile(q, k, c, rq, rk, p_q, p_r, p_c, m_t, o_c, o_k, scale, H: tl.constexpr, K: tl.constexpr, BT: tl.constexpr,
          BK: tl.constexpr, DT: tl.constexpr, PREC: tl.constexpr, EVICT: tl.constexpr):
    """q, k and c: [BT, BK]. Loads of another EVICT are loads again, not registers kept meanwhile."""
    b_c = _as_product(load_tile(c, p_c, o_c, o_k, K, EVICT), BT, BK, DT, PREC)
    return (load_rows(q, rq, p_q, p_r, m_t, o_c, o_k, scale, H, K, BK, EVICT),
            load_rows(k, rk, p_q, p_r, m_t, o_c, o_k, 1.0, H, K, BK, EVICT), b_c)


@triton.jit
def _distance_gradients(c, p_c, p_f, x_q, x_k, b_y, b_e, o_c, o_k, FIRST: tl.constexpr, K: tl.constexpr, BT: tl.constexpr,
                        BK: tl.constexpr, PREC: tl.constexpr):
    """The pairs of readers q, k and writers y, decayed by e, of blocks at least FIRST apart.

    Returns F y and W y of the decayed y, κ, its part of a, and e decayed on to the end of the chunk.
    """
    b_d = block_distance(BT)
    u_q = tl.zeros([BT, BK], dtype=tl.float32)
    u_k = tl.zeros([BT, BK], dtype=tl.float32)
    b_dw = tl.zeros([BT, BK], dtype=tl.float32)
    b_a = tl.zeros([BT, BK], dtype=tl.float32)
    for d in range(FIRST, BT // 16):
        x_y = (b_y * b_e).to(x_q.dtype)
        u_q, u_k, u_y = _pair_sums(p_f, x_q, x_k, x_y, u_q, u_k, b_d == d, BT, PREC)
        b_dw += b_e * u_y
        b_a -= x_y.to(tl.float32) * u_y
        b_e = b_e * _block_decay(c, p_c, o_c, o_k, d, K, BT)
    return u_q, u_k, b_dw, b_a, b_e


@triton.jit
def _add_rows(b_m, b_x, b_y, PREC: tl.constexpr):
    """b_y plus the sums of rows of b_x that a matrix of zeros and ones tells. Where products needn't be float32: in two parts of
    bfloat16, which have more digits than tf32."""
    if b_m.dtype == tl.bfloat16:
        b_h = b_x.to(tl.bfloat16)
        b_y = tl.dot(b_m, b_h, b_y)
        b_y = tl.dot(b_m, (b_x - b_h.to(tl.float32)).to(tl.bfloat16), b_y)
    else:
        b_y = tl.dot(b_m, b_x, b_y, input_precision=PREC)
    return b_y


@triton.jit
def _log_decay_gradient(b_a, b_w, b_all, o_c, PREC: tl.constexpr):
    """dg: a is due to its row and those before it, w to the rows behind it, all to every row. Without differences of sums, which
    would lose what decays leave of terms."""
    before = tl.where(o_c[:, None] > o_c[None, :], 1.0, 0.0)
    if PREC == "tf32":
        before = before.to(tl.bfloat16)
    return _add_rows(tl.trans(before), b_a, _add_rows(before, b_w, b_a + b_all[None, :], PREC), PREC)


@triton.jit
def _intra_tile(q, k, g, dt_bias, GC, c, b, rq, rk, fw, eye, ts, sr, dg, dqk, pb, pa, p_q, p_r, p_g, p, i_hv, i_k, NS,
                first_row, n, rate, lower_bound, lift, scale, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr,
                BT: tl.constexpr, BK: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr, SAFE: tl.constexpr,
                PREC: tl.constexpr):
    NK: tl.constexpr = (K + BK - 1) // BK
    o_c = tl.arange(0, BT)
    o_k = i_k * BK + tl.arange(0, BK)
    m_t = first_row + o_c < n
    p_c = p * (BT * K)
    p_f = fw + p * (2 * BT * BT)
    p_t = p * (3 * BT * K)
    p_p = p_f + o_c[:, None] * BT + o_c[None, :]
    DT: tl.constexpr = fw.dtype.element_ty
    b_b = tl.load(b + p * BT + o_c)[:, None]
    b_q, b_k, b_c = _tile(q, k, c, rq, rk, p_q, p_r, p_c, m_t, o_c, o_k, scale, H, K, BT, BK, DT, PREC, "evict_last")
    b_er = tl.exp2(b_c) * lift
    if SAFE:
        b_e = tl.exp2(-b_c) * (1.0 / lift)
    else:
        b_e = tl.exp2(_own_sum(c, p_c, o_c, o_k, K, BT) - b_c)
    u_q, u_k, b_dw, b_a, b_e = _distance_gradients(c, p_c, p_p, (b_q * b_er).to(DT), (b_k * b_er).to(DT), b_k * b_b, b_e, o_c,
                                                   o_k, 0 if SAFE else 1, K, BT, BK, PREC)
    b_q, b_k, b_c = _tile(q, k, c, rq, rk, p_q, p_r, p_c, m_t, o_c, o_k, scale, H, K, BT, BK, DT, PREC, "evict_first")
    b_er = tl.exp2(b_c) * lift
    b_a += (b_q * b_er).to(DT).to(tl.float32) * u_q + (b_k * b_er).to(DT).to(tl.float32) * u_k
    b_dq = b_er * u_q
    b_dr = b_er * u_k
    b_y = b_k * b_b
    if not SAFE:
        b_dq, b_dr, b_dw, b_a = _level_gradients(c, p_c, p_p, b_q, b_k, b_b, b_c, b_dq, b_dr, b_dw, b_a, o_c, o_k, K, BT, BK,
                                                 PREC)

    b_eye = tl.load(eye + p * BT + o_c)[:, None]
    b_x = load_tile(ts, p_t, o_c, o_k, K, "") * (b_e * lift)
    b_dw += b_x + b_eye * b_q
    tl.store(pb + (i_k * NS * HV + p) * BT + o_c, tl.sum(b_k * b_dw, 1))
    b_w = b_x * b_y
    b_er = tl.exp2(b_c) * _past_decay(c, p_c, o_c, o_k, K, BT)
    b_x = load_tile(ts, p_t + BT * K, o_c, o_k, K, "") * b_er
    b_a += b_q * b_x
    b_dq = (b_dq + (b_x + b_eye * b_y)) * scale
    b_x = load_tile(ts, p_t + 2 * BT * K, o_c, o_k, K, "") * b_er
    b_a -= b_k * b_x
    b_dr += b_b * b_dw - b_x
    p_d = dqk + p * (2 * BT * NK * BK) + o_c[:, None] * (NK * BK) + o_k[None, :]
    tl.store(p_d, b_dq)
    tl.store(p_d + BT * NK * BK, b_dr)

    b_all = tl.exp2(tl.load(GC + p * K + o_k, mask=o_k < K, other=0.)) * tl.load(sr + p * K + o_k, mask=o_k < K, other=0.)
    b_dg = _log_decay_gradient(b_a, b_w, b_all, o_c, PREC)
    m_tk = row_mask(m_t, o_k, K, BK)
    b_u = load_channel_gates(g, dt_bias, p_g, i_hv, m_t, o_c, o_k, HV, K, BK, BIAS)
    b_dg, b_da = gate_gradients(tl.where(m_tk, b_dg, 0.0), b_u, rate, lower_bound, GATE)
    tl.store(dg + p_g + o_c[:, None] * (HV * K) + o_k[None, :], b_dg.to(dg.dtype.element_ty), mask=m_tk)
    if GATE > 0:
        p_a = pa + p * (2 * NK * BK) + o_k
        tl.store(p_a, tl.sum(b_da, 0))
        tl.store(p_a + NK * BK, tl.sum(b_dg, 0))


@triton.jit
def _intra_chunk(q, k, g, A_log, dt_bias, GC, c, b, rq, rk, fw, eye, ts, sr, dg, dqk, pb, pa, i_n, i_t, i_hv, i_k, cu, T, NS,
                 scale, lower_bound, lift, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
                 GATE: tl.constexpr, BIAS: tl.constexpr, SAFE: tl.constexpr, VARLEN: tl.constexpr, PREC: tl.constexpr,
                 REV_SCAN: tl.constexpr, PAIRWISE: tl.constexpr):
    bos, n = sequence(cu, i_n, T, VARLEN)
    slot = chunk_slot(bos, i_n, i_t, BT, NS)
    row = bos + i_t * BT
    i_h = i_hv // (HV // H)
    p = slot * HV + i_hv
    p_q = (row * H + i_h) * K
    p_r = (slot * H + i_h) * BT
    p_g = (row * HV + i_hv) * K
    rate = decay_rate(A_log, i_hv)
    if PAIRWISE:
        intra_blocks(q, k, g, dt_bias, GC, c, b, rq, rk, fw, eye, ts, sr, dg, dqk, pb, pa, p_q, p_r, p_g, p, i_hv, i_k, NS,
                     i_t * BT, n, rate, lower_bound, scale, H, HV, K, BT, BK, GATE, BIAS, PREC, REV_SCAN)
    else:
        _intra_tile(q, k, g, dt_bias, GC, c, b, rq, rk, fw, eye, ts, sr, dg, dqk, pb, pa, p_q, p_r, p_g, p, i_hv, i_k, NS,
                    i_t * BT, n, rate, lower_bound, lift, scale, H, HV, K, BT, BK, GATE, BIAS, SAFE, PREC)


@triton.jit(do_not_specialize=["N", "T", "NT", "NTS", "NS"])
def kda_intra_gradients(q, k, g, A_log, dt_bias, GC, c, b, rq, rk, fw, eye, ts, sr, dg, dqk, pb, pa, cu, chunks, N, T, NT, NTS,
                        NS, scale, lower_bound, lift, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, BT: tl.constexpr,
                        BK: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr, SAFE: tl.constexpr, VARLEN: tl.constexpr,
                        GRAPH_CAPTURE: tl.constexpr, PREC: tl.constexpr, COPY_LHS: tl.constexpr, REV_SCAN: tl.constexpr,
                        PAIRWISE: tl.constexpr):
    """Tasks (chunk, value head, K tile), grid-stride."""
    NK: tl.constexpr = (K + BK - 1) // BK
    for i_task in range(tl.program_id(0), chunk_count(cu, N, T, NT, BT, GRAPH_CAPTURE) * (HV * NK), tl.num_programs(0)):
        i_n, i_t = chunk(chunks, i_task // (HV * NK), NTS, VARLEN)
        live = True
        if GRAPH_CAPTURE:
            live = (i_n >= 0) & (i_n < N)
        if live:
            _intra_chunk(q, k, g, A_log, dt_bias, GC, c, b, rq, rk, fw, eye, ts, sr, dg, dqk, pb, pa, i_n, i_t,
                         (i_task // NK) % HV, i_task % NK, cu, T, NS, scale, lower_bound, lift, H, HV, K, BT, BK, GATE, BIAS,
                         SAFE, VARLEN, PREC, REV_SCAN, PAIRWISE)
    if VARLEN:
        zero_rows(dg, active_rows(cu, N, T), T, HV * K, 1024)
