"""Prologues shared by the delta rules, and their gradients: decay gate, write strength, row norms."""

import triton
import triton.language as tl

from graphlin.kernels.common import row_mask

# GATE of the kernels; 0: log decays as given.
SOFTPLUS = tl.constexpr(1)      # -rate * softplus(u)
BOUNDED = tl.constexpr(2)       # lower_bound * sigmoid(rate * u)
MAX_A_LOG = tl.constexpr(80.0)
LOG2E = tl.constexpr(1.4426950408889634)
L2NORM_EPS = tl.constexpr(1e-6)
# A state that decayed by exp(-32) = 1e-14 is far below the rounding of whatever is added to it. Keeping g above that keeps the
# chunk sums small, whose rounding is the relative error of every decay.
MIN_LOG_DECAY = tl.constexpr(-32.0)


@triton.jit
def softplus(x):
    """`log(1 + e^x)` without overflow, by the series of log where 1 + e would round e away. A rate of up to e^80 may multiply
    it, so that denormal results count."""
    e = tl.exp(-tl.abs(x))
    return tl.maximum(x, 0.0) + tl.where(e < 0.01, e * (1.0 - e * (0.5 - e * (1.0 / 3.0))), tl.log(1.0 + e))


@triton.jit
def sigmoid(x):
    """`1 / (1 + exp(-x))` without overflow; denormal results count as in softplus."""
    e = tl.exp(-tl.abs(x))
    r = 1.0 / (1.0 + e)
    return tl.where(x >= 0, r, e * r)


@triton.jit
def sigmoid_slope(x):
    """`sigmoid(x) * sigmoid(-x)` of one exponential, which is sigmoid(x)'s own."""
    e = tl.exp(-tl.abs(x))
    r = 1.0 / (1.0 + e)
    return e * (r * r)


@triton.jit
def decay_rate(A_log, i_hv):
    """`exp(A_log)` of a head, 1 without A_log. Bounded, so that no infinite rate meets a gate of 0."""
    rate = 1.0
    if A_log is not None:
        rate = tl.exp(tl.minimum(tl.load(A_log + i_hv).to(tl.float32), MAX_A_LOG))
    return rate


@triton.jit
def log_decay(b_u, rate, lower_bound, GATE: tl.constexpr):
    """Log decay of raw gates u with their bias. To be cut off and masked afterwards: gate(0) is not 0."""
    if GATE == SOFTPLUS:
        b_u = -rate * softplus(b_u)
    elif GATE == BOUNDED:
        b_u = lower_bound * sigmoid(rate * b_u)
    return b_u


@triton.jit
def gate_gradients(b_dg, b_u, rate, lower_bound, GATE: tl.constexpr, FAST: tl.constexpr = False):
    """Gradients of raw gates and the terms of A_log's, from those of the log decays; 0 where a log decay was cut off."""
    if FAST and GATE == BOUNDED:
        b_dg, b_da = _bounded_gradients(b_dg, b_u, rate, lower_bound)
    else:
        b_dg = tl.where(log_decay(b_u, rate, lower_bound, GATE) < MIN_LOG_DECAY, 0.0, b_dg)
        b_da = tl.zeros_like(b_dg)
        if GATE == SOFTPLUS:
            b_da = b_dg * -rate * softplus(b_u)
            b_dg = -b_dg * rate * sigmoid(b_u)
        elif GATE == BOUNDED:
            b_dg = b_dg * (lower_bound * rate) * sigmoid_slope(rate * b_u)
            b_da = b_dg * b_u
    return b_dg, b_da


@triton.jit
def rate_gradient(b_da, A_log, i_hv):
    """A_log's gradient from the sum of its terms: 0 where A_log acts as its bound."""
    if A_log is not None:
        b_da = tl.where(tl.load(A_log + i_hv).to(tl.float32) > MAX_A_LOG, 0.0, b_da)
    return b_da


@triton.jit
def load_strength(beta, p, m_t, o_t, HV: tl.constexpr, BETA: tl.constexpr):
    """Write strength of rows `p + o_t * HV`, 0 on padding rows. BETA 0: beta as given, else BETA * sigmoid."""
    b_b = tl.load(beta + p + o_t * HV, mask=m_t, other=0.).to(tl.float32)
    if BETA > 0:
        b_b = tl.where(m_t, BETA * sigmoid(b_b), 0.0)
    return b_b


@triton.jit
def strength_gradient(b_db, b_b, BETA: tl.constexpr):
    """Gradient of what write strengths b were made of."""
    if BETA > 0:
        b_db = b_db * b_b * (1.0 - b_b * (1.0 / BETA))
    return b_db


@triton.jit
def load_head_gates(g, dt_bias, p, i_hv, m_t, o_t, HV: tl.constexpr, BIAS: tl.constexpr):
    """Raw gates of one head with their bias, rows `p + o_t * HV`."""
    b_u = tl.load(g + p + o_t * HV, mask=m_t, other=0.).to(tl.float32)
    if BIAS:
        b_u = b_u + tl.load(dt_bias + i_hv).to(tl.float32)
    return b_u


@triton.jit
def load_channel_gates(g, dt_bias, p, i_hv, m_t, o_t, o_k, HV: tl.constexpr, K: tl.constexpr, BK: tl.constexpr,
                       BIAS: tl.constexpr):
    """Raw gates of a tile of channels of one head with their bias, [rows, BK]."""
    b_u = tl.load(g + p + o_t[:, None] * (HV * K) + o_k[None, :], mask=row_mask(m_t, o_k, K, BK), other=0.).to(tl.float32)
    if BIAS:
        b_u = b_u + tl.load(dt_bias + i_hv * K + o_k, mask=o_k < K, other=0.).to(tl.float32)[None, :]
    return b_u


@triton.jit
def exp2(x, FAST: tl.constexpr):
    """2^x. FAST is one instruction of NVIDIA's, which flushes denormal results to 0; keeping them takes three more."""
    if FAST:
        x = tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        x = tl.exp2(x)
    return x


@triton.jit
def inverse_exp2(x, FAST: tl.constexpr):
    """2^-x, likewise; NVIDIA's instruction takes the sign with it."""
    if FAST:
        x = tl.inline_asm_elementwise("{.reg .f32 n; neg.f32 n, $1; ex2.approx.ftz.f32 $0, n;}", "=f,f", [x], dtype=tl.float32,
                                      is_pure=True, pack=1)
    else:
        x = tl.exp2(-x)
    return x


@triton.jit
def _reciprocal(x):
    """1 / x by one instruction of NVIDIA's, which flushes denormal results to 0."""
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _bounded_decay(b_u, rate, lower_bound):
    """Log decays (base 2) of a bounded gate, none of which is cut off, and of which no denormal results are wanted."""
    return (lower_bound * LOG2E) * _reciprocal(exp2(b_u * (rate * -LOG2E), True) + 1.0)


@triton.jit
def _bounded_gradients(b_dg, b_u, rate, lower_bound):
    """gate_gradients of such a gate: the sigmoid's slope, of one exponential."""
    e = inverse_exp2(tl.abs((rate * LOG2E) * b_u), True)
    r = _reciprocal(1.0 + e)
    b_dg = b_dg * ((lower_bound * rate) * (e * (r * r)))
    return b_dg, b_dg * b_u


@triton.jit
def masked_decay(b_u, m, rate, lower_bound, GATE: tl.constexpr, FAST: tl.constexpr = False):
    """Log decays (base 2) of raw gates, cut off below and 0 outside the mask; NaN stays NaN, which tl.maximum would hide."""
    if FAST and GATE == BOUNDED:
        b_g = _bounded_decay(b_u, rate, lower_bound)
    else:
        b_g = log_decay(b_u, rate, lower_bound, GATE)
        b_g = tl.where(b_g < MIN_LOG_DECAY, MIN_LOG_DECAY, b_g) * LOG2E
    return tl.where(m, b_g, 0.0)


@triton.jit
def inverse_norm(b_sum, L2: tl.constexpr):
    """`(sum x^2 + eps)^-1/2`, or 1 without l2norm."""
    if L2:
        b_sum = 1.0 / tl.sqrt(b_sum + L2NORM_EPS)
    else:
        b_sum = tl.zeros_like(b_sum) + 1.0
    return b_sum


@triton.jit
def decay_matrix(b_G, BT: tl.constexpr):
    """`2^(G_i - G_j)` for i >= j, else 0. The exponent is masked, not the result: above the diagonal it may overflow."""
    o_c = tl.arange(0, BT)
    return tl.exp2(tl.where(o_c[:, None] >= o_c[None, :], b_G[:, None] - b_G[None, :], float('-inf')))


@triton.jit
def norm_gradient(b_dx, b_x, b_r, L2: tl.constexpr):
    """The gradient of x from that of r∘x, of whole rows: r (dx − r² x (x·dx)) with l2norm, as it is without."""
    if L2:
        b_x = b_x.to(tl.float32)
        b_y = tl.sum(b_x * b_dx, 1) * b_r * b_r
        b_dx = (b_dx - b_x * b_y[:, None]) * b_r[:, None]
    return b_dx


@triton.jit
def norm_gradients(x, r, dx, dxw, p_t, p_r, p_w, m_t, H: tl.constexpr, K: tl.constexpr, W: tl.constexpr, BT: tl.constexpr,
                   BK: tl.constexpr, PARTS: tl.constexpr, PITCH: tl.constexpr, L2: tl.constexpr):
    """dx from the gradient of r∘x: r (dx − r² x (x·dx)) with l2norm, as it is without.

    That gradient is the sum of PARTS tiles `[BT, W]`, PITCH apart.
    """
    NK: tl.constexpr = (K + BK - 1) // BK
    o_c = tl.arange(0, BT)
    b_y = tl.zeros([BT], dtype=tl.float32)
    b_r = tl.load(r + p_r + o_c)
    if L2:
        for i_k in range(0, NK):
            o_k = i_k * BK + tl.arange(0, BK)
            p_x = p_t + o_c[:, None] * (H * K) + o_k[None, :]
            m_tk = row_mask(m_t, o_k, K, BK)
            b_x = tl.load(x + p_x, mask=m_tk, other=0.).to(tl.float32)                                   # [BT, BK]
            b_y += tl.sum(b_x * _sum_parts(dxw + p_w, o_c, o_k, m_tk, W, PARTS, PITCH), 1)
        b_y = b_y * b_r * b_r
    for i_k in range(0, NK):
        o_k = i_k * BK + tl.arange(0, BK)
        m_tk = row_mask(m_t, o_k, K, BK)
        p_x = p_t + o_c[:, None] * (H * K) + o_k[None, :]
        b_dx = _sum_parts(dxw + p_w, o_c, o_k, m_tk, W, PARTS, PITCH)
        if L2:
            b_dx = (b_dx - tl.load(x + p_x, mask=m_tk, other=0.).to(tl.float32) * b_y[:, None]) * b_r[:, None]
        tl.store(dx + p_x, b_dx.to(dx.dtype.element_ty), mask=m_tk)


@triton.jit
def _sum_parts(p, o_c, o_k, m_tk, W: tl.constexpr, PARTS: tl.constexpr, PITCH: tl.constexpr):
    """Of rows behind the end of the sequence there may be nothing in memory yet."""
    p = p + o_c[:, None] * W + o_k[None, :]
    b_x = tl.load(p, mask=m_tk, other=0.).to(tl.float32)
    for i in range(1, PARTS):
        b_x += tl.load(p + i * PITCH, mask=m_tk, other=0.).to(tl.float32)
    return b_x
