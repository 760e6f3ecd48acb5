"""Which part of a packed batch each rank holds, decided on the device."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from graphlin.backends import get_backend
from graphlin.errors import UnsupportedModule
from graphlin.ops.chunks import prepare_chunk_indices
from graphlin.parallel.exchange import all_gather


@dataclass(frozen=True, eq=False)
class Split:
    """One rank's view of a packed batch whose tokens are split over a group; made by `split`.

    Everything but group, rank and world is a tensor on the device, so that it may change between replays of a graph:
    `cu_seqlens [N + 1]` of this rank's tokens, in which sequences without a token here have length 0; `earlier` and `later`,
    int32 scalars: how many ranks lie between this one and the one that holds the start of its first sequence, the end of its
    last one, those included (0: nothing lies elsewhere); `starts_here`, `ends_here`: bool `[N]`, which sequences have their
    first, their last token here. An empty sequence starts and ends on the rank whose tokens it lies among.

    For each of the world + 1 edges between ranks, the two outer ones included: `crossing` int32, the sequence that lies on both
    sides, N if none does; `first_token`, `first_rank`, `last_rank` of that sequence. `offsets` int64 `[world + 1]`.
    """

    group: dist.ProcessGroup
    rank: int
    world: int
    cu_seqlens: torch.Tensor
    offsets: torch.Tensor
    starts_here: torch.Tensor
    ends_here: torch.Tensor
    crossing: torch.Tensor
    first_token: torch.Tensor
    first_rank: torch.Tensor
    last_rank: torch.Tensor
    earlier: torch.Tensor
    later: torch.Tensor
    made_in_capture: bool = False
    _made: dict = field(default_factory=dict)

    @property
    def num_seqs(self) -> int:
        """N, with those that have no token here."""
        return self.cu_seqlens.shape[0] - 1

    @cached_property
    def edges(self) -> torch.Tensor:
        """`crossing` of this rank's own two edges: the sequences that come from an earlier rank, and go on to a later one."""
        return self.crossing[self.rank:self.rank + 2]

    def chunk_indices(self, tokens: int, chunk_size: int) -> torch.Tensor:
        """The chunk table of `cu_seqlens` for tensors of so many rows; built at the first call, for all layers of a step.

        Raises UnsupportedModule in a capture, of a context that was made outside: each replay would take its batch again.
        """
        if not self.made_in_capture and get_backend(self.offsets.device).is_capturing():
            raise UnsupportedModule("cp_context was made outside the capture, so each replay would split the same batch: give "
                                    "the block cu_seqlens and token_offsets, and call context_parallel in its forward.")
        return self.once(("chunks", tokens, chunk_size), lambda: prepare_chunk_indices(self.cu_seqlens, tokens, chunk_size))

    def once(self, key: tuple, make: Callable[[], Any]) -> Any:
        """What `make` returns, made at the first call with this key, for all layers of a step."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def all_gather(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """`x [...]` of every rank, `[world, ...]`; see `graphlin.parallel.exchange`."""
        return all_gather(self.group, name, x)

    def at_start(self, states: torch.Tensor) -> torch.Tensor:
        """`states [N, ...]`, 0 for sequences whose first token lies on another rank."""
        return _where_sequences(self.starts_here, states)

    def at_end(self, states: torch.Tensor) -> torch.Tensor:
        """`states [N, ...]`, 0 for sequences whose last token lies on another rank."""
        return _where_sequences(self.ends_here, states)

    @cached_property
    def came_in(self) -> torch.Tensor:
        """Bool `[N]`: the sequence over this rank's first edge."""
        return self._is_number(self.crossing[self.rank])

    @cached_property
    def goes_out(self) -> torch.Tensor:
        """Bool `[N]`: the sequence over this rank's last edge."""
        return self._is_number(self.crossing[self.rank + 1])

    def _is_number(self, number: torch.Tensor) -> torch.Tensor:
        return torch.arange(self.num_seqs, device=number.device) == number


def _where_sequences(which: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    return torch.where(which.view(-1, *[1] * (states.dim() - 1)), states, 0)


def split(cls: type, group: dist.ProcessGroup, rank: int, cu_seqlens: torch.Tensor, token_offsets: torch.Tensor) -> Split:
    """The view that a rank of the group has of a batch, as an object of `cls`; small operations on the device alone."""
    world = token_offsets.shape[0] - 1
    # Copies, since the backward reads offsets too, and the caller may by then have written the next batch's.
    cu, offsets = cu_seqlens.long(), token_offsets.to(torch.int64, copy=True)
    inner = offsets[1:-1]
    starts, ends = cu[:-1], cu[1:]
    N = starts.shape[0]
    first_rank = _count_at_most(inner, starts)
    last_rank = _count_at_most(inner, torch.maximum(ends - 1, starts))
    # The first sequence that ends after an edge crosses it if it starts before.
    after = _count_at_most(ends, inner)
    at = after.clamp(max=N - 1)
    crosses = (after < N) & (starts[at] < inner)
    none = cu.new_zeros(1)
    crossing, first_token, begins, ends_on = (
        torch.cat([outer, torch.where(crosses, each, outer), outer])
        for outer, each in ((none + N, after), (none, starts[at]), (none, first_rank[at]), (none, last_rank[at])))
    first, last = offsets[rank], offsets[rank + 1]
    local = torch.minimum(torch.maximum(cu, first), last) - first
    here = torch.arange(world + 1, device=cu.device)
    earlier = torch.where(crossing < N, here - begins, 0)[rank]
    later = torch.where(crossing < N, ends_on - here + 1, 0)[rank + 1]
    return cls(group, rank, world, local.to(cu_seqlens.dtype), offsets, first_rank == rank, last_rank == rank, crossing.int(),
               first_token, begins, ends_on, earlier.int(), later.int(), get_backend(cu.device).is_capturing())


def _count_at_most(sorted_values: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
    """How many of the values are at most each bound."""
    return (sorted_values[:, None] <= bounds[None, :]).sum(0)
