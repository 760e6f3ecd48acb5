"""Kimi Delta Attention: how the products of a chunk's rows with decays `Γ_ijd = 2^(G_id - G_jd)` become matrix products.

A decay of each channel can't be taken out of `Σ_d x_id y_jd Γ_ijd`; with an anchor row a it splits into factors of i and of j,
`2^(G_i - G_a) 2^(G_a - G_j)`. Both exponents must be bounded. Rows of different blocks of 16 meet at the end of the block before
the reader's; those of one block
dyadic: with i in the upper and j in the lower half of a block of 2h rows, for h = 8, 4, 2, 1, at the lower half's last row, so
    that both exponents are <= 0 for any gate;
constant: at their block's beginning, readers lifted and writers lowered by the middle of what a bounded gate can reach; two
    products instead of eight, and the factors reach e^±40 at log decays of -5;
or pair by pair, see kda_pairwise. Anchors lie before their reader, so that a row's result never depends on later gates. Factors
of pairs that aren't wanted may be large: they are discarded by `where`.
"""

import math

import torch
import triton
import triton.language as tl

from graphlin.backends import LaunchRecord
from graphlin.kernels.delta_problem import Prologue


@triton.jit
def block_cumsum(b_g, ROWS: tl.constexpr, BK: tl.constexpr):
    """Sums of log decays from the first row of each block of 16 rows on: [ROWS, BK]."""
    return tl.reshape(tl.cumsum(tl.reshape(b_g, [ROWS // 16, 16, BK]), 1), [ROWS, BK])


@triton.jit
def _block_row(b_x, SIZE: tl.constexpr, AT: tl.constexpr, ROWS: tl.constexpr, BK: tl.constexpr):
    """Row AT of each block of SIZE rows, in all rows of its block: [ROWS, BK]."""
    NB: tl.constexpr = ROWS // SIZE
    at = (tl.arange(0, SIZE) == AT)[None, :, None]
    b_y = tl.sum(tl.where(at, tl.reshape(b_x, [NB, SIZE, BK]), 0.0), 1)                                  # [NB, BK]
    return tl.reshape(tl.broadcast_to(b_y[:, None, :], [NB, SIZE, BK]), [ROWS, BK])


@triton.jit
def level_decay(b_c, h: tl.constexpr, ROWS: tl.constexpr, BK: tl.constexpr):
    """Factors of the dyadic level h: `2^(c_i - anchor)` in upper halves (readers), `2^(anchor - c_j)` in lower (writers)."""
    return tl.exp2(-tl.abs(b_c - _block_row(b_c, 2 * h, h - 1, ROWS, BK)))


@triton.jit
def level_pairs(h: tl.constexpr, ROWS: tl.constexpr):
    """[ROWS, ROWS] mask of the dyadic level's pairs."""
    o = tl.arange(0, ROWS)
    return ((o // (2 * h))[:, None] == (o // (2 * h))[None, :]) & ((o // h)[:, None] > (o // h)[None, :])


@triton.jit
def block_pairs(ROWS: tl.constexpr):
    """[ROWS, ROWS] mask of the pairs i > j inside blocks of 16 rows."""
    o = tl.arange(0, ROWS)
    return ((o // 16)[:, None] == (o // 16)[None, :]) & (o[:, None] > o[None, :])


def anchoring(prologue: Prologue, dtype: torch.dtype, record: LaunchRecord) -> tuple[bool, float]:
    """Whether pairs of one block have the constant anchor, whose factors float16 can't hold; and what then lifts readers and
    lowers writers: the power of two nearest the middle of what 16 log decays can reach, else 1."""
    if not prologue.safe_gate or dtype == torch.float16 or record.tiles["PAIRWISE"]:
        return False, 1.0
    return True, 2.0 ** round(-8 * prologue.lowest / math.log(2))
