"""Inverse of a unit lower triangular matrix inside one program."""

import triton
import triton.language as tl


@triton.jit
def leading_half(b_x):
    """The upper 16 bits of float32 numbers, as float32: exact in bfloat16."""
    return (b_x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def float32_dot(b_x, b_y, PREC: tl.constexpr):
    """x y of float32 tiles. bf16x3 is three products of bfloat16 halves, split here: Triton's own way converts one number an
    instruction, in the unit of the exponentials."""
    if PREC == "bf16x3":
        x_h = leading_half(b_x)
        y_h = leading_half(b_y)
        x_l = (b_x - x_h).to(tl.bfloat16)
        y_l = (b_y - y_h).to(tl.bfloat16)
        x_h = x_h.to(tl.bfloat16)
        y_h = y_h.to(tl.bfloat16)
        b_z = tl.dot(x_h, y_h, tl.dot(x_h, y_l, tl.dot(x_l, y_h)))
    else:
        b_z = tl.dot(b_x, b_y, input_precision=PREC)
    return b_z


@triton.jit
def _diagonal_blocks(b_x, BT: tl.constexpr, BI: tl.constexpr, PREC: tl.constexpr, DOT_BLOCKS: tl.constexpr):
    """The BI x BI diagonal blocks of `[BT, BT]`: [BT // BI, BI, BI].

    DOT_BLOCKS takes them by a product with zeros and ones: bishengir fuses a sum over a 4-D tile with the loop that
    reads it, and then wants ten times the memory there is.
    """
    NB: tl.constexpr = BT // BI
    o_c = tl.arange(0, BT)
    b_x = tl.where((o_c // BI)[:, None] == (o_c // BI)[None, :], b_x, 0.0)
    if DOT_BLOCKS:
        b_one = tl.where((o_c % BI)[:, None] == tl.arange(0, BI)[None, :], 1.0, 0.0)                     # [BT, BI]
        b_d = tl.reshape(tl.dot(b_x, b_one, input_precision=PREC), [NB, BI, BI])
    else:
        b_d = tl.sum(tl.reshape(b_x, [NB, BI, NB, BI]), 2)
    return b_d


@triton.jit
def _block_diagonal(b_d, BT: tl.constexpr, BI: tl.constexpr, PREC: tl.constexpr, DOT_BLOCKS: tl.constexpr):
    """`[BT, BT]` of its BI x BI diagonal blocks."""
    NB: tl.constexpr = BT // BI
    o_c = tl.arange(0, BT)
    if DOT_BLOCKS:
        b_one = tl.where(tl.arange(0, BI)[:, None] == (o_c % BI)[None, :], 1.0, 0.0)                     # [BI, BT]
        b_x = tl.dot(tl.reshape(b_d, [BT, BI]), b_one, input_precision=PREC)
    else:
        b_x = tl.reshape(tl.broadcast_to(b_d[:, :, None, :], [NB, BI, NB, BI]), [BT, BT])
    return tl.where((o_c // BI)[:, None] == (o_c // BI)[None, :], b_x, 0.0)


@triton.jit
def _identities(BT: tl.constexpr, BI: tl.constexpr):
    NB: tl.constexpr = BT // BI
    o_s = tl.arange(0, BI)
    return tl.where((o_s[:, None] == o_s[None, :])[None, :, :], 1.0, 0.0) + tl.zeros([NB, BI, BI], dtype=tl.float32)


@triton.jit
def _substitute(b_d, b_m, j, BI: tl.constexpr):
    """Step j of forward substitution: takes row j, which is final, times column j of d from the rows below."""
    at_j = tl.arange(0, BI) == j
    b_col = tl.sum(tl.where(at_j[None, None, :], b_d, 0.0), 2)                                           # [NB, BI]
    b_row = tl.sum(tl.where(at_j[None, :, None], b_m, 0.0), 1)                                           # [NB, BI]
    return b_m - b_col[:, :, None] * b_row[:, None, :]


@triton.jit
def unit_lower_inverse(b_x, BT: tl.constexpr, BI: tl.constexpr, PREC: tl.constexpr, DOT_BLOCKS: tl.constexpr):
    """`(I + x)^-1` for strictly lower x `[BT, BT]` float32: forward substitution on all BI x BI diagonal blocks at once, then
    merges of neighbours; BT is 16 or 32, BI a power of two from 4 to BT. Product (Neumann) forms are exact on paper but lose
    everything when keys are alike. With DOT_BLOCKS, BI is at least 16, the least that a dot sums over.
    """
    tl.static_assert(BT <= 32 and BI <= BT)
    tl.static_assert(BI >= 16 or not DOT_BLOCKS)
    b_d = _diagonal_blocks(b_x, BT, BI, PREC, DOT_BLOCKS)
    b_m = _identities(BT, BI)
    for j in range(0, BI - 1):
        b_m = _substitute(b_d, b_m, j, BI)
    b_m = _block_diagonal(b_m, BT, BI, PREC, DOT_BLOCKS)
    if BI <= 4 and BT > 4:
        b_m = _merge(b_x, b_m, 4, BT, PREC)
    if BI <= 8 and BT > 8:
        b_m = _merge(b_x, b_m, 8, BT, PREC)
    if BI <= 16 and BT > 16:
        b_m = _merge(b_x, b_m, 16, BT, PREC)
    return b_m


@triton.jit
def two_unit_lower_inverses(b_x, b_y, BI: tl.constexpr, PREC: tl.constexpr, DOT_BLOCKS: tl.constexpr,
                            SWAPPED: tl.constexpr):
    """unit_lower_inverse of two `[32, 32]` at once: their steps don't wait for each other. BI is at most 16.

    SWAPPED: the last merge is one. The last 16 rows and columns of y and of its inverse come first, so that what x leaves zero in
    that merge is y's.
    """
    tl.static_assert(BI <= 16)
    tl.static_assert(BI >= 16 or not DOT_BLOCKS)
    d_x = _diagonal_blocks(b_x, 32, BI, PREC, DOT_BLOCKS)
    d_y = _diagonal_blocks(b_y, 32, BI, PREC, DOT_BLOCKS)
    m_x = _identities(32, BI)
    m_y = _identities(32, BI)
    for j in range(0, BI - 1):
        m_x = _substitute(d_x, m_x, j, BI)
        m_y = _substitute(d_y, m_y, j, BI)
    m_x = _block_diagonal(m_x, 32, BI, PREC, DOT_BLOCKS)
    m_y = _block_diagonal(m_y, 32, BI, PREC, DOT_BLOCKS)
    if BI <= 4:
        m_x, m_y = _merge_two(b_x, b_y, m_x, m_y, 4, PREC)
    if BI <= 8:
        m_x, m_y = _merge_two(b_x, b_y, m_x, m_y, 8, PREC)
    if not SWAPPED:
        return _merge_two(b_x, b_y, m_x, m_y, 16, PREC)
    o_b = tl.arange(0, 32) // 16                                     # an upper block row has y's pairs, a lower one x's
    upper = (o_b == 0)[:, None]
    b_z = tl.where(o_b[:, None] != o_b[None, :], tl.where(upper, b_y, b_x), 0.0)
    b_z = float32_dot(b_z, tl.where(upper, m_x, m_y), PREC)
    b_z = float32_dot(tl.where(upper, m_y, m_x), b_z, PREC)
    return m_x - tl.where(upper, 0.0, b_z), m_y - tl.where(upper, b_z, 0.0)


@triton.jit
def _between(b_x, h: tl.constexpr, BT: tl.constexpr):
    """x between the halves of blocks of 2h rows, else 0."""
    o_c = tl.arange(0, BT)
    pair = ((o_c // (2 * h))[:, None] == (o_c // (2 * h))[None, :]) & ((o_c // h)[:, None] > (o_c // h)[None, :])
    return tl.where(pair, b_x, 0.0)


@triton.jit
def _merge(b_x, b_m, h: tl.constexpr, BT: tl.constexpr, PREC: tl.constexpr):
    """Inverses of blocks of 2h rows from those of h rows."""
    return b_m - float32_dot(b_m, float32_dot(_between(b_x, h, BT), b_m, PREC), PREC)


@triton.jit
def _merge_two(b_x, b_y, m_x, m_y, h: tl.constexpr, PREC: tl.constexpr):
    z_x = float32_dot(_between(b_x, h, 32), m_x, PREC)
    z_y = float32_dot(_between(b_y, h, 32), m_y, PREC)
    return m_x - float32_dot(m_x, z_x, PREC), m_y - float32_dot(m_y, z_y, PREC)
