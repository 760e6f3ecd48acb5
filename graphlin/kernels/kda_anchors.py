"""Kimi Delta Attention: how the products of a chunk's rows with decays `e^(G_id - G_jd)` become matrix products.

A decay of each channel can't be taken out of `Σ_d x_id y_jd e^(G_id - G_jd)`; with an anchor row a it splits into factors of i
and of j, `e^(G_i - G_a) e^(G_a - G_j)`. Both exponents must be bounded:
dyadic: pairs with i in the upper and j in the lower half of a block of 2h rows, for h = 16, 8, 4, 2, 1, meet at the lower
    half's last row, so that both exponents are <= 0 for any gate;
constant: pairs inside 16 rows, anchored at their first row, with both exponents moved to the middle of what a bounded gate
    can reach; two products instead of four, and the factors reach e^±37.5 at log decays of -5.
Anchors lie before their reader, so that a row's result never depends on later gates. Factors of pairs that aren't wanted may
be large: they are discarded by `where`.
"""

import triton
import triton.language as tl


@triton.jit
def block_row(b_x, SIZE: tl.constexpr, AT: tl.constexpr, ROWS: tl.constexpr, BK: tl.constexpr):
    """Row AT of each block of SIZE rows, in all rows of its block: [ROWS, BK]."""
    NB: tl.constexpr = ROWS // SIZE
    at = (tl.arange(0, SIZE) == AT)[None, :, None]
    b_y = tl.sum(tl.where(at, tl.reshape(b_x, [NB, SIZE, BK]), 0.0), 1)                                  # [NB, BK]
    return tl.reshape(tl.broadcast_to(b_y[:, None, :], [NB, SIZE, BK]), [ROWS, BK])


@triton.jit
def level_decay(b_G, b_g, h: tl.constexpr, ROWS: tl.constexpr, BK: tl.constexpr):
    """Factors of the dyadic level h: `e^(G_i - anchor)` in upper halves (readers), `e^(anchor - G_j)` in lower (writers)."""
    if h == 1:
        b_y = tl.where((tl.arange(0, ROWS) % 2 == 1)[:, None], tl.exp(b_g), 1.0)
    else:
        b_y = tl.exp(-tl.abs(b_G - block_row(b_G, 2 * h, h - 1, ROWS, BK)))
    return b_y


@triton.jit
def level_pairs(h: tl.constexpr, ROWS: tl.constexpr):
    """[ROWS, ROWS] mask of the dyadic level's pairs."""
    o = tl.arange(0, ROWS)
    return ((o // (2 * h))[:, None] == (o // (2 * h))[None, :]) & ((o // h)[:, None] > (o // h)[None, :])


@triton.jit
def bounded_decay(b_G, middle, ROWS: tl.constexpr, BK: tl.constexpr):
    """Factors of readers and of writers with the constant anchor; middle: half of the lowest sum over 15 log decays, negated."""
    b_x = b_G - block_row(b_G, 16, 0, ROWS, BK) + middle
    return tl.exp(b_x), tl.exp(-b_x)


@triton.jit
def bounded_pairs(ROWS: tl.constexpr):
    """[ROWS, ROWS] mask of the pairs inside blocks of 16 rows."""
    o = tl.arange(0, ROWS)
    return ((o // 16)[:, None] == (o // 16)[None, :]) & (o[:, None] > o[None, :])
