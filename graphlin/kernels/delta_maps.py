"""What the tokens of one rank do to the state of a sequence that runs on over ranks, and to the state's gradient.

Both are affine. With S the state and R its gradient, over all chunks of the rank's part of the sequence:
    S_out = M S_in + B,         R_in = Mᵀ R_out + C.
B is the state that the recurrence of `delta_recurrence` reaches from none, M what it makes of the identity where v = 0, C the
gradient that its adjoint reaches from none. M is wanted only where a sequence has come from an earlier rank and goes on to a
later one, so that all tokens of this rank are its own. Everything is kept transposed, as there.
"""

import torch
import triton
import triton.language as tl

from graphlin.kernels.common import chunk_slot, row_mask, sequence
from graphlin.kernels.delta_problem import Operands
from graphlin.kernels.delta_steps import chunk_scales, load_state, next_state, previous_gradient, value_gradient
from graphlin.kernels.launch import launch, record_for
from graphlin.kernels.packing import Packing


@triton.jit
def _part(crossing, EDGE: tl.constexpr, cu, N, T):
    """The sequence that crosses this rank's first (EDGE 0) or last edge: its number, first row and length here (0: there is
    none), and whether it crosses both."""
    i_n = tl.load(crossing + EDGE).to(tl.int32)
    both = i_n == tl.load(crossing + (1 - EDGE)).to(tl.int32)
    here = (i_n >= 0) & (i_n < N)
    i_n = tl.minimum(tl.maximum(i_n, 0), N - 1)
    bos, n = sequence(cu, i_n, T, True)
    return i_n, bos, tl.where(here, n, 0), both


@triton.jit(do_not_specialize=["N", "T", "NS"])
def delta_state_map(k, kw, v, A, G, scales, h0, maps, crossing, cu, N, T, NS, H: tl.constexpr, HV: tl.constexpr,
                    K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
                    USE_H0: tl.constexpr, V_FIRST: tl.constexpr, TRANSITION: tl.constexpr, PER_CHANNEL: tl.constexpr,
                    PREC: tl.constexpr, STAGES: tl.constexpr):
    """Programs (value head, tile of Bᵀ `[V, K]`, then of Mᵀ `[K, K]` if TRANSITION), for the sequence over the last edge. One
    that starts on this rank starts from h0."""
    NV: tl.constexpr = (V + BV - 1) // BV
    NR: tl.constexpr = NV + (K + BV - 1) // BV if TRANSITION else NV
    i_hv = tl.program_id(0) // NR
    i_r = tl.program_id(0) % NR
    i_h = i_hv // (HV // H)
    is_offset = i_r < NV
    i_n, bos, n, both = _part(crossing, 1, cu, N, T)
    o_c = tl.arange(0, BT)
    o_k = tl.arange(0, BK)
    first = tl.where(is_offset, i_r, i_r - NV) * BV
    o_r = first + tl.arange(0, BV)
    b_s = tl.zeros([BV, BK], dtype=tl.float32)
    if USE_H0:
        if is_offset & (both == 0):
            b_s += load_state(h0, i_n * HV + i_hv, o_k, o_r, K, V, V_FIRST)
    if TRANSITION:
        if i_r >= NV:
            b_s += tl.where(o_r[:, None] == o_k[None, :], 1.0, 0.0)
        n = tl.where(is_offset | both, n, 0)
    n_v = tl.where(is_offset, n, 0)
    o_tk = o_c[:, None] * (H * K) + o_k[None, :]
    o_tv = o_c[:, None] * (HV * V) + o_r[None, :]
    o_tt = o_c[:, None] * BT + o_c[None, :]
    for i_t in tl.range(0, (n + BT - 1) // BT, num_stages=STAGES):
        row = bos + i_t * BT
        p = chunk_slot(bos, i_n, i_t, BT, NS) * HV + i_hv
        p_k = (row * H + i_h) * K
        m_tk = row_mask(o_c < n - i_t * BT, o_k, K, BK)
        b_k = tl.load(k + p_k + o_tk, mask=m_tk, other=0.)                                               # [BT, BK]
        b_kw = b_k
        if PER_CHANNEL:
            b_kw = tl.load(kw + p_k + o_tk, mask=m_tk, other=0.)
        p_v = v + (row * HV + i_hv) * V
        b_v = tl.load(p_v + o_tv, mask=row_mask(o_c < n_v - i_t * BT, o_r, V, BV), other=0.)             # [BT, BV]
        b_at = tl.trans(tl.load(A + p * (BT * BT) + o_tt))                                               # [BT, BT]
        b_decay, b_read, b_write, _ = chunk_scales(G, scales, p, o_k, K, BT, PER_CHANNEL)
        b_e = tl.dot(tl.trans(b_v), b_at, input_precision=PREC)                                          # [BV, BT]
        b_z = tl.dot(b_s.to(b_k.dtype), tl.trans(b_k), input_precision=PREC)
        _, b_s = next_state(b_s, b_e, b_z, b_k, b_kw, b_at, b_decay, b_read, b_write, PER_CHANNEL, PREC)
    ROWS: tl.constexpr = V + K if TRANSITION else V
    p_m = (tl.cast(i_hv, tl.int64) * ROWS + tl.where(is_offset, 0, V)) * K
    m_m = row_mask(o_r < tl.where(is_offset, V, K), o_k, K, BK)
    tl.store(maps + p_m + o_r[:, None] * K + o_k[None, :], b_s, mask=m_m)


@triton.jit(do_not_specialize=["N", "T", "NS"])
def delta_gradient_map(q, k, kw, do, A, P, G, scales, dht, maps, crossing, cu, N, T, NS, H: tl.constexpr,
                       HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
                       BV: tl.constexpr, USE_DHT: tl.constexpr, V_FIRST: tl.constexpr, PER_CHANNEL: tl.constexpr,
                       PREC: tl.constexpr, COPY_LHS: tl.constexpr, STAGES: tl.constexpr):
    """Programs (value head, tile of Cᵀ `[V, K]`), for the sequence over the first edge. One that ends on this rank starts
    from dht."""
    NV: tl.constexpr = (V + BV - 1) // BV
    i_hv = tl.program_id(0) // NV
    i_h = i_hv // (HV // H)
    i_n, bos, n, both = _part(crossing, 0, cu, N, T)
    o_c = tl.arange(0, BT)
    o_k = tl.arange(0, BK)
    o_v = tl.program_id(0) % NV * BV + tl.arange(0, BV)
    b_r = tl.zeros([BV, BK], dtype=tl.float32)
    if USE_DHT:
        if both == 0:
            b_r += load_state(dht, i_n * HV + i_hv, o_k, o_v, K, V, V_FIRST)
    o_tk = o_c[:, None] * (H * K) + o_k[None, :]
    o_tv = o_c[:, None] * (HV * V) + o_v[None, :]
    o_tt = o_c[:, None] * BT + o_c[None, :]
    NC = (n + BT - 1) // BT
    for i in tl.range(0, NC, num_stages=STAGES):
        i_t = NC - 1 - i
        row = bos + i_t * BT
        left = n - i_t * BT
        p = chunk_slot(bos, i_n, i_t, BT, NS) * HV + i_hv
        p_k = (row * H + i_h) * K
        m_tk = row_mask(o_c < left, o_k, K, BK)
        b_k = tl.load(k + p_k + o_tk, mask=m_tk, other=0.)                                               # [BT, BK]
        b_kw = b_k
        if PER_CHANNEL:
            b_kw = tl.load(kw + p_k + o_tk, mask=m_tk, other=0.)
        p_v = do + (row * HV + i_hv) * V
        b_dot = tl.trans(tl.load(p_v + o_tv, mask=row_mask(o_c < left, o_v, V, BV), other=0.))           # [BV, BT]
        b_p = tl.load(P + p * (BT * BT) + o_tt)                                                          # [BT, BT]
        b_a = tl.load(A + p * (BT * BT) + o_tt)
        b_ro = b_r.to(b_k.dtype)
        b_decay, b_read, b_write, b_out = chunk_scales(G, scales, p, o_k, K, BT, PER_CHANNEL)
        b_dv = value_gradient(b_ro, b_dot, b_kw, b_p, b_a, b_write, PER_CHANNEL, PREC, COPY_LHS)
        b_q = tl.load(q + p_k + o_tk, mask=m_tk, other=0.)
        b_r = previous_gradient(b_r, b_dot, b_dv, b_q, b_k, b_decay, b_read, b_out, PER_CHANNEL, PREC)
    p_m = tl.cast(i_hv, tl.int64) * (V * K)
    tl.store(maps + p_m + o_v[:, None] * K + o_k[None, :], b_r, mask=row_mask(o_v < V, o_k, K, BK))


def run_state_map(operands: Operands, v: torch.Tensor, h0: torch.Tensor | None, transition: bool, v_first: bool,
                  crossing: torch.Tensor, packing: Packing) -> torch.Tensor:
    """Bᵀ `[HV, V, K]` of the sequence over this rank's last edge, with the rows of Mᵀ after it if wanted: `[HV, V + K, K]`.

    crossing: int32 `[2]`, the sequences over the first and the last edge, N where there is none.
    """
    (H, K), (HV, V) = operands.q.shape[2:], v.shape[2:]
    _, k, kw, A, _, G, scales = operands.recurrence
    maps = torch.empty(HV, V + K if transition else V, K, dtype=torch.float32, device=v.device)
    record = record_for("delta_state_map", v.device, K=K, V=V, BT=packing.BT, dtype=v.dtype)
    tiles = -(-V // record.tiles["BV"]) + (-(-K // record.tiles["BV"]) if transition else 0)
    launch(delta_state_map, HV * tiles, k, kw, v, A, G, scales, h0, maps, crossing, packing.cu, packing.N, packing.T, packing.NS,
           record=record, H=H, HV=HV, K=K, V=V, BT=packing.BT, USE_H0=h0 is not None, V_FIRST=v_first, TRANSITION=transition,
           PER_CHANNEL=operands.per_channel, STAGES=record.num_stages)
    return maps


def run_gradient_map(operands: Operands, do: torch.Tensor, dht: torch.Tensor | None, v_first: bool, crossing: torch.Tensor,
                     packing: Packing) -> torch.Tensor:
    """Cᵀ `[HV, V, K]` of the sequence over this rank's first edge; crossing as in `run_state_map`."""
    (H, K), (HV, V) = operands.q.shape[2:], do.shape[2:]
    maps = torch.empty(HV, V, K, dtype=torch.float32, device=do.device)
    record = record_for("delta_gradient_map", do.device, K=K, V=V, BT=packing.BT, dtype=do.dtype)
    launch(delta_gradient_map, HV * -(-V // record.tiles["BV"]), *operands.recurrence[:3], do, *operands.recurrence[3:], dht,
           maps, crossing, packing.cu, packing.N, packing.T, packing.NS, record=record, H=H, HV=HV, K=K, V=V, BT=packing.BT,
           USE_DHT=dht is not None, V_FIRST=v_first, PER_CHANNEL=operands.per_channel, STAGES=record.num_stages)
    return maps
