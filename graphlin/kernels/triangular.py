"""Inverse of a unit lower triangular matrix inside one program."""

import triton
import triton.language as tl


@triton.jit
def unit_lower_inverse(b_x, BT: tl.constexpr, BI: tl.constexpr, PREC: tl.constexpr):
    """`(I + x)^-1` for strictly lower x `[BT, BT]` float32: forward substitution on all BI x BI diagonal blocks at once, then
    merges of neighbours, BI and BT powers of two. Product (Neumann) forms are exact on paper but lose everything when keys are
    alike.
    """
    NB: tl.constexpr = BT // BI
    o_c = tl.arange(0, BT)
    o_s = tl.arange(0, BI)
    same = (o_c // BI)[:, None] == (o_c // BI)[None, :]
    b_d = tl.sum(tl.reshape(tl.where(same, b_x, 0.0), [NB, BI, NB, BI]), 2)      # [NB, BI, BI]
    b_m = tl.where((o_s[:, None] == o_s[None, :])[None, :, :], 1.0, 0.0) + tl.zeros([NB, BI, BI], dtype=tl.float32)
    for j in range(0, BI - 1):
        at_j = o_s == j
        b_col = tl.sum(tl.where(at_j[None, None, :], b_d, 0.0), 2)                                       # [NB, BI]
        b_row = tl.sum(tl.where(at_j[None, :, None], b_m, 0.0), 1)                                       # [NB, BI]
        b_m = b_m - b_col[:, :, None] * b_row[:, None, :]
    b_m = tl.where(same, tl.reshape(tl.broadcast_to(b_m[:, :, None, :], [NB, BI, NB, BI]), [BT, BT]), 0.0)
    if BI <= 4 and BT > 4:
        b_m = _merge(b_x, b_m, 4, BT, PREC)
    if BI <= 8 and BT > 8:
        b_m = _merge(b_x, b_m, 8, BT, PREC)
    if BT > 16:
        b_m = _merge(b_x, b_m, 16, BT, PREC)
    return b_m


@triton.jit
def _merge(b_x, b_m, h: tl.constexpr, BT: tl.constexpr, PREC: tl.constexpr):
    """Inverses of blocks of 2h rows from those of h rows."""
    o_c = tl.arange(0, BT)
    pair = ((o_c // (2 * h))[:, None] == (o_c // (2 * h))[None, :]) & ((o_c // h)[:, None] > (o_c // h)[None, :])
    b_x = tl.where(pair, b_x, 0.0)
    return b_m - tl.dot(b_m, tl.dot(b_x, b_m, input_precision=PREC), input_precision=PREC)
