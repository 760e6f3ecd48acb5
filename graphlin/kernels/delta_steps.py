"""The delta rules' step from one chunk to the next or, for gradients, to the one before.

With S the state entering a chunk and R the gradient of the state leaving it through later chunks:
    E = A (V − k̃ S),         O = q̃ S + P E,     S ← e^(G_C) S + k_wᵀ E
    dE = Pᵀ dO + k_w R,      dV = Aᵀ dE,        R ← e^(G_C) R + q̃ᵀ dO − k̃ᵀ dV
with q̃ = s e^G∘q, k̃ = e^G∘k, k_w = β e^(G_C−G)∘k. Where each channel has its decay (PER_CHANNEL), e^(G_C) scales the rows of
S, and q̃, k̃, k_w come from memory. Where a head has one, row scales of the prep kernel, with the l2 norms' inverses in them,
multiply `[BT, BV]` tiles instead: k̃ S = (e^G r_k)∘(k S). States are kept
transposed, `Sᵀ [BV, BK]`, always the left dot operand, so that they stay in registers.
"""

import triton
import triton.language as tl

from graphlin.kernels.common import keep


@triton.jit
def load_state(p_h, i_nh, o_k, o_v, K: tl.constexpr, V: tl.constexpr, V_FIRST: tl.constexpr):
    """A tile of an `[N, HV, K, V]` (or `[N, HV, V, K]`) state, transposed: [BV, BK] float32."""
    p = p_h + tl.cast(i_nh, tl.int64) * (K * V)
    if V_FIRST:
        b_h = tl.load(p + o_v[:, None] * K + o_k[None, :], mask=(o_v < V)[:, None] & (o_k < K)[None, :], other=0.)
    else:
        b_h = tl.trans(tl.load(p + o_k[:, None] * V + o_v[None, :], mask=(o_k < K)[:, None] & (o_v < V)[None, :], other=0.))
    return b_h.to(tl.float32)


@triton.jit
def store_state(p_h, b_h, i_nh, o_k, o_v, K: tl.constexpr, V: tl.constexpr, V_FIRST: tl.constexpr):
    """The reverse of load_state."""
    p = p_h + tl.cast(i_nh, tl.int64) * (K * V)
    b_h = b_h.to(p_h.dtype.element_ty)
    if V_FIRST:
        tl.store(p + o_v[:, None] * K + o_k[None, :], b_h, mask=(o_v < V)[:, None] & (o_k < K)[None, :])
    else:
        tl.store(p + o_k[:, None] * V + o_v[None, :], tl.trans(b_h), mask=(o_k < K)[:, None] & (o_v < V)[None, :])


@triton.jit
def chunk_scales(G, scales, p, o_k, K: tl.constexpr, BT: tl.constexpr, PER_CHANNEL: tl.constexpr):
    """What a chunk decays S and R by, and the scales `[BT]` of its rows that are read with k, written and output (PER_CHANNEL:
    none, q, k and kw hold them)."""
    if PER_CHANNEL:
        b_decay = tl.exp2(tl.load(G + p * K + o_k, mask=o_k < K, other=0.))[None, :]
        b_read, b_write, b_out = b_decay, b_decay, b_decay
    else:
        b_decay = tl.exp2(tl.load(G + p * BT + BT - 1))
        p_r = scales + p * (3 * BT) + tl.arange(0, BT)
        b_read, b_write, b_out = tl.load(p_r), tl.load(p_r + BT), tl.load(p_r + 2 * BT)
    return b_decay, b_read, b_write, b_out


@triton.jit
def next_state(b_s, b_e, b_z, b_k, b_kw, b_at, b_decay, b_read, b_write, PER_CHANNEL: tl.constexpr, PREC: tl.constexpr):
    """E, transposed, and S after a chunk, from (A V)ᵀ and z = Sᵀ kᵀ."""
    if PER_CHANNEL:
        b_e = tl.dot((-b_z).to(b_k.dtype), b_at, b_e, input_precision=PREC)
        b_s = tl.dot(b_e.to(b_k.dtype), b_kw, b_s * b_decay, input_precision=PREC)
    else:
        b_e = tl.dot((-(b_z * b_read[None, :])).to(b_k.dtype), b_at, b_e, input_precision=PREC)
        b_s = tl.dot((b_e * b_write[None, :]).to(b_k.dtype), b_k, b_s * b_decay, input_precision=PREC)
    return b_e, b_s


@triton.jit
def value_gradient(b_ro, b_dot, b_kw, b_p, b_a, b_write, PER_CHANNEL: tl.constexpr, PREC: tl.constexpr,
                   COPY_LHS: tl.constexpr):
    """dV of a chunk, transposed: [BV, BT]."""
    b_de = tl.dot(b_ro, tl.trans(b_kw), input_precision=PREC)                                            # [BV, BT]
    if not PER_CHANNEL:
        b_de = b_de * b_write[None, :]
    b_de = tl.dot(keep(b_dot, COPY_LHS), b_p, b_de, input_precision=PREC)
    return tl.dot(b_de.to(b_kw.dtype), b_a, input_precision=PREC)


@triton.jit
def previous_gradient(b_r, b_dot, b_dv, b_q, b_k, b_decay, b_read, b_out, PER_CHANNEL: tl.constexpr, PREC: tl.constexpr):
    """R before a chunk."""
    if PER_CHANNEL:
        b_r = tl.dot(b_dot, b_q, b_r * b_decay, input_precision=PREC)
        b_r = tl.dot((-b_dv).to(b_k.dtype), b_k, b_r, input_precision=PREC)
    else:
        b_qs = (b_dot.to(tl.float32) * b_out[None, :]).to(b_q.dtype)
        b_r = tl.dot(b_qs, b_q, b_r * b_decay, input_precision=PREC)
        b_r = tl.dot((-b_dv * b_read[None, :]).to(b_k.dtype), b_k, b_r, input_precision=PREC)
    return b_r


@triton.jit
def store_rows(p_x, b_x, m_x, left, LAST: tl.constexpr):
    """A chunk's rows of a tensor from their transpose. LAST: in an `if`, which always holds, and which Triton's pipeliner puts
    behind the loads for later chunks."""
    if LAST:
        if left > 0:
            tl.store(p_x, tl.trans(b_x).to(p_x.dtype.element_ty), mask=m_x)
    else:
        tl.store(p_x, tl.trans(b_x).to(p_x.dtype.element_ty), mask=m_x)
