"""Kimi Delta Attention: the pairs inside blocks of 16 rows, one column after the other, without matrix products.

Each pair has a decay of its own, `2^(c_id - c_jd)`, masked before the exponential, so that any gate is exact and nothing is
rounded to the inputs' dtype. Twice the exponentials of kda_anchors, and vector arithmetic alone: for devices where many small
matrix products cost more than that. The launch record chooses, by PAIRWISE.
"""

import triton
import triton.language as tl


@triton.jit
def _block_sums(b_x, ROWS: tl.constexpr, BK: tl.constexpr):
    """Sums over the rows of each block of 16, in all rows of their block: [ROWS, BK]."""
    o_b = tl.arange(0, ROWS) // 16
    b_y = tl.zeros([ROWS, BK], dtype=tl.float32)
    for i in tl.static_range(ROWS // 16):
        m = (o_b == i)[:, None]
        b_y = tl.where(m, tl.sum(tl.where(m, b_x, 0.0), 0)[None, :], b_y)
    return b_y


@triton.jit
def block_scans(b_x, ROWS: tl.constexpr, BK: tl.constexpr):
    """Sums from the first row of each block of 16 on, by a scan of 2-D tiles alone."""
    o_b = tl.arange(0, ROWS) // 16
    b_y = tl.zeros([ROWS, BK], dtype=tl.float32)
    for i in tl.static_range(ROWS // 16):
        m = (o_b == i)[:, None]
        b_y = tl.where(m, tl.cumsum(tl.where(m, b_x, 0.0), 0), b_y)
    return b_y


@triton.jit
def _block_row(b_x, j, ROWS: tl.constexpr, BK: tl.constexpr):
    """Row j of each block of 16, in all rows of its block."""
    return _block_sums(tl.where((tl.arange(0, ROWS) % 16 == j)[:, None], b_x, 0.0), ROWS, BK)


@triton.jit
def _column_decay(b_c, j, ROWS: tl.constexpr, BK: tl.constexpr):
    """`2^(c_i - c_j)` of the rows behind row j of their block, 0 in the others."""
    behind = (tl.arange(0, ROWS) % 16 > j)[:, None]
    return tl.exp2(tl.where(behind, b_c - _block_row(b_c, j, ROWS, BK), float("-inf")))


@triton.jit
def _column(j, ROWS: tl.constexpr):
    """[ROWS, ROWS] mask of column j of each block, in the rows of its block."""
    o = tl.arange(0, ROWS)
    return ((o // 16)[:, None] == (o // 16)[None, :]) & (o % 16 == j)[None, :]


@triton.jit
def pairwise_products(b_q, b_k, b_c, b_n, b_m, ROWS: tl.constexpr, BK: tl.constexpr):
    """Adds the decayed pairs i > j of each block to k kᵀ and q kᵀ: [ROWS, ROWS]."""
    for j in range(0, 15):
        at = _column(j, ROWS)
        b_y = _column_decay(b_c, j, ROWS, BK) * _block_row(b_k, j, ROWS, BK)
        b_n += tl.where(at, tl.sum(b_k * b_y, 1)[:, None], 0.0)
        b_m += tl.where(at, tl.sum(b_q * b_y, 1)[:, None], 0.0)
    return b_n, b_m


@triton.jit
def pairwise_gradients(b_q, b_k, b_y, b_c, b_f, b_w, b_dq, b_dr, b_dw, b_a, ROWS: tl.constexpr, BK: tl.constexpr):
    """Adds what the pairs i > j of each block give, with y = β∘k and F, W the products of errors:

    `dq_i += F_ij y_j Γ_ij`, `ρ_i += W_ij y_j Γ_ij`, `κ_j += (F_ij q_i + W_ij k_i) Γ_ij`; a gets q∘dq + k∘ρ - y∘κ of them.
    """
    for j in range(0, 15):
        at = _column(j, ROWS)
        b_e = _column_decay(b_c, j, ROWS, BK)
        y_j = _block_row(b_y, j, ROWS, BK)
        u_q = tl.sum(tl.where(at, b_f.to(tl.float32), 0.0), 1)[:, None] * b_e                            # [ROWS, BK]
        u_k = tl.sum(tl.where(at, b_w.to(tl.float32), 0.0), 1)[:, None] * b_e
        b_z = u_q * b_q + u_k * b_k
        z_j = tl.where((tl.arange(0, ROWS) % 16 == j)[:, None], _block_sums(b_z, ROWS, BK), 0.0)
        b_dq += u_q * y_j
        b_dr += u_k * y_j
        b_dw += z_j
        b_a += (b_z - z_j) * y_j
    return b_dq, b_dr, b_dw, b_a
