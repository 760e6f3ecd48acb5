"""The delta rules' serial kernel of the forward: the state from chunk to chunk, and the output. Its step is in `delta_steps`."""

import torch
import triton
import triton.language as tl

from graphlin.kernels.common import active_rows, chunk_slot, keep, row_mask, sequence, zero_rows
from graphlin.kernels.delta_problem import Operands
from graphlin.kernels.delta_steps import chunk_scales, load_state, next_state, store_rows, store_state
from graphlin.kernels.launch import launch, programs_of, record_for
from graphlin.kernels.packing import Packing
from graphlin.kernels.split import next_piece, piece_start, pieces_of, same_bits


@triton.jit
def _store_output(p_o, b_so, b_e, b_q, b_p, b_out, m_tv, PER_CHANNEL: tl.constexpr, PREC: tl.constexpr):
    b_o = tl.dot(b_so, tl.trans(b_q), input_precision=PREC)                                              # [BV, BT]
    if not PER_CHANNEL:
        b_o = b_o * b_out[None, :]
    b_o = tl.dot(b_e.to(b_p.dtype), tl.trans(b_p), b_o, input_precision=PREC)
    tl.store(p_o, tl.trans(b_o).to(p_o.dtype.element_ty), mask=m_tv)


@triton.jit
def _walk(b_s, q, k, kw, v, A, P, G, scales, o, St, E, i_n, i_hv, i_h, o_v, bos, n, start, end, begin, NS,
          H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
          BV: tl.constexpr, OUTPUT: tl.constexpr, PER_CHANNEL: tl.constexpr, PREC: tl.constexpr, COPY_LHS: tl.constexpr,
          PIECES: tl.constexpr, STAGES: tl.constexpr):
    """S after the chunks start to end - 1, of which those from `begin` on are output."""
    o_c = tl.arange(0, BT)
    o_k = tl.arange(0, BK)
    o_tk = o_c[:, None] * (H * K) + o_k[None, :]
    o_tv = o_c[:, None] * (HV * V) + o_v[None, :]
    o_tt = o_c[:, None] * BT + o_c[None, :]
    for i_t in tl.range(start, end, num_stages=STAGES):
        row = bos + i_t * BT
        left = n - i_t * BT
        p = chunk_slot(bos, i_n, i_t, BT, NS) * HV + i_hv
        p_k = (row * H + i_h) * K
        p_v = (row * HV + i_hv) * V
        m_tk = row_mask(o_c < left, o_k, K, BK)
        b_k = tl.load(k + p_k + o_tk, mask=m_tk, other=0.)                                               # [BT, BK]
        b_kw = b_k
        if PER_CHANNEL:
            b_kw = tl.load(kw + p_k + o_tk, mask=m_tk, other=0.)
        b_v = tl.load(v + p_v + o_tv, mask=row_mask(o_c < left, o_v, V, BV), other=0.)                   # [BT, BV]
        b_at = tl.trans(tl.load(A + p * (BT * BT) + o_tt))                                               # [BT, BT]
        b_decay, b_read, b_write, b_out = chunk_scales(G, scales, p, o_k, K, BT, PER_CHANNEL)
        b_so = b_s.to(k.dtype.element_ty)
        if not OUTPUT:
            p_s = St + p * (K * V)
            tl.store(p_s + (o_v[:, None] * K + o_k[None, :]), b_so.to(St.dtype.element_ty), mask=row_mask(o_v < V, o_k, K, BK))
        b_e = tl.dot(tl.trans(b_v), b_at, input_precision=PREC)                                          # [BV, BT]
        b_z = tl.dot(keep(b_so, COPY_LHS), tl.trans(b_k), input_precision=PREC)
        b_e, b_s = next_state(b_s, b_e, b_z, b_k, b_kw, b_at, b_decay, b_read, b_write, PER_CHANNEL, PREC)
        m_tv = row_mask(i_t * BT + o_c < n, o_v, V, BV)     # not the loads' mask, which Triton would keep for chunks ahead
        if OUTPUT:
            b_q = tl.load(q + p_k + o_tk, mask=m_tk, other=0.)
            b_p = tl.load(P + p * (BT * BT) + o_tt)
            if not PER_CHANNEL:
                if (left > 0) & (i_t >= begin):     # left > 0: as in store_rows
                    _store_output(o + p_v + o_tv, b_so, b_e, b_q, b_p, b_out, m_tv, PER_CHANNEL, PREC)
            else:
                if PIECES > 1:
                    m_tv = m_tv & (i_t * BT + o_c >= begin * BT)[:, None]
                _store_output(o + p_v + o_tv, b_so, b_e, b_q, b_p, b_out, m_tv, PER_CHANNEL, PREC)
        else:
            store_rows(E + p_v + o_tv, b_e, m_tv, left, not PER_CHANNEL)
    return b_s


@triton.jit
def state_loop(q, k, kw, v, A, P, G, scales, h0, o, ht, St, E, reached, assumed, i_here, i_there, i_n, i_hv, i_v, bos, n, start,
               begin, end, NS, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr,
               BK: tl.constexpr, BV: tl.constexpr, USE_H0: tl.constexpr, STORE_HT: tl.constexpr, V_FIRST: tl.constexpr,
               OUTPUT: tl.constexpr, PER_CHANNEL: tl.constexpr, PREC: tl.constexpr, COPY_LHS: tl.constexpr,
               PIECES: tl.constexpr, JOIN: tl.constexpr, STAGES: tl.constexpr):
    """Carries S over the chunks begin to end - 1 of one sequence, from h0 if `begin` is its first; else from what the chunks from
    `start` on make of nothing or, JOIN, from what was reached.

    OUTPUT: writes o (and ht at the end of the sequence, S where a piece ends or begins, the states i_there and i_here of those
    `reached` and `assumed`); else stores what the gradients need, S before each chunk and E.
    """
    i_nh = i_n * HV + i_hv
    i_h = i_hv // (HV // H)
    o_k = tl.arange(0, BK)
    o_v = i_v * BV + tl.arange(0, BV)
    b_s = tl.zeros([BV, BK], dtype=tl.float32)
    if JOIN:
        b_s += load_state(reached, i_here, o_k, o_v, K, V, True)
    elif USE_H0:
        if begin == 0:
            b_s += load_state(h0, i_nh, o_k, o_v, K, V, V_FIRST)
    if PIECES > 1 and not JOIN:
        # One loop for both, since a second one's addresses would not fit the registers.
        for i in range(tl.where(begin > 0, 0, 1), 2):
            b_s = _walk(b_s, q, k, kw, v, A, P, G, scales, o, St, E, i_n, i_hv, i_h, o_v, bos, n, tl.where(i == 0, start, begin),
                        tl.where(i == 0, begin, end), begin, NS, H, HV, K, V, BT, BK, BV, OUTPUT, PER_CHANNEL, PREC, COPY_LHS,
                        PIECES, STAGES)
            if i == 0:
                store_state(assumed, b_s, i_here, o_k, o_v, K, V, True)
    else:
        b_s = _walk(b_s, q, k, kw, v, A, P, G, scales, o, St, E, i_n, i_hv, i_h, o_v, bos, n, begin, end, begin, NS, H, HV, K, V,
                    BT, BK, BV, OUTPUT, PER_CHANNEL, PREC, COPY_LHS, PIECES, STAGES)
    if PIECES > 1:
        if end * BT < n:
            store_state(reached, b_s, i_there, o_k, o_v, K, V, True)
    if STORE_HT:
        if end * BT >= n:
            store_state(ht, b_s, i_nh, o_k, o_v, K, V, V_FIRST)


@triton.jit
def _output_task(q, k, kw, A, P, G, scales, v, h0, o, ht, reached, assumed, i_task, cu, N, T, NS,
                 H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
                 BV: tl.constexpr, USE_H0: tl.constexpr, STORE_HT: tl.constexpr, V_FIRST: tl.constexpr, VARLEN: tl.constexpr,
                 PER_CHANNEL: tl.constexpr, PREC: tl.constexpr, COPY_LHS: tl.constexpr, PIECES: tl.constexpr,
                 SEGMENT: tl.constexpr, LEAST: tl.constexpr, STAGES: tl.constexpr):
    """A piece of a sequence, value head and V tile. The first pieces of all come before the second ones: only those surely have
    work."""
    NV: tl.constexpr = (V + BV - 1) // BV
    i_piece = i_task // (N * (HV * NV))
    i_hv = i_task // NV % HV
    i_n = i_task // (HV * NV) % N
    bos, n = sequence(cu, i_n, T, VARLEN)
    start = 0
    begin = 0
    end = (n + BT - 1) // BT
    i_here = 0
    i_there = 0
    # A sequence has rows, or at least a state to hand on. An empty loop is not free: its loads ahead are set up.
    work = (n > 0) | STORE_HT
    if PIECES > 1:
        NC = end
        if i_piece > 0:
            begin, chunks = piece_start(G, bos, i_n, NC, i_hv, i_piece, NS, HV, K, BT, BK, PER_CHANNEL, PIECES, SEGMENT, LEAST)
            start = begin - chunks
            work = begin < NC
        end, i_next = next_piece(G, bos, i_n, NC, i_hv, i_piece, NS, HV, K, BT, BK, PER_CHANNEL, PIECES, SEGMENT, LEAST)
        i_here = ((i_piece - 1) * N + i_n) * HV + i_hv
        i_there = ((i_next - 1) * N + i_n) * HV + i_hv
    if work:
        state_loop(q, k, kw, v, A, P, G, scales, h0, o, ht, None, None, reached, assumed, i_here, i_there, i_n, i_hv, i_task % NV,
                   bos, n, start, begin, end, NS, H, HV, K, V, BT, BK, BV, USE_H0, STORE_HT, V_FIRST, True, PER_CHANNEL, PREC,
                   COPY_LHS, PIECES, False, STAGES)


@triton.jit
def _join_task(q, k, kw, A, P, G, scales, v, h0, o, ht, reached, assumed, i_task, cu, N, T, NS,
               H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
               BV: tl.constexpr, USE_H0: tl.constexpr, STORE_HT: tl.constexpr, V_FIRST: tl.constexpr, VARLEN: tl.constexpr,
               PER_CHANNEL: tl.constexpr, PREC: tl.constexpr, COPY_LHS: tl.constexpr, PIECES: tl.constexpr,
               SEGMENT: tl.constexpr, LEAST: tl.constexpr, STAGES: tl.constexpr):
    """A sequence, value head and V tile: takes each piece again, in order, that started from another state than was reached."""
    NV: tl.constexpr = (V + BV - 1) // BV
    i_hv = i_task // NV % HV
    i_n = i_task // (HV * NV) % N
    o_k = tl.arange(0, BK)
    o_v = i_task % NV * BV + tl.arange(0, BV)
    bos, n = sequence(cu, i_n, T, VARLEN)
    NC = (n + BT - 1) // BT
    for i_piece in range(1, PIECES):
        begin, _ = piece_start(G, bos, i_n, NC, i_hv, i_piece, NS, HV, K, BT, BK, PER_CHANNEL, PIECES, SEGMENT, LEAST)
        if begin < NC:
            i_here = ((i_piece - 1) * N + i_n) * HV + i_hv
            b_reached = load_state(reached, i_here, o_k, o_v, K, V, True)
            if not same_bits(b_reached, load_state(assumed, i_here, o_k, o_v, K, V, True)):
                end, i_next = next_piece(G, bos, i_n, NC, i_hv, i_piece, NS, HV, K, BT, BK, PER_CHANNEL, PIECES, SEGMENT, LEAST)
                state_loop(q, k, kw, v, A, P, G, scales, h0, o, ht, None, None, reached, assumed, i_here,
                           ((i_next - 1) * N + i_n) * HV + i_hv, i_n, i_hv, i_task % NV, bos, n, begin, begin, end, NS, H, HV, K,
                           V, BT, BK, BV, USE_H0, STORE_HT, V_FIRST, True, PER_CHANNEL, PREC, COPY_LHS, PIECES, True, STAGES)
                tl.debug_barrier()      # other threads than have stored what is reached now load it for the next piece


@triton.jit(do_not_specialize=["N", "T", "NS"])
def delta_recurrence(q, k, kw, A, P, G, scales, v, h0, o, ht, reached, assumed, cu, N, T, NS,
                     H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
                     BV: tl.constexpr, USE_H0: tl.constexpr, STORE_HT: tl.constexpr, V_FIRST: tl.constexpr,
                     VARLEN: tl.constexpr, PER_CHANNEL: tl.constexpr, PREC: tl.constexpr, COPY_LHS: tl.constexpr,
                     PERSISTENT: tl.constexpr, LOOPED: tl.constexpr, PIECES: tl.constexpr, SEGMENT: tl.constexpr,
                     LEAST: tl.constexpr, STAGES: tl.constexpr):
    """Tasks (piece of a sequence, value head, V tile), a program each or, PERSISTENT, grid-stride. Writes o and ht; BK covers K.
    LOOPED: in a loop, be it of one turn, which Triton compiles to other code. PIECES, SEGMENT, LEAST: see `split`."""
    if PERSISTENT or LOOPED:
        for i_task in range(tl.program_id(0), N * (PIECES * HV * ((V + BV - 1) // BV)), tl.num_programs(0)):
            _output_task(q, k, kw, A, P, G, scales, v, h0, o, ht, reached, assumed, i_task, cu, N, T, NS, H, HV, K, V, BT, BK, BV,
                         USE_H0, STORE_HT, V_FIRST, VARLEN, PER_CHANNEL, PREC, COPY_LHS, PIECES, SEGMENT, LEAST, STAGES)
    else:
        _output_task(q, k, kw, A, P, G, scales, v, h0, o, ht, reached, assumed, tl.program_id(0), cu, N, T, NS, H, HV, K, V, BT,
                     BK, BV, USE_H0, STORE_HT, V_FIRST, VARLEN, PER_CHANNEL, PREC, COPY_LHS, PIECES, SEGMENT, LEAST, STAGES)
    if VARLEN:
        zero_rows(o, active_rows(cu, N, T), T, HV * V, 1024)


@triton.jit(do_not_specialize=["N", "T", "NS"])
def delta_join(q, k, kw, A, P, G, scales, v, h0, o, ht, reached, assumed, cu, N, T, NS,
               H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
               BV: tl.constexpr, USE_H0: tl.constexpr, STORE_HT: tl.constexpr, V_FIRST: tl.constexpr, VARLEN: tl.constexpr,
               PER_CHANNEL: tl.constexpr, PREC: tl.constexpr, COPY_LHS: tl.constexpr, PERSISTENT: tl.constexpr,
               PIECES: tl.constexpr, SEGMENT: tl.constexpr, LEAST: tl.constexpr, STAGES: tl.constexpr):
    """Behind `delta_recurrence` in PIECES, whose arguments it has, a program for each sequence, value head and V tile: see
    `split`."""
    _join_task(q, k, kw, A, P, G, scales, v, h0, o, ht, reached, assumed, tl.program_id(0), cu, N, T, NS, H, HV, K, V, BT, BK, BV,
               USE_H0, STORE_HT, V_FIRST, VARLEN, PER_CHANNEL, PREC, COPY_LHS, PIECES, SEGMENT, LEAST, STAGES)


def run_recurrence(operands: Operands, v: torch.Tensor, h0: torch.Tensor | None, store_ht: bool, v_first: bool,
                   packing: Packing) -> tuple[torch.Tensor, torch.Tensor | None]:
    """o like v, and the final state float32 if wanted."""
    (H, K), (HV, V) = operands.q.shape[2:], v.shape[2:]
    o = torch.empty_like(v)
    ht = v.new_empty(packing.N, HV, *((V, K) if v_first else (K, V)), dtype=torch.float32) if store_ht else None
    pieces, record = pieces_of(packing, HV, K, V, operands.per_channel, v.dtype, v.device)
    record = record or record_for("delta_recurrence", v.device, K=K, V=V, BT=packing.BT, dtype=v.dtype)
    tasks = packing.N * HV * -(-V // record.tiles["BV"])
    programs = programs_of(pieces * tasks, record, v.device)
    constexprs = dict(H=H, HV=HV, K=K, V=V, BT=packing.BT, USE_H0=h0 is not None, STORE_HT=store_ht, V_FIRST=v_first,
                      VARLEN=packing.varlen, PER_CHANNEL=operands.per_channel, PIECES=pieces, STAGES=record.num_stages)
    seams = (None, None)
    if pieces > 1:
        seams = [v.new_empty(pieces - 1, packing.N, HV, V, K, dtype=torch.float32) for _ in range(2)]
    else:
        constexprs |= dict(SEGMENT=0, LEAST=0)
    tensors = (*operands.recurrence, v, h0, o, ht, *seams, packing.cu, packing.N, packing.T, packing.NS)
    # On an H200 a loop took less time with one decay a head and four warps, more with eight, or with one a channel.
    looped = not operands.per_channel and record.num_warps <= 4
    launch(delta_recurrence, programs, *tensors, record=record, LOOPED=looped, **constexprs)
    if pieces > 1:
        launch(delta_join, tasks, *tensors, record=record, **constexprs)
    return o, ht
