"""RMS normalisation with an output gate, forward and backward.

With `r = 1 / sqrt(mean(x²) + eps)` of a row, `n = r x` and `a = act(gate)`, 1 without a gate:
    y = n w a
    dn = dy w a,   dx = r (dn - n mean(dn n)),   dgate = dy w n act'(gate),   dw = Σ_rows dy n a
A row is in one tile, and its sums do not know the other rows. A product that is added to something is a `tl.fma`: else the
compiler chooses by which gradients are wanted what to fuse, and the last bit of a result follows.
"""

import torch
import triton
import triton.language as tl

from graphlin.kernels.activations import sigmoid, sigmoid_slope, silu_slope
from graphlin.kernels.common import row_mask
from graphlin.kernels.launch import grid_stride, launch, record_for
from graphlin.kernels.packing import Packing
from graphlin.kernels.reduce import reduce_partials_into

MAX_SIZE = 4096


@triton.jit
def _reciprocal_rms(b_x, eps, D: tl.constexpr):
    """[BR, 1] of rows [BR, BD]."""
    return tl.rsqrt(tl.sum(b_x * b_x, 1) * (1.0 / D) + eps)[:, None]


@triton.jit(do_not_specialize=["rows"])
def norm_forward(x, weight, gate, y, rows, eps, D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr, GATE: tl.constexpr,
                 SILU: tl.constexpr):
    """Tasks of BR rows, grid-stride."""
    o_d = tl.arange(0, BD)
    o_r = tl.arange(0, BR)
    o_x = o_r[:, None] * D + o_d[None, :]
    b_w = tl.load(weight + o_d, mask=o_d < D, other=0.).to(tl.float32)[None, :]
    for i_task in range(tl.program_id(0), (rows + BR - 1) // BR, tl.num_programs(0)):
        first = tl.cast(i_task, tl.int64) * BR
        left = tl.minimum(rows - first, BR).to(tl.int32)
        m = row_mask(o_r < left, o_d, D, BD)
        b_x = tl.load(x + first * D + o_x, mask=m, other=0.).to(tl.float32)                      # [BR, BD]
        if GATE:
            b_g = tl.load(gate + first * D + o_x, mask=m, other=0.).to(tl.float32)
        b_y = b_x * _reciprocal_rms(b_x, eps, D) * b_w
        if GATE:
            b_y *= sigmoid(b_g)
            if SILU:
                b_y *= b_g
        tl.store(y + first * D + o_x, b_y.to(y.dtype.element_ty), mask=m)


@triton.jit(do_not_specialize=["rows"])
def norm_backward(x, weight, gate, dy, dx, dgate, partials, rows, eps, D: tl.constexpr, ROWS: tl.constexpr, BR: tl.constexpr,
                  BD: tl.constexpr, GATE: tl.constexpr, SILU: tl.constexpr, DX: tl.constexpr, DGATE: tl.constexpr,
                  DWEIGHT: tl.constexpr):
    """Tasks of ROWS rows, grid-stride, BR at a time; each leaves one row of partial sums for the weight's gradient."""
    o_d = tl.arange(0, BD)
    o_r = tl.arange(0, BR)
    o_x = o_r[:, None] * D + o_d[None, :]
    b_w = tl.load(weight + o_d, mask=o_d < D, other=0.).to(tl.float32)[None, :]
    for i_task in range(tl.program_id(0), (rows + ROWS - 1) // ROWS, tl.num_programs(0)):
        first = tl.cast(i_task, tl.int64) * ROWS
        left = tl.minimum(rows - first, ROWS).to(tl.int32)
        b_dw = tl.zeros([BR, BD], dtype=tl.float32)
        for i_r in range(0, left, BR):
            p = (first + i_r) * D
            m = row_mask(i_r + o_r < left, o_d, D, BD)
            b_x = tl.load(x + p + o_x, mask=m, other=0.).to(tl.float32)                          # [BR, BD]
            b_dy = tl.load(dy + p + o_x, mask=m, other=0.).to(tl.float32)
            if GATE:
                b_g = tl.load(gate + p + o_x, mask=m, other=0.).to(tl.float32)
            b_r = _reciprocal_rms(b_x, eps, D)
            b_n = b_x * b_r
            b_dz = b_dy * b_w
            if GATE:
                b_a = sigmoid(b_g)
                if SILU:
                    b_slope = silu_slope(b_g, b_a)
                    b_a *= b_g
                else:
                    b_slope = sigmoid_slope(b_a)
                if DGATE:
                    tl.store(dgate + p + o_x, (b_dz * b_n * b_slope).to(dgate.dtype.element_ty), mask=m)
                b_dz *= b_a
                b_dy *= b_a
            if DX:
                b_c = tl.sum(b_dz * b_n, 1)[:, None] * (-1.0 / D)
                tl.store(dx + p + o_x, (b_r * tl.fma(b_n, b_c, b_dz)).to(dx.dtype.element_ty), mask=m)
            if DWEIGHT:
                b_dw = tl.fma(b_dy, b_n, b_dw)
        if DWEIGHT:
            tl.store(partials + tl.cast(i_task, tl.int64) * D + o_d, tl.sum(b_dw, 0), mask=o_d < D)


def run_norm_forward(x: torch.Tensor, weight: torch.Tensor, gate: torch.Tensor | None, eps: float, silu: bool) -> torch.Tensor:
    """y like x `[..., D]`."""
    D, y = weight.shape[0], torch.empty_like(x)
    rows = x.numel() // D
    record = record_for("norm_forward", x.device, V=D, dtype=x.dtype)
    tasks = -(-rows // record.tiles["BR"])
    launch(norm_forward, grid_stride(tasks, record, x.device), x, weight, gate, y, rows, eps, record=record, D=D,
           GATE=gate is not None, SILU=silu)
    return y


def run_norm_backward(x: torch.Tensor, weight: torch.Tensor, gate: torch.Tensor | None, dy: torch.Tensor, eps: float, silu: bool,
                      wanted: tuple[bool, bool, bool]) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Gradients of x, weight and gate; None for what is not wanted."""
    want_x, want_weight, want_gate = wanted
    D = weight.shape[0]
    rows = x.numel() // D
    dx = torch.empty_like(x) if want_x else None
    dgate = torch.empty_like(gate) if want_gate else None
    dweight = torch.empty_like(weight) if want_weight else None
    record = record_for("norm_backward", x.device, V=D, dtype=x.dtype)
    tasks = -(-rows // record.tiles["ROWS"])
    partials = x.new_empty(tasks, 1, D, dtype=torch.float32) if want_weight else None
    launch(norm_backward, grid_stride(tasks, record, x.device), x, weight, gate, dy, dx, dgate, partials, rows, eps,
           record=record, D=D, GATE=gate is not None, SILU=silu, DX=want_x, DGATE=want_gate, DWEIGHT=want_weight)
    if want_weight:
        # To the reduction a task is a chunk of one dense sequence.
        packing = Packing(None, None, 1, rows, tasks, tasks, record.tiles["ROWS"], capture=False)
        reduce_partials_into(partials, packing, dweight[None])
    return dx, dweight, dgate
