"""The short convolution where a sequence runs on over ranks: the last rows before an edge, and their gradients.

A rank reads the W rows before its first one, of which the convolution weighs W - 1 and the final state of a short part holds
all. They may lie on several ranks. So every rank sends its last W rows, and picks those that it needs from all by their place in
the whole batch; what lies before the sequence's start is its initial state, which every rank has.
"""

import torch

from graphlin.parallel.split import Split


def _window(cp: Split, rank: torch.Tensor | int, width: int) -> torch.Tensor:
    """The place in the whole batch of the first of the rows that a rank sends: its last `width` ones, or the first of fewer."""
    return torch.maximum(cp.offsets[1:][rank] - width, cp.offsets[:-1][rank])


def _own_window(cp: Split, tokens: int, width: int) -> torch.Tensor:
    """Rows `[width]` of this rank's tensors that it sends."""
    return (_window(cp, cp.rank, width) - cp.offsets[cp.rank] + _slots(cp, width)).clamp(max=tokens - 1)


def _slots(cp: Split, width: int) -> torch.Tensor:
    return torch.arange(width, device=cp.offsets.device)


def receive_rows(cp: Split, x: torch.Tensor, width: int, initial_state: torch.Tensor | None) -> torch.Tensor | None:
    """The states `[N, D, width]` in which sequences come to this rank's part of them, float32 where one may have come in."""
    if cp.world == 1:
        return initial_state
    rows = cp.all_gather("rows of a convolution", x[0].index_select(0, _own_window(cp, x.shape[1], width)))
    if cp.rank == 0:
        return initial_state
    place = cp.offsets[cp.rank] - width + _slots(cp, width)                 # of each slot's row in the whole batch
    holder = (cp.offsets[1:-1, None] <= place[None, :]).sum(0)
    index = (holder * width + place - _window(cp, holder, width)).clamp(0, cp.world * width - 1)
    state = rows.flatten(0, 1).index_select(0, index).float().t()           # [D, width]
    before = place - cp.first_token[cp.rank]                                # the sequence's first token, if negative
    own = state.new_zeros(()) if initial_state is None else initial_state.float()
    first = own if initial_state is None else _sequence(cp, own, cp.rank).index_select(1, (before + width).clamp(0, width - 1))
    return torch.where(cp.came_in[:, None, None], torch.where(before >= 0, state, first), own).contiguous()


def _sequence(cp: Split, states: torch.Tensor, edge: int) -> torch.Tensor:
    """The entry `[D, width]` of states `[N, D, width]` of the sequence over an edge; any one where there is none."""
    return states.index_select(0, cp.crossing[edge:edge + 1].clamp(max=cp.num_seqs - 1))[0]


def send_back_rows(cp: Split, dx: torch.Tensor, dstate: torch.Tensor | None, width: int) -> torch.Tensor | None:
    """Adds to dx `[1, T, D]`, in place, what later ranks read of this rank's rows.

    dstate: gradients `[N, D, width]` of the states of `receive_rows`; None on a rank that had none. Returns those of the caller's
    initial states, of which a later rank too may read the slots.
    """
    own = cp.rank
    if cp.world == 1:
        return dstate
    came_in = dx.new_zeros(dx.shape[2], width, dtype=torch.float32)
    if own > 0:
        came_in = torch.where(cp.crossing[own] < cp.num_seqs, _sequence(cp, dstate, own).float(), came_in)
    grads = cp.all_gather("gradients of a convolution's rows", came_in)
    slots = _slots(cp, width)
    place = _window(cp, own, width) + slots
    to_rows = to_initial = torch.zeros_like(came_in)
    for r in range(own + 1, cp.world):
        crosses, origin = cp.crossing[r] < cp.num_seqs, cp.offsets[r] - width
        is_own = crosses & (place >= cp.first_token[r]) & (place < cp.offsets[own + 1])
        to_rows = to_rows + _picked(grads[r], place - origin, is_own)
        starts_here = crosses & (cp.first_rank[r] == own)
        to_initial = to_initial + _picked(grads[r], slots - width + cp.first_token[r] - origin, starts_here)
    rows = _own_window(cp, dx.shape[1], width)[:dx.shape[1]]     # distinct, since no more are taken than there are
    patched = dx[0].index_select(0, rows) + to_rows.t()[:dx.shape[1]]
    dx[0].index_copy_(0, rows, patched.to(dx.dtype))
    if dstate is None:
        return None
    return cp.at_start(dstate) + torch.where(cp.goes_out[:, None, None], to_initial, 0)


def _picked(grads: torch.Tensor, slots: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Columns `slots` of grads `[D, width]` where they exist and are wanted, else 0."""
    width = grads.shape[1]
    exists = (slots >= 0) & (slots < width) & wanted
    return torch.where(exists, grads.index_select(1, slots.clamp(0, width - 1)), 0)
