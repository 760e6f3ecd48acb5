"""Inverse of a unit lower triangular matrix inside one program."""

import triton
import triton.language as tl


@triton.jit
def _diagonal_blocks(b_x, BT: tl.constexpr, PREC: tl.constexpr, DOT_BLOCKS: tl.constexpr):
    """The 16x16 diagonal blocks of `[BT, BT]`: [BT // 16, 16, 16].

    DOT_BLOCKS takes them by a product with zeros and ones: bishengir fuses a sum over a 4-D tile with the loop that
    reads it, and then wants ten times the memory there is.
    """
    NB: tl.constexpr = BT // 16
    o_c = tl.arange(0, BT)
    b_x = tl.where((o_c // 16)[:, None] == (o_c // 16)[None, :], b_x, 0.0)
    if DOT_BLOCKS:
        b_one = tl.where((o_c % 16)[:, None] == tl.arange(0, 16)[None, :], 1.0, 0.0)                     # [BT, 16]
        b_d = tl.reshape(tl.dot(b_x, b_one, input_precision=PREC), [NB, 16, 16])
    else:
        b_d = tl.sum(tl.reshape(b_x, [NB, 16, NB, 16]), 2)
    return b_d


@triton.jit
def _block_diagonal(b_d, BT: tl.constexpr, PREC: tl.constexpr, DOT_BLOCKS: tl.constexpr):
    """`[BT, BT]` of its 16x16 diagonal blocks."""
    NB: tl.constexpr = BT // 16
    o_c = tl.arange(0, BT)
    if DOT_BLOCKS:
        b_one = tl.where(tl.arange(0, 16)[:, None] == (o_c % 16)[None, :], 1.0, 0.0)                     # [16, BT]
        b_x = tl.dot(tl.reshape(b_d, [BT, 16]), b_one, input_precision=PREC)
    else:
        b_x = tl.reshape(tl.broadcast_to(b_d[:, :, None, :], [NB, 16, NB, 16]), [BT, BT])
    return tl.where((o_c // 16)[:, None] == (o_c // 16)[None, :], b_x, 0.0)


@triton.jit
def unit_lower_inverse(b_x, BT: tl.constexpr, PREC: tl.constexpr, DOT_BLOCKS: tl.constexpr):
    """`(I + x)^-1` for strictly lower x `[BT, BT]` float32, BT 16 or 32: forward substitution on all 16x16 diagonal blocks
    at once, then one merge. Product (Neumann) forms are exact on paper but lose everything when keys are alike.
    """
    NB: tl.constexpr = BT // 16
    o_c = tl.arange(0, BT)
    o_s = tl.arange(0, 16)
    b_d = _diagonal_blocks(b_x, BT, PREC, DOT_BLOCKS)
    b_m = tl.where((o_s[:, None] == o_s[None, :])[None, :, :], 1.0, 0.0) + tl.zeros([NB, 16, 16], dtype=tl.float32)
    for j in range(0, 15):
        at_j = o_s == j
        b_col = tl.sum(tl.where(at_j[None, None, :], b_d, 0.0), 2)                                       # [NB, 16]
        b_row = tl.sum(tl.where(at_j[None, :, None], b_m, 0.0), 1)                                       # [NB, 16]
        b_m = b_m - b_col[:, :, None] * b_row[:, None, :]
    b_m = _block_diagonal(b_m, BT, PREC, DOT_BLOCKS)
    if BT == 32:
        b_o = tl.where((o_c // 16)[:, None] > (o_c // 16)[None, :], b_x, 0.0)
        b_m = b_m - tl.dot(b_m, tl.dot(b_o, b_m, input_precision=PREC), input_precision=PREC)
    return b_m
