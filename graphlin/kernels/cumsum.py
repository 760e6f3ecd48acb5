"""Cumulative sums inside chunks, over any trailing width."""

import torch
import triton
import triton.language as tl

from graphlin.kernels.common import active_rows, chunk, chunk_count, chunk_cumsum, sequence, zero_rows
from graphlin.kernels.launch import grid_stride, launch, record_for
from graphlin.kernels.packing import Packing


@triton.jit
def _cumsum_chunk(g, out, i_n, i_t, i_x, cu, T, X: tl.constexpr, BT: tl.constexpr, BX: tl.constexpr,
                  REVERSE: tl.constexpr, VARLEN: tl.constexpr):
    bos, n = sequence(cu, i_n, T, VARLEN)
    o_t = i_t * BT + tl.arange(0, BT)
    o_x = i_x * BX + tl.arange(0, BX)
    m = (o_t < n)[:, None] & (o_x < X)[None, :]
    p = (bos + i_t * BT) * X + tl.arange(0, BT)[:, None] * X + o_x[None, :]
    b_g = tl.load(g + p, mask=m, other=0.).to(tl.float32)                       # [BT, BX]
    tl.store(out + p, chunk_cumsum(b_g, REVERSE), mask=m)


@triton.jit(do_not_specialize=["N", "T", "NT", "NTS"])
def chunk_local_cumsum(g, out, cu, chunks, N, T, NT, NTS, X: tl.constexpr, BT: tl.constexpr, BX: tl.constexpr,
                       REVERSE: tl.constexpr, VARLEN: tl.constexpr, GRAPH_CAPTURE: tl.constexpr):
    """Tasks (chunk, X tile), grid-stride."""
    NX: tl.constexpr = (X + BX - 1) // BX
    for i_task in range(tl.program_id(0), chunk_count(cu, N, T, NT, BT, GRAPH_CAPTURE) * NX, tl.num_programs(0)):
        i_n, i_t = chunk(chunks, i_task // NX, NTS, VARLEN)
        live = True
        if GRAPH_CAPTURE:
            live = (i_n >= 0) & (i_n < N)
        if live:
            _cumsum_chunk(g, out, i_n, i_t, i_task % NX, cu, T, X, BT, BX, REVERSE, VARLEN)
    if VARLEN:
        zero_rows(out, active_rows(cu, N, T), T, X, 1024)


def run_chunk_local_cumsum(g: torch.Tensor, packing: Packing, reverse: bool) -> torch.Tensor:
    """Float32 sums like g `[B, T, ...]`, contiguous."""
    out = torch.empty_like(g, dtype=torch.float32)
    if out.numel() == 0:
        return out
    width = g[0, 0].numel()
    record = record_for("chunk_local_cumsum", g.device, BT=packing.BT)
    tasks = packing.NT * -(-width // record.tiles["BX"])
    launch(chunk_local_cumsum, grid_stride(tasks, record, g.device), g, out, packing.cu, packing.chunks, packing.N, packing.T,
           packing.NT, packing.NTS, record=record, X=width, BT=packing.BT,
           REVERSE=reverse, VARLEN=packing.varlen, GRAPH_CAPTURE=packing.capture)
    return out
