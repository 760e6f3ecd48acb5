"""Copy-in of one call: active rows into a static buffer, and the tail of the static `cu_seqlens`. Its copy-out, by the graph."""

from dataclasses import dataclass
from math import prod

import torch
import triton
import triton.language as tl

from graphlin.backends import Entry, Graph, Prepared
from graphlin.kernels.common import active_rows
from graphlin.kernels.launch import grid_stride, launch, prepare, record_for


@triton.jit(do_not_specialize=["N", "T", "first", "previous", "far", "near"])
def copy_active_rows(x, cu, N, T, first, previous, far, near, y, static_cu, mailbox, T_MAX, inner, outer, N_MAX: tl.constexpr,
                     HAS_CU: tl.constexpr, FILL_CU: tl.constexpr, HAS_MAIL: tl.constexpr, BLOCK: tl.constexpr,
                     BN: tl.constexpr):
    """x `[outer, T, inner]` into y `[outer, T_MAX, inner]`: rows below `cu[N]` copied, from there to `previous` zeroed.

    A row that is not active is not even loaded, so what lies in it can't reach the buffer. Rows below `first` are left
    alone. With FILL_CU entries past N of static_cu become `cu[N]`: the sequences that a smaller batch lacks are empty.
    With HAS_MAIL the mailbox gets `2**31 far + near`, and T, for `deliver_rows`.
    """
    if HAS_MAIL:
        if tl.program_id(0) == 0:
            tl.store(mailbox, (far.to(tl.int64) << 31) + near)
            tl.store(mailbox + 1, T.to(tl.int64))
    active = T.to(tl.int64)
    if HAS_CU:
        active = active_rows(cu, N, T)
    if FILL_CU:
        for i_n in range(tl.program_id(0), (N_MAX + BN) // BN, tl.num_programs(0)):
            o_n = i_n * BN + tl.arange(0, BN)
            ends = tl.load(cu + tl.minimum(o_n, N))
            tl.store(static_cu + o_n, ends, mask=o_n < N_MAX + 1)
    live = active * inner
    begin = first.to(tl.int64) * inner
    end = tl.maximum(active, previous) * inner
    tiles = (end - begin + BLOCK - 1) // BLOCK
    for i in range(tl.program_id(0), (outer * tiles).to(tl.int32), tl.num_programs(0)):
        i_o = (i // tiles).to(tl.int64)
        o = begin + (i % tiles).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        rows = tl.load(x + i_o * T * inner + o, mask=o < live, other=0)
        tl.store(y + i_o * T_MAX * inner + o, rows, mask=o < end)


@triton.jit(do_not_specialize=["vectors"])
def deliver_rows(x, mailbox, vectors, BLOCK: tl.constexpr):
    """Rows of x, each of `vectors` times 16 bytes, copied to where the mailbox says: how many bytes after x, and how many rows.

    A graph has fixed addresses, and this is how it writes to another at each replay. No bytes after x is nowhere. (Not an
    address, since every compiler of Triton takes a pointer and an offset, and few kernels make a pointer of an integer.)
    """
    offset = tl.multiple_of(tl.load(mailbox), 16)
    size = tl.where(offset == 0, 0, tl.load(mailbox + 1)) * vectors * 16
    for i in range(tl.program_id(0), ((size + BLOCK - 1) // BLOCK).to(tl.int32), tl.num_programs(0)):
        o = tl.cast(i, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        tl.store(x + offset + o, tl.load(x + o, mask=o < size, other=0), mask=o < size)


def is_deliverable(x: torch.Tensor, dim: int) -> bool:
    """Whether `deliver` can copy the first rows of x along `dim`: they lie together, and in vectors of 16 bytes."""
    if x.layout is not torch.strided or not x.is_contiguous() or x.is_neg() or x.is_conj() or prod(x.shape[:dim]) != 1:
        return False
    memory = x.untyped_storage()
    base = 0 if memory.device.type == "meta" else memory.data_ptr()
    return (base + x.storage_offset() * x.itemsize) % 16 == 0 and prod(x.shape[dim + 1:]) * x.itemsize % 16 == 0


def deliver(x: torch.Tensor, dim: int, mailbox: torch.Tensor) -> None:
    """Copies as many rows of x, and to where, as the last `RowCopy` with this mailbox `[1, 2]` (int64) has left in it."""
    bytes_of_x = x.as_strided((x.numel(),), (1,)).view(torch.uint8)  # a single element may have any stride
    record = record_for("deliver_rows", x.device)
    tasks = -(-x.nbytes // record.tiles["BLOCK"])
    launch(deliver_rows, grid_stride(tasks, record, x.device), bytes_of_x, mailbox, prod(x.shape[dim + 1:]) * x.itemsize // 16,
           record=record)


@dataclass
class Left:
    """Rows, or sequences, from the start of a static buffer that its last call may have left non-zero.

    Copies into views of one buffer share it, so that a tier zeroes what a larger one left. A buffer that is lent may be
    written by its user anywhere, so all of it counts as left.
    """

    count: int = 0
    lent: bool = False

    def within(self, size: int) -> int:
        """How many of the first `size` are to be zeroed where the call has none."""
        return size if self.lent else min(self.count, size)

    def replace(self, count: int, size: int) -> None:
        """A copy of `count` has zeroed the rest of the first `size`; what lies beyond is as before."""
        if self.count <= size:
            self.count = count


_NEAR = (1 << 31) - 1  # Triton takes an integer as 32 bits or 64, by its value; two of 31 are always of 32
_INTEGERS = {1: torch.int8, 8: torch.int64}


def as_triton_has_it(x: torch.Tensor) -> torch.Tensor:
    """A tensor of dtypes that Triton lacks on a device, on the same memory as one that it has; any other as it is.

    Complex numbers become pairs in a new last dim. Floats of 8 bits, which few devices compute with, and of 64, which Ascend
    lacks, become integers.
    """
    if x.is_complex():
        x = torch.view_as_real(x.resolve_conj())
    if x.is_floating_point() and x.itemsize in _INTEGERS:
        return x.resolve_neg().view(_INTEGERS[x.itemsize])
    return x


class RowCopy:
    """Fills a static buffer whose dim `dim` holds tokens, and zeroes the rows that an earlier call left there.

    With a mailbox, the copies that fill cu_seqlens too tell a graph in it where the call's output is to lie.

    >>> copy = RowCopy(torch.zeros(1, 4096, 64), dim=1)
    >>> copy(x, cu)                    # x [1, T, 64], T <= 4096
    """

    def __init__(self, static: torch.Tensor, dim: int, left: Left | None = None, mailbox: torch.Tensor | None = None) -> None:
        self.static = static
        self.mailbox = mailbox
        self.left = Left() if left is None else left
        self._dim = dim
        self._target = as_triton_has_it(static)
        shape = self._target.shape
        self._tokens, self._inner, self._outer = shape[dim], prod(shape[dim + 1:]), prod(shape[:dim])
        self._address = static.data_ptr()
        self._launches: dict[int, Prepared] = {}  # by static_cu, which they keep

    def __call__(self, x: torch.Tensor, cu: torch.Tensor | None, static_cu: torch.Tensor | None = None, offset: int = 0,
                 entry: Entry | None = None) -> None:
        """Copies the rows of x below `cu[-1]` (all rows without cu); static_cu, if given, is filled from cu.

        Rows of x that lie in the buffer already are left alone, the inactive ones too: they are the caller's. `offset` is what
        the mailbox gets with static_cu: bytes from what is delivered to where, 0 for nowhere. The next replay of the graph that
        `entry` is of copies them, if it can, instead of a launch.
        """
        given = x
        tokens, rows, left = self._tokens, x.shape[self._dim], self.left
        if self._target is not self.static:
            x = as_triton_has_it(x)
        if not x.is_contiguous() or x.is_neg():
            x = x.resolve_neg().contiguous()
        first = 0
        if x.data_ptr() == self._address and (self._outer == 1 or rows == tokens):
            first, left.lent = rows, True
            if static_cu is None and rows == tokens:
                return
        tensors = x, cu
        integers = 0 if cu is None else cu.shape[0] - 1, rows, first, left.within(tokens), offset >> 31, offset & _NEAR
        # Memory of another tensor would be gone by the time of the replay.
        handed = entry is not None and (entry.set(tensors, integers) if x is given else entry.enable(False))
        if not handed:
            self._launch(cu is not None, static_cu)(tensors, integers)
        left.replace(rows, tokens)

    def warm_up(self, static_cu: torch.Tensor) -> None:
        """Compiles what `record` launches."""
        launch = self._launch(True, static_cu)
        if hasattr(launch, "record"):
            launch(*self._nothing(static_cu))

    def record(self, graph: Graph, static_cu: torch.Tensor) -> Entry | None:
        """Puts into the graph that is being captured what a call with static_cu launches, if that can be."""
        launch = self._launch(True, static_cu)
        if self._target is not self.static or not hasattr(launch, "record"):
            return None
        return launch.record(graph, *self._nothing(static_cu))

    def _nothing(self, static_cu: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], tuple[int, ...]]:
        """Arguments by which nothing is copied, nor delivered."""
        return (self._target, static_cu), (static_cu.shape[0] - 1, self._tokens, self._tokens, 0, 0, 0)

    def _launch(self, has_cu: bool, static_cu: torch.Tensor | None) -> Prepared:
        form = id(static_cu) if has_cu else 0
        launch = self._launches.get(form)
        if launch is None:
            launch = self._launches[form] = self._prepare(has_cu, static_cu)
        return launch

    def _prepare(self, has_cu: bool, static_cu: torch.Tensor | None) -> Prepared:
        record = record_for("copy_active_rows", self._target.device, dtype=self._target.dtype)
        tasks = self._outer * -(-self._tokens * self._inner // record.tiles["BLOCK"])
        return prepare(copy_active_rows, grid_stride(max(tasks, 1), record, self._target.device), self._target, static_cu,
                       None if static_cu is None else self.mailbox, self._tokens, self._inner, self._outer, record=record,
                       N_MAX=0 if static_cu is None else static_cu.shape[0] - 1, HAS_CU=has_cu,
                       FILL_CU=static_cu is not None, HAS_MAIL=static_cu is not None and self.mailbox is not None)

    def clear(self) -> None:
        """Zeroes the whole buffer."""
        self.static.zero_()
        self.left.replace(0, self._tokens)
