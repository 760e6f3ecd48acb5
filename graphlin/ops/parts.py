"""What an op asks of a `cp_context`: how a packed batch is split over ranks, and what crosses from one to the next."""

from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import torch

from graphlin.kernels.delta_problem import Operands
from graphlin.kernels.packing import Packing


@runtime_checkable
class Parts(Protocol):
    """The sequences' parts on this rank; `graphlin.parallel.ContextParallel` is one.

    The caller's initial states `[N, ...]` are those of whole sequences; so are final states, and both kinds' gradients, of which
    a rank has those of sequences that end, or start, on it: `at_end` and `at_start` zero the others.
    """

    cu_seqlens: torch.Tensor

    def chunk_indices(self, tokens: int, chunk_size: int) -> torch.Tensor:
        """The chunk table of `cu_seqlens`."""

    def at_start(self, states: torch.Tensor) -> torch.Tensor:
        """`states [N, ...]`, 0 for sequences whose first token lies on another rank."""

    def at_end(self, states: torch.Tensor) -> torch.Tensor:
        """`states [N, ...]`, 0 for sequences whose last token lies on another rank."""

    def carry_states(self, operands: Operands, v: torch.Tensor, h0: torch.Tensor | None, v_first: bool,
                     packing: Packing) -> tuple[torch.Tensor | None, ...]:
        """Sends the state in which the last part here ends. Returns what the methods below and the backward need of it."""

    def states_in(self, h0: torch.Tensor | None, carried: tuple, v_first: bool) -> torch.Tensor | None:
        """The states `[N, ...]` from which the parts here start: the caller's, and what came in."""

    def gradients_out(self, operands: Operands, do: torch.Tensor, dht: torch.Tensor | None, carried: tuple, v_first: bool,
                      packing: Packing) -> torch.Tensor | None:
        """Sends back the gradient of the state that came in. Returns those `[N, ...]` of the states in which the parts end."""

    def rows_in(self, x: torch.Tensor, width: int, initial_state: torch.Tensor | None) -> torch.Tensor | None:
        """Sends the last rows of x here. Returns the convolution's states `[N, D, width]` from which the parts start."""

    def rows_out(self, dx: torch.Tensor, dstate: torch.Tensor | None, width: int) -> torch.Tensor | None:
        """Sends back the gradient of the rows that came in, and adds to dx what came back; returns the initial states'."""


def check_parts(cp_context: Any, cu_seqlens: torch.Tensor | None, chunk_indices: torch.Tensor | None) -> None:
    """Raises TypeError or ValueError where cp_context is no context, or comes with other sequences."""
    if not isinstance(cp_context, Parts):
        raise TypeError("cp_context: expected what graphlin.parallel.context_parallel returns, found "
                        f"{type(cp_context).__name__}")
    for name, given in (("cu_seqlens", cu_seqlens), ("chunk_indices", chunk_indices)):
        if given is not None:
            raise ValueError(f"{name}: expected None with cp_context, which knows this rank's sequences, found a tensor; pass "
                             "the whole batch's cu_seqlens to context_parallel")


def resolve_parts(cp_context: Any, cu_seqlens: torch.Tensor | None, chunk_indices: torch.Tensor | None, tokens: int,
                  chunk_size: int, graph_capture: bool | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """cu_seqlens and chunk_indices of a call: its own, or those of the context; an exact table is left to be read."""
    if cp_context is None:
        return cu_seqlens, chunk_indices
    check_parts(cp_context, cu_seqlens, chunk_indices)
    table = None if graph_capture is False else cp_context.chunk_indices(tokens, chunk_size)
    return cp_context.cu_seqlens, table


def with_a_row(parts: Parts | None, packing: Packing, *tensors: torch.Tensor | None) -> tuple:
    """The packing and token tensors `[1, T, ...]`, of one inactive row where parts of a batch have none here: a rank without
    tokens exchanges what the others do."""
    if parts is None or packing.T > 0:
        return packing, *tensors
    rows = [x if x is None else torch.cat([x, x.new_zeros(x.shape[0], 1, *x.shape[2:])], 1) for x in tensors]
    table = parts.chunk_indices(1, packing.BT)
    return replace(packing, T=1, chunks=table, NT=table.shape[0], capture=True), *rows
