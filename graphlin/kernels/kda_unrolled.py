"""Kimi Delta Attention with a bounded gate: the gradients inside a chunk of 64 rows, its four blocks of 16 rows written out.

A block's decayed rows are made once for all other blocks and stay in registers, where kda_intra makes them again for each pair of
blocks. Blocks behind the end of the sequence are left out: nothing is stored of their rows, and kda_finish_gradients loads none
of them. Tuples of tiles need a Triton newer than triton-ascend's 3.2, whose records keep to kda_intra.
With e_J = 2^(T_J), what a row i of block I reads of the blocks before it is the last of
    U_0 = F_I0 y_0,   U_J = e_J ∘ U_(J-1) + F_IJ y_J,
with y_J decayed to its block's end; what a writer gets from the blocks behind it comes the same way from the last one on.

What takes time is moving tiles from thread to thread, so that products find them. Tiles are transposed, channels by a block's
rows: a warp has 16 channels to itself, what it computed is its next left operand as it lies, and vectors of channels are a few
registers. All is loaded at the beginning, into shared memory, from where a tile comes to lie like a result of products by a
product with the unit matrix, which is exact. What is loaded twice is not kept in registers in between.
"""

import triton
import triton.language as tl

from graphlin.kernels.gates import exp2, gate_gradients, inverse_exp2
from graphlin.kernels.triangular import leading_half


@triton.jit
def _columns(m_t, m_k, K: tl.constexpr, BK: tl.constexpr):
    """`[BK, 16]` mask; no channel term where whole tiles cover K."""
    m = m_t[None, :]
    if K % BK != 0:
        m = m & m_k[:, None]
    return m


@triton.jit
def _load_rows(x, p, m_t, m_k, o_k, o_b, STRIDE: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, POLICY: tl.constexpr):
    """A block's rows, transposed: `[BK, 16]`. Loads of different policies are different loads for the compiler."""
    p = x + p + (o_k[:, None] + o_b[None, :] * STRIDE)
    return tl.load(p, mask=_columns(m_t, m_k, K, BK), other=0., eviction_policy=POLICY)


@triton.jit
def _load(x, p, m_k, o_k, o_b, K: tl.constexpr, BK: tl.constexpr, POLICY: tl.constexpr):
    """The same of a workspace, which has all rows of a chunk."""
    p = x + p + (o_k[:, None] + o_b[None, :] * K)
    if K % BK != 0:
        b_x = tl.load(p, mask=m_k[:, None], other=0., eviction_policy=POLICY)
    else:
        b_x = tl.load(p, eviction_policy=POLICY)
    return b_x


@triton.jit
def _round(b_x, DT: tl.constexpr, FAST: tl.constexpr):
    """Rounds to DT. FAST takes two numbers an instruction, where Triton takes one if what is rounded is used as float32 too."""
    if FAST:
        b_x = tl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [b_x], dtype=tl.bfloat16, is_pure=True, pack=2)
    return b_x.to(DT)


@triton.jit
def _add_sums(b_x, ones, b_s, PARTS: tl.constexpr, PREC: tl.constexpr):
    """Adds sums over a block's rows, chosen by zeros and ones. Three parts of 8 bits are all that a float32 has."""
    if ones.dtype == tl.float32:
        b_s = tl.dot(b_x, ones, b_s, input_precision=PREC)
    else:
        for _ in tl.static_range(PARTS - 1):
            b_h = leading_half(b_x)
            b_s = tl.dot(b_h.to(tl.bfloat16), ones, b_s)
            b_x = b_x - b_h
        b_s = tl.dot(b_x.to(tl.bfloat16), ones, b_s)
    return b_s


@triton.jit
def _read(fs, ys, es, AT: tl.constexpr, PREC: tl.constexpr):
    """U of block AT's rows through F or W, `[BK, 16]`."""
    u = tl.dot(ys[0], tl.trans(fs[0]), input_precision=PREC)
    for J in tl.static_range(1, AT):
        u = tl.dot(ys[J], tl.trans(fs[J]), u * es[J][:, None], input_precision=PREC)
    return u


@triton.jit
def _write(fs, gs, xs_q, xs_k, es, J: tl.constexpr, PREC: tl.constexpr):
    """What block J's rows as writers get from readers of the blocks behind it, from the block's end on: `[BK, 16]`."""
    u = tl.dot(xs_q[3], fs[3], input_precision=PREC)
    u = tl.dot(xs_k[3], gs[3], u, input_precision=PREC)
    for i in tl.static_range(1, 3 - J):
        u = tl.dot(xs_q[3 - i], fs[3 - i], u * es[3 - i][:, None], input_precision=PREC)
        u = tl.dot(xs_k[3 - i], gs[3 - i], u, input_precision=PREC)
    return u


@triton.jit
def _pairs(p, o_b):
    """A block of F or W, `[16, 16]`. The mask is void, and costs nothing: without one, Triton 3.6 would lay out what it loads a
    second time for products with the transpose."""
    return tl.where((o_b < 16)[:, None], tl.load(p), 0.0).to(p.dtype.element_ty)


@triton.jit
def _row_of_blocks(p_f, o_b, AT: tl.constexpr, BT: tl.constexpr):
    """Blocks (AT, 0), (AT, 1), (AT, 2) of F or W, those that are before AT."""
    p = p_f + AT * 16 * BT + (o_b[:, None] * BT + o_b[None, :])
    f_0 = _pairs(p, o_b)
    f_1 = f_0
    f_2 = f_0
    if AT > 1:
        f_1 = _pairs(p + 16, o_b)
    if AT > 2:
        f_2 = _pairs(p + 32, o_b)
    return f_0, f_1, f_2


@triton.jit
def _reader_loads(q, k, c, p_q, p, o_b, o_k, m_k, first_row, n, AT: tl.constexpr, H: tl.constexpr, K: tl.constexpr,
                  BT: tl.constexpr, BK: tl.constexpr):
    """q, k and c of block AT."""
    m_t = first_row + AT * 16 + o_b < n
    p_x = p_q + AT * (16 * H * K)
    return (_load_rows(q, p_x, m_t, m_k, o_k, o_b, H * K, K, BK, ""), _load_rows(k, p_x, m_t, m_k, o_k, o_b, H * K, K, BK, ""),
            _load(c, p * (BT * K) + AT * (16 * K), m_k, o_k, o_b, K, BK, ""))


@triton.jit
def _block_loads(g, fw, ts, p_g, p, o_b, o_k, m_k, first_row, n, AT: tl.constexpr, HV: tl.constexpr, K: tl.constexpr,
                 BT: tl.constexpr, BK: tl.constexpr):
    """T1, T2, T3, raw gates, and F and W of the pairs i > j of block AT."""
    p_t = p * (3 * BT * K) + AT * (16 * K)
    p_x = p_g + AT * (16 * HV * K)
    p_f = fw + p * (2 * BT * BT) + AT * (16 * BT + 16) + (o_b[:, None] * BT + o_b[None, :])
    return (_load(ts, p_t, m_k, o_k, o_b, K, BK, ""), _load(ts, p_t + BT * K, m_k, o_k, o_b, K, BK, ""),
            _load(ts, p_t + 2 * BT * K, m_k, o_k, o_b, K, BK, ""),
            _load_rows(g, p_x, first_row + AT * 16 + o_b < n, m_k, o_k, o_b, HV * K, K, BK, ""),
            tl.where(o_b[:, None] > o_b[None, :], tl.load(p_f), 0.0).to(fw.dtype.element_ty), _pairs(p_f + BT * BT, o_b))


@triton.jit
def _row_loads(rq, rk, b, fw, p_r, p, o_b, AT: tl.constexpr, BT: tl.constexpr):
    """r_q, r_k, β and F's diagonal of block AT's rows: `[16]`."""
    p_f = fw + p * (2 * BT * BT) + AT * (16 * BT + 16) + o_b * (BT + 1)
    return (tl.load(rq + p_r + AT * 16 + o_b), tl.load(rk + p_r + AT * 16 + o_b), tl.load(b + p * BT + AT * 16 + o_b),
            tl.load(p_f).to(tl.float32))


@triton.jit
def _writer_loads(k, c, b, rk, ts, p_q, p_r, p, o_b, o_k, m_k, first_row, n, J: tl.constexpr, H: tl.constexpr, K: tl.constexpr,
                  BT: tl.constexpr, BK: tl.constexpr):
    """k, c and T1 of block J, and r_k β of its rows."""
    m_t = first_row + J * 16 + o_b < n
    return (_load_rows(k, p_q + J * (16 * H * K), m_t, m_k, o_k, o_b, H * K, K, BK, "evict_last"),
            _load(c, p * (BT * K) + J * (16 * K), m_k, o_k, o_b, K, BK, ""),
            _load(ts, p * (3 * BT * K) + J * (16 * K), m_k, o_k, o_b, K, BK, "evict_last"),
            tl.load(rk + p_r + J * 16 + o_b) * tl.load(b + p * BT + J * 16 + o_b))


@triton.jit
def _place(b_c, eye, BK: tl.constexpr, PREC: tl.constexpr):
    """float32 where products leave their results: moved once, not once for each thing that is made of it."""
    return tl.dot(tl.zeros([BK, 16], dtype=eye.dtype), eye, b_c, input_precision=PREC)


@triton.jit
def _writers(loads, eye, e_t, later, lift, BK: tl.constexpr, PREC: tl.constexpr, FAST: tl.constexpr):
    """y of a block decayed to its end; what dg gets from the block's rows in all rows behind them."""
    b_k, b_c, b_x, b_r = loads
    b_ew = inverse_exp2(_place(b_c, eye, BK, PREC), FAST) * (1.0 / lift) * e_t[:, None]
    b_y = (tl.dot(b_k, eye, input_precision=PREC) * b_ew) * b_r[None, :]
    return _round(b_y, eye.dtype, FAST), tl.sum(b_y * tl.dot(b_x, eye, input_precision=PREC), 1) * (later * lift)


@triton.jit
def _readers(loads, rows, eye, lift, scale, BK: tl.constexpr, PREC: tl.constexpr, FAST: tl.constexpr):
    """q, k and c of a block, the decay from its beginning, and q and k with it, rounded."""
    b_q, b_k, b_c = loads
    r_q, r_k, _, _ = rows
    b_c = _place(b_c, eye, BK, PREC)
    b_er = exp2(b_c, FAST) * lift
    b_q = tl.dot(b_q, eye, input_precision=PREC) * (r_q * scale)[None, :]
    b_k = tl.dot(b_k, eye, input_precision=PREC) * r_k[None, :]
    return b_q, b_k, b_c, b_er, _round(b_q * b_er, eye.dtype, FAST), _round(b_k * b_er, eye.dtype, FAST)


@triton.jit
def _block_gradients(loads, rows, reader, f_r, g_r, fs, gs, ys, xs_q, xs_k, es, ones, e_t, earlier, later, b_before, lift, scale,
                     AT: tl.constexpr, BK: tl.constexpr, PREC: tl.constexpr, FAST: tl.constexpr):
    """Block AT, whose first row is 2^ΣT = earlier behind the chunk's, and whose last is later before the chunk's. b_before is
    what dg gets in all of its rows from elsewhere. Returns dq, ρ + β∘κ, k∘κ, dg and the sum of a.

    What a reader gets from the chunks before, and a writer from those behind, is added before the factor that it shares with the
    pairs: a and w take that factor rounded, as it is in the pairs.
    """
    t_w, t_q, t_k, _, b_f, b_h = loads
    _, _, b_b, b_eye = rows
    b_q, b_k, b_c, b_er, x_q, x_k = reader
    eye, before, upto = ones
    b_y = b_k * b_b[None, :]
    b_ec = inverse_exp2(b_c, FAST) * (1.0 / lift)
    x_y = _round(b_y * b_ec, eye.dtype, FAST)
    u_q = tl.zeros([BK, 16], dtype=tl.float32)
    u_k = tl.zeros([BK, 16], dtype=tl.float32)
    if AT > 0:
        u_q = _read(f_r, ys, es, AT, PREC)
        u_k = _read(g_r, ys, es, AT, PREC)
    u_q = tl.dot(x_y, tl.trans(b_f), u_q, input_precision=PREC)
    u_k = tl.dot(x_y, tl.trans(b_h), u_k, input_precision=PREC)
    u_w = tl.dot(x_q, b_f, input_precision=PREC)
    u_w = tl.dot(x_k, b_h, u_w, input_precision=PREC)
    b_s = (earlier * (1.0 / lift))[:, None]
    u_q += tl.dot(t_q, eye, input_precision=PREC) * b_s
    u_k -= tl.dot(t_k, eye, input_precision=PREC) * b_s
    b_a = x_q.to(tl.float32) * u_q + x_k.to(tl.float32) * u_k - x_y.to(tl.float32) * u_w
    u_t = tl.dot(t_w, eye, input_precision=PREC) * (later * e_t * lift)[:, None]
    b_w = x_y.to(tl.float32) * u_t
    if AT < 3:
        u = _write(fs, gs, xs_q, xs_k, es, AT, PREC)
        b_a -= ys[AT].to(tl.float32) * u
        u_t += u * e_t[:, None]
    b_dw = b_ec * (u_w + u_t) + b_eye[None, :] * b_q
    b_dq = (b_er * u_q + b_eye[None, :] * b_y) * scale
    b_dr = b_er * u_k + b_b[None, :] * b_dw
    b_dg = _add_sums(b_w, before, tl.broadcast_to(b_before[:, None], [BK, 16]), 2, PREC)
    b_dg = _add_sums(b_a, upto, b_dg, 3, PREC)
    return b_dq, b_dr, b_k * b_dw, b_dg, tl.sum(b_a, 1)


@triton.jit
def _block(loads, rows, reader, f_r, g_r, fs, gs, ys, xs_q, xs_k, es, ones, e_t, earlier, later, b_before, dt, dg, dqk, p_g,
           p, o_k, m_k, first_row, n, rate, lower_bound, lift, scale, AT: tl.constexpr, HV: tl.constexpr, K: tl.constexpr,
           BT: tl.constexpr, BK: tl.constexpr, NK: tl.constexpr, GATE: tl.constexpr, PREC: tl.constexpr, FAST: tl.constexpr):
    """Block AT, stored. Returns the sums of a and of the terms of dA_log and ddt_bias, and the rows' sums of k∘κ, by 16 channels:
    a warp's own, so that all blocks' go from warp to warp at once."""
    o_b = tl.arange(0, 16)
    b_dq, b_dr, b_db, b_dg, a = _block_gradients(loads, rows, reader, f_r, g_r, fs, gs, ys, xs_q, xs_k, es, ones, e_t, earlier,
                                                 later, b_before, lift, scale, AT, BK, PREC, FAST)
    p_w = dqk + p * (2 * BT * NK * BK) + AT * (16 * NK * BK) + (o_k[:, None] + o_b[None, :] * (NK * BK))
    p_w = p_w[:, :, None] + (tl.arange(0, 2) * (BT * NK * BK))[None, None, :]
    tl.store(p_w, tl.join(b_dq, b_dr).to(dqk.dtype.element_ty))                  # both in one move from thread to thread
    # A gate may be infinite, shut for good: by the zeros of the unit matrix it would be NaN for its neighbours.
    b_u = _place(loads[3].to(tl.float32), ones[0], BK, PREC)
    m = _columns(first_row + AT * 16 + o_b < n, m_k, K, BK)
    b_dg, b_da = gate_gradients(tl.where(m, b_dg, 0.0), b_u + dt[:, None], rate, lower_bound, GATE, FAST)
    p_x = dg + p_g + AT * (16 * HV * K) + (o_k[:, None] + o_b[None, :] * (HV * K))
    tl.store(p_x, b_dg.to(dg.dtype.element_ty), mask=m)
    return a, tl.sum(b_da, 1), tl.sum(b_dg, 1), tl.sum(tl.reshape(b_db, [BK // 16, 16, 16]), 1)


@triton.jit
def unrolled_chunk_gradients(q, k, g, dt_bias, GC, c, b, rq, rk, fw, ts, sr, dg, dqk, pb, pa, p_q, p_r, p_g, p, p_d, i_hv, o_k,
                             first_row, n, rate, lower_bound, lift, scale, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr,
                             BT: tl.constexpr, BK: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr,
                             PREC: tl.constexpr, FAST: tl.constexpr):
    """One chunk, one tile of channels; p counts chunks of heads, the other offsets are of its first row."""
    NK: tl.constexpr = (K + BK - 1) // BK
    o_b = tl.arange(0, 16)
    m_k = o_k < K
    eye = (o_b[:, None] == o_b[None, :]).to(fw.dtype.element_ty)
    # sums over rows before and from there on: a difference of sums would lose what decays leave of terms
    ones = (eye, (o_b[:, None] < o_b[None, :]).to(eye.dtype), (o_b[:, None] >= o_b[None, :]).to(eye.dtype))
    p_c = c + p * (BT * K) + 15 * K + o_k
    p_f = fw + p * (2 * BT * BT)
    p_h = p_f + BT * BT
    w_0 = _writer_loads(k, c, b, rk, ts, p_q, p_r, p, o_b, o_k, m_k, first_row, n, 0, H, K, BT, BK)
    w_1 = _writer_loads(k, c, b, rk, ts, p_q, p_r, p, o_b, o_k, m_k, first_row, n, 1, H, K, BT, BK)
    w_2 = _writer_loads(k, c, b, rk, ts, p_q, p_r, p, o_b, o_k, m_k, first_row, n, 2, H, K, BT, BK)
    q_3 = _reader_loads(q, k, c, p_q, p, o_b, o_k, m_k, first_row, n, 3, H, K, BT, BK)
    l_3 = _block_loads(g, fw, ts, p_g, p, o_b, o_k, m_k, first_row, n, 3, HV, K, BT, BK)
    f_3 = _row_of_blocks(p_f, o_b, 3, BT)
    h_3 = _row_of_blocks(p_h, o_b, 3, BT)
    q_2 = _reader_loads(q, k, c, p_q, p, o_b, o_k, m_k, first_row, n, 2, H, K, BT, BK)
    l_2 = _block_loads(g, fw, ts, p_g, p, o_b, o_k, m_k, first_row, n, 2, HV, K, BT, BK)
    f_2 = _row_of_blocks(p_f, o_b, 2, BT)
    h_2 = _row_of_blocks(p_h, o_b, 2, BT)
    q_1 = _reader_loads(q, k, c, p_q, p, o_b, o_k, m_k, first_row, n, 1, H, K, BT, BK)
    l_1 = _block_loads(g, fw, ts, p_g, p, o_b, o_k, m_k, first_row, n, 1, HV, K, BT, BK)
    f_1 = _row_of_blocks(p_f, o_b, 1, BT)
    h_1 = _row_of_blocks(p_h, o_b, 1, BT)
    q_0 = _reader_loads(q, k, c, p_q, p, o_b, o_k, m_k, first_row, n, 0, H, K, BT, BK)
    l_0 = _block_loads(g, fw, ts, p_g, p, o_b, o_k, m_k, first_row, n, 0, HV, K, BT, BK)
    e_0 = exp2(tl.load(p_c, mask=m_k, other=0.), FAST)                                                   # [BK]
    e_1 = exp2(tl.load(p_c + 16 * K, mask=m_k, other=0.), FAST)
    e_2 = exp2(tl.load(p_c + 32 * K, mask=m_k, other=0.), FAST)
    e_3 = exp2(tl.load(p_c + 48 * K, mask=m_k, other=0.), FAST)
    dt = tl.zeros([BK], dtype=tl.float32)
    if BIAS:
        dt += tl.load(dt_bias + i_hv * K + o_k, mask=m_k, other=0.).to(tl.float32)
    b_all = exp2(tl.load(GC + p * K + o_k, mask=m_k, other=0.), FAST) * tl.load(sr + p * K + o_k, mask=m_k, other=0.)
    one = tl.full([BK], 1.0, tl.float32)
    es = (one, e_1, e_2)
    y_0, s_0 = _writers(w_0, eye, e_0, e_1 * (e_2 * e_3), lift, BK, PREC, FAST)
    y_1, s_1 = _writers(w_1, eye, e_1, e_2 * e_3, lift, BK, PREC, FAST)
    y_2, s_2 = _writers(w_2, eye, e_2, e_3, lift, BK, PREC, FAST)
    ys = (y_0, y_1, y_2)

    # a block's readers are made also behind the end, where they are zero: what comes out of an if is unpacked
    live = n - first_row
    b_da = tl.zeros([BK], dtype=tl.float32)
    b_db = tl.zeros([BK], dtype=tl.float32)
    z_3 = tl.zeros([BK // 16, 16], dtype=tl.float32)
    z_2 = z_3
    z_1 = z_3
    v_3 = _row_loads(rq, rk, b, fw, p_r, p, o_b, 3, BT)
    r_3 = _readers(q_3, v_3, eye, lift, scale, BK, PREC, FAST)
    v_2 = _row_loads(rq, rk, b, fw, p_r, p, o_b, 2, BT)
    if live > 48:
        a, b_da, b_db, z_3 = _block(
            l_3, v_3, r_3, f_3, h_3, f_3, h_3, ys, ys, ys, es, ones, e_3, e_0 * e_1 * e_2, one, b_all + (s_0 + s_1 + s_2), dt, dg,
            dqk, p_g, p, o_k, m_k, first_row, n, rate, lower_bound, lift, scale, 3, HV, K, BT, BK, NK, GATE, PREC, FAST)
        b_all += a
    r_2 = _readers(q_2, v_2, eye, lift, scale, BK, PREC, FAST)
    v_1 = _row_loads(rq, rk, b, fw, p_r, p, o_b, 1, BT)
    if live > 32:
        a, da, db, z_2 = _block(
            l_2, v_2, r_2, f_2, h_2, (f_3[2], f_3[2], f_3[2], f_3[2]), (h_3[2], h_3[2], h_3[2], h_3[2]), ys,
            (r_3[4], r_3[4], r_3[4], r_3[4]), (r_3[5], r_3[5], r_3[5], r_3[5]), es, ones, e_2, e_0 * e_1, e_3,
            b_all + (s_0 + s_1), dt, dg, dqk, p_g, p, o_k, m_k, first_row, n, rate, lower_bound, lift, scale, 2, HV, K,
            BT, BK, NK, GATE, PREC, FAST)
        b_all += a
        b_da += da
        b_db += db
    r_1 = _readers(q_1, v_1, eye, lift, scale, BK, PREC, FAST)
    v_0 = _row_loads(rq, rk, b, fw, p_r, p, o_b, 0, BT)
    if live > 16:
        a, da, db, z_1 = _block(
            l_1, v_1, r_1, f_1, h_1, (f_2[1], f_2[1], f_2[1], f_3[1]), (h_2[1], h_2[1], h_2[1], h_3[1]), ys,
            (r_2[4], r_2[4], r_2[4], r_3[4]), (r_2[5], r_2[5], r_2[5], r_3[5]), es, ones, e_1, e_0, e_2 * e_3, b_all + s_0, dt,
            dg, dqk, p_g, p, o_k, m_k, first_row, n, rate, lower_bound, lift, scale, 1, HV, K, BT, BK, NK, GATE, PREC, FAST)
        b_all += a
        b_da += da
        b_db += db
    r_0 = _readers(q_0, v_0, eye, lift, scale, BK, PREC, FAST)
    _, da, db, z_0 = _block(
        l_0, v_0, r_0, f_1, h_1, (f_1[0], f_1[0], f_2[0], f_3[0]), (h_1[0], h_1[0], h_2[0], h_3[0]), ys,
        (r_1[4], r_1[4], r_2[4], r_3[4]), (r_1[5], r_1[5], r_2[5], r_3[5]), es, ones, e_0, one, e_1 * (e_2 * e_3), b_all, dt, dg,
        dqk, p_g, p, o_k, m_k, first_row, n, rate, lower_bound, lift, scale, 0, HV, K, BT, BK, NK, GATE, PREC, FAST)
    b_da += da
    b_db += db
    o_c = tl.arange(0, BT)
    b_z = tl.sum(tl.join(tl.join(z_0, z_2), tl.join(z_1, z_3)), 0)                                      # [16, 2, 2]
    tl.store(pb + p_d + o_c, tl.reshape(tl.permute(b_z, (1, 2, 0)), [BT]), mask=o_c // 16 * 16 < live)
    if GATE > 0:
        p_a = pa + p * (2 * NK * BK) + (o_k[:, None] + (tl.arange(0, 2) * (NK * BK))[None, :])
        tl.store(p_a, tl.join(b_da, b_db))
