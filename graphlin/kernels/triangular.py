"""Inverse of a unit lower triangular matrix inside one program."""

import triton
import triton.language as tl


@triton.jit
def unit_lower_inverse(b_x, BT: tl.constexpr, PREC: tl.constexpr):
    """`(I + x)^-1` for strictly lower x `[BT, BT]` float32, BT 16 or 32: forward substitution on all 16x16 diagonal blocks
    at once, then one merge. Product (Neumann) forms are exact on paper but lose everything when keys are alike.
    """
    NB: tl.constexpr = BT // 16
    o_c = tl.arange(0, BT)
    o_s = tl.arange(0, 16)
    same = (o_c // 16)[:, None] == (o_c // 16)[None, :]
    b_d = tl.sum(tl.reshape(tl.where(same, b_x, 0.0), [NB, 16, NB, 16]), 2)      # [NB, 16, 16]
    b_m = tl.where((o_s[:, None] == o_s[None, :])[None, :, :], 1.0, 0.0) + tl.zeros([NB, 16, 16], dtype=tl.float32)
    for j in range(0, 15):
        at_j = o_s == j
        b_col = tl.sum(tl.where(at_j[None, None, :], b_d, 0.0), 2)                                       # [NB, 16]
        b_row = tl.sum(tl.where(at_j[None, :, None], b_m, 0.0), 1)                                       # [NB, 16]
        b_m = b_m - b_col[:, :, None] * b_row[:, None, :]
    b_m = tl.where(same, tl.reshape(tl.broadcast_to(b_m[:, :, None, :], [NB, 16, NB, 16]), [BT, BT]), 0.0)
    if BT == 32:
        b_o = tl.where((o_c // 16)[:, None] > (o_c // 16)[None, :], b_x, 0.0)
        b_m = b_m - tl.dot(b_m, tl.dot(b_o, b_m, input_precision=PREC), input_precision=PREC)
    return b_m
