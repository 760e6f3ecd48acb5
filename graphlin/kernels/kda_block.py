"""Kimi Delta Attention, the gradients of the pairs inside a block of 16 rows, and dg of its rows."""

import triton
import triton.language as tl

from graphlin.kernels.kda_anchors import level_decay, level_pairs
from graphlin.kernels.kda_pairwise import pairwise_gradients


@triton.jit
def _level_gradients(b_q, b_k, b_y, b_c, b_f, b_w, b_dq, b_dr, b_dw, b_a, h: tl.constexpr, BK: tl.constexpr,
                     PREC: tl.constexpr):
    """Adds the pairs of a dyadic level."""
    DT: tl.constexpr = b_f.dtype
    b_e = level_decay(b_c, h, 16, BK)
    x_q = (b_q * b_e).to(DT)
    x_k = (b_k * b_e).to(DT)
    x_y = (b_y * b_e).to(DT)
    m = level_pairs(h, 16)
    b_f = tl.where(m, b_f, 0.0).to(DT)
    b_w = tl.where(m, b_w, 0.0).to(DT)
    u = tl.dot(b_f, x_y, input_precision=PREC)                                                           # [16, BK]
    b_dq += b_e * u
    b_a += x_q.to(tl.float32) * u
    u = tl.dot(b_w, x_y, input_precision=PREC)
    b_dr += b_e * u
    b_a += x_k.to(tl.float32) * u
    u = tl.dot(tl.trans(b_f), x_q, input_precision=PREC)
    u = tl.dot(tl.trans(b_w), x_k, u, input_precision=PREC)
    b_dw += b_e * u
    b_a -= x_y.to(tl.float32) * u
    return b_dq, b_dr, b_dw, b_a


@triton.jit
def block_gradients(b_q, b_k, b_y, b_c, b_er, u_q, u_k, b_f, b_w, b_dw, b_a, lift, BK: tl.constexpr, SAFE: tl.constexpr,
                    PAIRWISE: tl.constexpr, PREC: tl.constexpr):
    """Adds the pairs of one block, with F and W masked to i > j, to the sums u over the earlier ones. Returns dq, ρ, κ, a."""
    DT: tl.constexpr = b_f.dtype
    x_q = (b_q * b_er).to(DT)
    x_k = (b_k * b_er).to(DT)
    if SAFE:
        b_ec = tl.exp2(-b_c) * (1.0 / lift)
        x_y = (b_y * b_ec).to(DT)
        u_q = tl.dot(b_f, x_y, u_q, input_precision=PREC)                                                # [16, BK]
        u_k = tl.dot(b_w, x_y, u_k, input_precision=PREC)
        u = tl.dot(tl.trans(b_f), x_q, input_precision=PREC)
        u = tl.dot(tl.trans(b_w), x_k, u, input_precision=PREC)
        b_dw += b_ec * u
        b_a -= x_y.to(tl.float32) * u
    b_a += x_q.to(tl.float32) * u_q + x_k.to(tl.float32) * u_k
    b_dq = b_er * u_q
    b_dr = b_er * u_k
    if PAIRWISE:
        b_dq, b_dr, b_dw, b_a = pairwise_gradients(b_q, b_k, b_y, b_c, b_f, b_w, b_dq, b_dr, b_dw, b_a, 16, BK)
    elif not SAFE:
        b_dq, b_dr, b_dw, b_a = _level_gradients(b_q, b_k, b_y, b_c, b_f, b_w, b_dq, b_dr, b_dw, b_a, 8, BK, PREC)
        b_dq, b_dr, b_dw, b_a = _level_gradients(b_q, b_k, b_y, b_c, b_f, b_w, b_dq, b_dr, b_dw, b_a, 4, BK, PREC)
        b_dq, b_dr, b_dw, b_a = _level_gradients(b_q, b_k, b_y, b_c, b_f, b_w, b_dq, b_dr, b_dw, b_a, 2, BK, PREC)
        b_dq, b_dr, b_dw, b_a = _level_gradients(b_q, b_k, b_y, b_c, b_f, b_w, b_dq, b_dr, b_dw, b_a, 1, BK, PREC)
    return b_dq, b_dr, b_dw, b_a


@triton.jit
def log_decay_gradient(b_a, b_w, b_all, o_b, PREC: tl.constexpr, REV_SCAN: tl.constexpr):
    """dg of a block's rows: a is due to its row and those before it, w to the rows behind it, all to every row."""
    before = tl.where(o_b[:, None] > o_b[None, :], 1.0, 0.0)     # a difference of sums would lose what decays leave of terms
    b_dg = tl.dot(before, b_w, input_precision=PREC) + b_all[None, :]
    if REV_SCAN:
        b_dg += tl.cumsum(b_a, 0, reverse=True)
    else:
        b_dg += tl.sum(b_a, 0)[None, :] - tl.cumsum(b_a, 0) + b_a
    return b_dg
