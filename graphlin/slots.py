"""Slots, the private memory of captured graphs, and what copies a call's tensors into it."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch

from graphlin.backends import GraphBackend
from graphlin.kernels.copy_rows import Left, RowCopy, deliver, is_deliverable
from graphlin.packing import Leaf, Role
from graphlin.replay import Copy
from graphlin.tier import Tier


def _is_part(x: torch.Tensor, static: torch.Tensor) -> bool:
    """Whether x begins where a static tensor does, and holds what lies there, not its negative or conjugate."""
    return x.data_ptr() == static.data_ptr() and not x.is_neg() and not x.is_conj()


class SeqCopy:
    """Fills a static tensor whose dim `dim` holds sequences, and zeroes those that an earlier call left there."""

    def __init__(self, static: torch.Tensor, dim: int, left: Left) -> None:
        self.static = static
        self.left = left
        self._dim = dim
        self._size = static.shape[dim]
        self._is_leading = prod(static.shape[:dim]) == 1

    def __call__(self, x: torch.Tensor, cu: torch.Tensor | None, static_cu: torch.Tensor | None = None, offset: int = 0) -> None:
        seqs = x.shape[self._dim]
        if not _is_part(x, self.static) or not x.is_contiguous() or not (self._is_leading or seqs == self._size):
            self.static.narrow(self._dim, 0, seqs).copy_(x)
        else:
            self.left.lent = True
        if (stale := self.left.within(self._size) - seqs) > 0:
            self.static.narrow(self._dim, seqs, stale).zero_()
        self.left.replace(seqs, self._size)

    def clear(self) -> None:
        self.static.zero_()
        self.left.replace(0, self._size)


class WholeCopy:
    """Fills a static tensor of constant shape."""

    def __init__(self, static: torch.Tensor) -> None:
        self.static = static

    def __call__(self, x: torch.Tensor, cu: torch.Tensor | None, static_cu: torch.Tensor | None = None, offset: int = 0) -> None:
        if not _is_part(x, self.static) or x.stride() != self.static.stride():
            self.static.copy_(x)

    def clear(self) -> None:
        self.static.zero_()


@dataclass(frozen=True)
class Held:
    """Bytes that capturing one mode in one tier and slot added: to the slot's pool, and as static inputs, gradients and mailbox.

    `slot` counts from 0; `trains` is whether a backward was captured too.
    """

    tier: Tier
    slot: int
    trains: bool
    pool_bytes: int
    static_bytes: int


class Slot:
    """Private memory for one forward that may wait for its backward: a pool, and static tensors that its modes and tiers
    share. `bound` is the largest number of tokens and of sequences of any tier."""

    def __init__(self, backend: GraphBackend, device: torch.device, index: int, bound: tuple[int, int]) -> None:
        self.device = device
        self.index = index
        self.pool = backend.new_pool()
        self.stream = backend.side_stream(device)  # one for all captures: memory freed on it is used again on it alone
        self.busy = False
        self.held: list[Held] = []
        self._bound = bound
        self._buffers: dict[tuple, tuple[torch.Tensor, Left]] = {}
        self._copies: dict[tuple, Copy] = {}

    def release(self) -> None:
        self.busy = False

    def copy(self, name: str, role: Role | None, shape: Sequence[int], dtype: torch.dtype) -> Copy:
        """The static tensor of an argument or of an output's gradient in one tier, with what fills it.

        Those of different tiers begin at one address wherever rows are not strided, so that a ladder needs no more memory
        than its largest tier.
        """
        shape = tuple(shape)
        key = name, role, shape, dtype
        if key not in self._copies:
            if role is None:
                self._copies[key] = WholeCopy(self._buffer(key)[0])
            else:
                static, left = self._part(name, role, shape, dtype)
                self._copies[key] = (RowCopy(static, role.dim, left, self.mailbox) if role.kind == "tokens" else
                                     SeqCopy(static, role.dim, left))
        return self._copies[key]

    @cached_property
    def mailbox(self) -> torch.Tensor:
        """Where a copy-in tells the graph that is then replayed where to deliver its output."""
        mailbox, _ = self._buffer(("the mailbox", None, (1, 2), torch.int64))  # no argument is called so
        deliver(mailbox, 0, mailbox)  # nowhere: a capture may not compile the kernel
        return mailbox

    def deliver(self, tensor: torch.Tensor, dim: int) -> bool:
        """Puts into the graph that is being captured a copy of rows of `tensor` to where the mailbox says, if that can be."""
        if possible := is_deliverable(tensor, dim):
            deliver(tensor.detach(), dim, self.mailbox)
        return possible

    def whole(self, leaf: Leaf, dtype: torch.dtype) -> torch.Tensor:
        """The static tensor of an argument at the largest sizes of any tier, as the caller's own to write."""
        copy = self.copy(leaf.name, leaf.role, leaf.shape(*self._bound), dtype)
        if leaf.role is not None:
            copy.left.lent = True
        return copy.static

    def _part(self, name: str, role: Role, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, Left]:
        if prod(shape[:role.dim]) != 1:
            return self._buffer((name, role, shape, dtype))
        largest = *shape[:role.dim], role.size(*self._bound), *shape[role.dim + 1:]
        static, left = self._buffer((name, role, largest, dtype))
        return static.narrow(role.dim, 0, shape[role.dim]), left

    def _buffer(self, key: tuple) -> tuple[torch.Tensor, Left]:
        if key not in self._buffers:
            _, _, shape, dtype = key
            self._buffers[key] = torch.zeros(shape, dtype=dtype, device=self.device), Left()
        return self._buffers[key]

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in a static buffer."""
        memory = tensor.untyped_storage()._cdata
        return any(static.untyped_storage()._cdata == memory for static, _ in self._buffers.values())

    def static_bytes(self) -> int:
        return sum(static.nbytes for static, _ in self._buffers.values())
