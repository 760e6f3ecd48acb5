"""Prologues shared by the delta rules: decay gate, write strength, row norms."""

import triton
import triton.language as tl

L2NORM_EPS = tl.constexpr(1e-6)
# A state that decayed by exp(-32) = 1e-14 is far below the rounding of whatever is added to it. Keeping g above that keeps the
# chunk sums small, whose rounding is the relative error of every decay.
MIN_LOG_DECAY = tl.constexpr(-32.0)


@triton.jit
def softplus(x):
    """`log(1 + exp(x))` without overflow."""
    return tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))


@triton.jit
def sigmoid(x):
    """`1 / (1 + exp(-x))` without overflow."""
    e = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0 / (1.0 + e), e / (1.0 + e))


@triton.jit
def log_decay(b_raw, A_log, dt_bias, i_hv, GATE: tl.constexpr, BIAS: tl.constexpr):
    """`-exp(A_log) softplus(raw + dt_bias)`, or the raw value itself. To be masked afterwards: gate(0) is not 0."""
    if GATE:
        if BIAS:
            b_raw = b_raw + tl.load(dt_bias + i_hv).to(tl.float32)
        b_raw = -tl.exp(tl.load(A_log + i_hv).to(tl.float32)) * softplus(b_raw)
    return tl.maximum(b_raw, MIN_LOG_DECAY)


@triton.jit
def load_gates(g, beta, A_log, dt_bias, p, i_hv, m_t, o_t, HV: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr,
               BETA: tl.constexpr):
    """Log decay and write strength of rows `p + o_t * HV`, both 0 on padding rows. BETA 0: beta as given, else BETA * sigmoid."""
    b_g = tl.load(g + p + o_t * HV, mask=m_t, other=0.).to(tl.float32)
    b_b = tl.load(beta + p + o_t * HV, mask=m_t, other=0.).to(tl.float32)
    b_g = tl.where(m_t, log_decay(b_g, A_log, dt_bias, i_hv, GATE, BIAS), 0.0)
    if BETA > 0:
        b_b = tl.where(m_t, BETA * sigmoid(b_b), 0.0)
    return b_g, b_b


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
    """`exp(G_i - G_j)` for i >= j, else 0. The exponent is masked, not the result: above the diagonal it may overflow."""
    o_c = tl.arange(0, BT)
    return tl.exp(tl.where(o_c[:, None] >= o_c[None, :], b_G[:, None] - b_G[None, :], float('-inf')))
