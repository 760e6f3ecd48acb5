"""The chunk table: which chunk of which sequence each row of a chunk-parallel grid works on."""

import torch
import triton
import triton.language as tl

from graphlin.chunking import max_chunks
from graphlin.kernels.launch import launch, record_for


@triton.jit(do_not_specialize=["N", "T", "NT"])
def chunk_table_rows(cu, chunks, N, T, NT, BT: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr,
                     ROWWISE: tl.constexpr):
    """BR rows a program, stored in whole rows if ROWWISE. A row's sequence is the number of sequences whose chunks end at or
    before it, counted block by block."""
    o_r = tl.program_id(0) * BR + tl.arange(0, BR)
    i_n = tl.zeros([BR], dtype=tl.int32)
    first = tl.zeros([BR], dtype=tl.int32)
    total = tl.zeros([1], dtype=tl.int32)
    for i_b in range(0, N, BN):
        o_n = i_b + tl.arange(0, BN)
        m_n = o_n < N
        # clamped as they are: of int64 the lower half of a wrong value might seem right
        bos = tl.minimum(tl.maximum(tl.load(cu + o_n, mask=m_n, other=0), 0), T).to(tl.int32)
        eos = tl.minimum(tl.maximum(tl.load(cu + o_n + 1, mask=m_n, other=0), 0), T).to(tl.int32)
        b_nt = (tl.maximum(eos - bos, 0) + BT - 1) // BT                        # [BN]
        end = total + tl.cumsum(b_nt, 0)
        passed = (end[None, :] <= o_r[:, None]) & m_n[None, :]                  # [BR, BN]
        i_n += tl.sum(passed.to(tl.int32), 1)
        first = tl.maximum(first, tl.max(tl.where(passed, end[None, :], 0), 1))
        total += tl.sum(b_nt, 0)
    live = o_r < total
    m_r = o_r < NT
    if ROWWISE:
        o_2 = tl.arange(0, 2)
        b_row = tl.where(o_2[None, :] == 0, i_n[:, None], (o_r - first)[:, None])                        # [BR, 2]
        tl.store(chunks + o_r[:, None] * 2 + o_2[None, :], tl.where(live[:, None], b_row, -1), mask=m_r[:, None])
    else:
        tl.store(chunks + o_r * 2, tl.where(live, i_n, -1), mask=m_r)
        tl.store(chunks + o_r * 2 + 1, tl.where(live, o_r - first, -1), mask=m_r)


def chunk_table(cu_seqlens: torch.Tensor, max_tokens: int, chunk_size: int) -> torch.Tensor:
    """`[NT_max, 2]` int32 rows `(sequence, chunk in sequence)`, sentinels `(-1, -1)` last; one launch, no host sync."""
    seqs = cu_seqlens.shape[0] - 1
    rows = max_chunks(max_tokens, seqs, chunk_size)
    chunks = torch.empty(rows, 2, dtype=torch.int32, device=cu_seqlens.device)
    record = record_for("chunk_table_rows", cu_seqlens.device)
    launch(chunk_table_rows, -(-rows // record.tiles["BR"]), cu_seqlens, chunks, seqs, max_tokens, rows,
           record=record, BT=chunk_size)
    return chunks
