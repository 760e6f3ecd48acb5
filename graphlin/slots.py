"""Slots, the private memory of captured graphs, and what copies a call's tensors into it."""

from collections.abc import Sequence

import torch

from graphlin.backends import GraphBackend
from graphlin.kernels.copy_rows import RowCopy
from graphlin.packing import Role
from graphlin.replay import Copy


class SeqCopy:
    """Fills a static tensor whose dim `dim` holds sequences."""

    def __init__(self, static: torch.Tensor, dim: int) -> None:
        self.static = static
        self._dim = dim
        self._previous = 0

    def __call__(self, x: torch.Tensor, cu: torch.Tensor | None, static_cu: torch.Tensor | None = None) -> None:
        seqs = x.shape[self._dim]
        if x.data_ptr() != self.static.data_ptr() or x.stride() != self.static.stride():
            self.static.narrow(self._dim, 0, seqs).copy_(x)
            if seqs < self._previous:
                self.static.narrow(self._dim, seqs, self._previous - seqs).zero_()
        self._previous = seqs

    def clear(self) -> None:
        self.static.zero_()


class WholeCopy:
    """Fills a static tensor of constant shape."""

    def __init__(self, static: torch.Tensor) -> None:
        self.static = static

    def __call__(self, x: torch.Tensor, cu: torch.Tensor | None, static_cu: torch.Tensor | None = None) -> None:
        if x.data_ptr() != self.static.data_ptr() or x.stride() != self.static.stride():
            self.static.copy_(x)

    def clear(self) -> None:
        self.static.zero_()


class Slot:
    """Private memory for one forward that may wait for its backward: a pool, and static tensors its modes share."""

    def __init__(self, backend: GraphBackend, device: torch.device) -> None:
        self.device = device
        self.pool = backend.new_pool()
        self.stream = backend.side_stream(device)  # one for all captures: memory freed on it is used again on it alone
        self.busy = False
        self._copies: dict[tuple, Copy] = {}

    def release(self) -> None:
        self.busy = False

    def copy(self, name: str, role: Role | None, shape: Sequence[int], dtype: torch.dtype) -> Copy:
        """The static tensor of an argument or of an output's gradient, with what fills it."""
        key = (name, role, tuple(shape), dtype)
        if key not in self._copies:
            static = torch.zeros(shape, dtype=dtype, device=self.device)
            if role is None:
                self._copies[key] = WholeCopy(static)
            else:
                self._copies[key] = (RowCopy if role.kind == "tokens" else SeqCopy)(static, role.dim)
        return self._copies[key]

    def static_bytes(self) -> int:
        return sum(copy.static.nbytes for copy in self._copies.values())
