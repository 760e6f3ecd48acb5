"""The delta rules' states where a sequence runs on over ranks: handed on forward, and their gradients handed back.

Every rank summarises its part as an affine map (`graphlin.kernels.delta_maps`); after one all-gather each rank applies the
maps of the ranks between the start of its first sequence and itself, in their order, or backward those from the end of its last
sequence down to itself. The maps' shape depends on heads and head sizes alone, not on how many tokens a rank holds.
"""

import torch

from graphlin.kernels.delta_maps import run_gradient_map, run_state_map
from graphlin.kernels.delta_problem import Operands
from graphlin.kernels.packing import Packing
from graphlin.parallel.split import Split


def receive_state(cp: Split, operands: Operands, v: torch.Tensor, h0: torch.Tensor | None, v_first: bool,
                   packing: Packing) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The state that comes in over this rank's first edge, transposed, `[HV, V, K]` float32, and all ranks' maps
    `[world, HV, V (+ K), K]`; None for the first of a group, and for a group of one.

    h0 is the caller's. The transition is wanted only of ranks that have one before and one after them.
    """
    if cp.world == 1:
        return None, None
    V = v.shape[3]
    maps = cp.all_gather(_named("states", operands), run_state_map(operands, v, h0, cp.world > 2, v_first, cp.edges, packing))
    state = maps[0, :, :V] if cp.rank else None
    for j in range(1, cp.rank):
        state = torch.where(cp.first_rank[cp.rank] == j, maps[j, :, :V], _apply(state, maps[j, :, V:], maps[j, :, :V]))
    return state, maps


def receive_gradient(cp: Split, operands: Operands, do: torch.Tensor, dht: torch.Tensor | None,
                     maps: torch.Tensor | None, v_first: bool, packing: Packing) -> torch.Tensor | None:
    """The gradient of the state that goes out over this rank's last edge, as `receive_state` has the one that comes in."""
    if cp.world == 1:
        return None
    V = do.shape[3]
    grads = cp.all_gather(_named("states' gradients", operands), run_gradient_map(operands, do, dht, v_first, cp.edges, packing))
    last = cp.world - 1
    grad = grads[last] if cp.rank < last else None
    for j in range(last - 1, cp.rank, -1):
        grad = torch.where(cp.last_rank[cp.rank + 1] == j, grads[j], _apply(grad, maps[j, :, V:].mT, grads[j]))
    return grad


def _named(what: str, operands: Operands) -> str:
    """Ranks that call different delta rules exchange different things, of one shape."""
    return f"{what} of {'channel' if operands.per_channel else 'head'} decays"


def _apply(state: torch.Tensor, transition: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    """`S M + B` in float32, whatever the precision of products around it."""
    with torch.autocast(state.device.type, enabled=False):
        return torch.baddbmm(offset, state, transition)


def with_carried(states: torch.Tensor | None, carried: torch.Tensor | None, which: torch.Tensor,
                 v_first: bool) -> torch.Tensor | None:
    """States `[N, HV, K, V]` (`[N, HV, V, K]` with v_first; None: zeros), with the carried one where `which [N]` says so."""
    if carried is None:
        return states
    carried = carried if v_first else carried.mT
    own = carried.new_zeros(()) if states is None else states.float()
    return torch.where(which[:, None, None, None], carried, own).contiguous()
