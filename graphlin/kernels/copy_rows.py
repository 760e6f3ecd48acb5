"""Copy-in of one call: active rows into a static buffer, and the tail of the static `cu_seqlens`."""

from math import prod

import torch
import triton
import triton.language as tl

from graphlin.kernels.common import active_rows
from graphlin.kernels.launch import grid_stride, launch, record_for


@triton.jit(do_not_specialize=["N", "T", "previous"])
def copy_active_rows(x, y, cu, static_cu, N, T, previous, T_MAX, inner, outer, N_MAX: tl.constexpr,
                     HAS_CU: tl.constexpr, FILL_CU: tl.constexpr, BLOCK: tl.constexpr, BN: tl.constexpr):
    """x `[outer, T, inner]` into y `[outer, T_MAX, inner]`: rows below `cu[N]` copied, from there to `previous` zeroed.

    A row that is not active is not even loaded, so what lies in it can't reach the buffer. With FILL_CU entries past N
    of static_cu become `cu[N]`: the sequences that a smaller batch lacks are empty.
    """
    active = T.to(tl.int64)
    if HAS_CU:
        active = active_rows(cu, N, T)
    if FILL_CU:
        for i_n in range(tl.program_id(0), (N_MAX + BN) // BN, tl.num_programs(0)):
            o_n = i_n * BN + tl.arange(0, BN)
            ends = tl.load(cu + tl.minimum(o_n, N))
            tl.store(static_cu + o_n, ends, mask=o_n < N_MAX + 1)
    live = active * inner
    end = tl.maximum(active, previous) * inner
    tiles = (end + BLOCK - 1) // BLOCK
    for i in range(tl.program_id(0), (outer * tiles).to(tl.int32), tl.num_programs(0)):
        i_o = (i // tiles).to(tl.int64)
        start = (i % tiles).to(tl.int64) * BLOCK
        o = start + tl.arange(0, BLOCK)
        rows = tl.load(x + i_o * T * inner + o, mask=o < live, other=0)
        tl.store(y + i_o * T_MAX * inner + o, rows, mask=o < end)


class RowCopy:
    """Fills a static buffer whose dim `dim` holds tokens, and knows which rows the last call may have left non-zero.

    >>> copy = RowCopy(torch.zeros(1, 4096, 64), dim=1)
    >>> copy(x, cu)                    # x [1, T, 64], T <= 4096
    """

    def __init__(self, static: torch.Tensor, dim: int) -> None:
        self.static = static
        self.previous = 0
        self._dim = dim
        self._sizes = static.shape[dim], prod(static.shape[dim + 1:]), prod(static.shape[:dim])
        self._record = record_for("copy_active_rows", static.device, dtype=static.dtype)
        tasks = self._sizes[2] * -(-self._sizes[0] * self._sizes[1] // self._record.tiles["BLOCK"])
        self._grid = grid_stride(max(tasks, 1), self._record, static.device)

    def __call__(self, x: torch.Tensor, cu: torch.Tensor | None, static_cu: torch.Tensor | None = None) -> None:
        """Copies the rows of x below `cu[-1]` (all rows without cu); static_cu, if given, is filled from cu.

        An x that is the buffer itself is left alone: its inactive rows are the caller's.
        """
        tokens, inner, outer = self._sizes
        rows = x.shape[self._dim]
        if x.data_ptr() == self.static.data_ptr() and x.stride() == self.static.stride() and rows == tokens:
            self.previous = tokens
            if static_cu is None:
                return
            outer = 0  # no rows, the tail of static_cu alone
        launch(copy_active_rows, self._grid, x.contiguous(), self.static, cu, static_cu,
               0 if cu is None else cu.shape[0] - 1, rows, self.previous, tokens, inner, outer, record=self._record,
               N_MAX=0 if static_cu is None else static_cu.shape[0] - 1, HAS_CU=cu is not None,
               FILL_CU=static_cu is not None)
        self.previous = rows

    def clear(self) -> None:
        """Zeroes the whole buffer."""
        self.static.zero_()
        self.previous = 0
