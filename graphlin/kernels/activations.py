"""Sigmoid, and the slopes of sigmoid and silu, as the convolution and the norm compute them."""

import triton
import triton.language as tl

MINUS_LOG2_E = tl.constexpr(-1.4426950408889634)


@triton.jit
def sigmoid(b_z):
    """`1 / (1 + exp(-z))`, below 1e-38 where the bound on the exponent keeps it from overflow. The squared reciprocal
    root takes two instructions where a division takes five."""
    b_e = tl.exp2(tl.minimum(b_z * MINUS_LOG2_E, 127.0, propagate_nan=tl.PropagateNan.ALL))
    b_r = tl.rsqrt(1.0 + b_e)
    return b_r * b_r


@triton.jit
def silu_slope(b_z, b_s):
    """`s + s z (1 - s)`, with s the sigmoid of z."""
    return tl.fma(b_s, tl.fma(b_z * -1.0, b_s, b_z), b_s)


@triton.jit
def sigmoid_slope(b_s):
    """`s (1 - s)`, with s the sigmoid."""
    return tl.fma(b_s * -1.0, b_s, b_s)
