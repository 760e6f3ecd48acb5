"""The context of one rank, which the ops and layers take as `cp_context=`."""

import torch
import torch.distributed as dist

from graphlin.agreement import check_group
from graphlin.kernels.delta_problem import Operands
from graphlin.kernels.packing import Packing
from graphlin.ops.validation import check_tensor, read_values
from graphlin.parallel.rows import receive_rows, send_back_rows
from graphlin.parallel.split import Split, split
from graphlin.parallel.states import receive_gradient, receive_state, with_carried

INTEGERS = (torch.int32, torch.int64)


class ContextParallel(Split):
    """A `Split`, and what crosses its edges: the `graphlin.ops.parts.Parts` that ops ask for."""

    def carry_states(self, operands: Operands, v: torch.Tensor, h0: torch.Tensor | None, v_first: bool,
                     packing: Packing) -> tuple[torch.Tensor | None, ...]:
        return receive_state(self, operands, v, h0, v_first, packing)

    def states_in(self, h0: torch.Tensor | None, carried: tuple, v_first: bool) -> torch.Tensor | None:
        return with_carried(h0, carried[0], self.came_in, v_first)

    def gradients_out(self, operands: Operands, do: torch.Tensor, dht: torch.Tensor | None, carried: tuple, v_first: bool,
                      packing: Packing) -> torch.Tensor | None:
        grad = receive_gradient(self, operands, do, dht, carried[1], v_first, packing)
        return with_carried(dht, grad, self.goes_out, v_first)

    def rows_in(self, x: torch.Tensor, width: int, initial_state: torch.Tensor | None) -> torch.Tensor | None:
        return receive_rows(self, x, width, initial_state)

    def rows_out(self, dx: torch.Tensor, dstate: torch.Tensor | None, width: int) -> torch.Tensor | None:
        return send_back_rows(self, dx, dstate, width)


def context_parallel(group: dist.ProcessGroup | None, cu_seqlens_global: torch.Tensor, token_offsets: torch.Tensor,
                     validate: bool = False) -> ContextParallel:
    """Splits a packed batch over the ranks of a group, on the device and without a host sync.

    Every rank calls it with the same values, for each step anew, inside the captured block if there is one. The ops and layers
    that get what it returns as `cp_context=` work on the rank's own tokens, and exchange what sequences carry from rank to rank.

    Args:
        group: the process group; None: the default one. Over nccl or hccl the exchange can be captured.
        cu_seqlens_global: `[N + 1]` int32 or int64, cumulative lengths of the whole batch's sequences.
        token_offsets: `[world + 1]` int32 or int64 on the same device: rank r holds the tokens from token_offsets[r] up to
            token_offsets[r + 1], in the first rows of its tensors `[1, T, ...]`; T may differ from rank to rank, and be 0. It
            starts at 0 and ends at or after cu_seqlens_global[-1].
        validate: check the values of both (a host sync; refused inside a capture). Default: False.

    Returns:
        a `ContextParallel` whose tensors are like cu_seqlens_global on its device.

    Raises:
        TypeError, ValueError: naming the argument, the expected and the found value; no process group.
        BackendUnavailable: no backend for the device.
        HostSync: validate inside a capture.

    >>> cp = context_parallel(None, torch.tensor([0, 300, 1000], device="cuda"), torch.tensor([0, 512, 1024], device="cuda"))
    >>> o, _ = chunk_gated_delta_rule(q, k, v, g, beta, cp_context=cp)
    """
    if not dist.is_initialized():
        raise ValueError("group: expected a process group, found none; call torch.distributed.init_process_group first")
    group = dist.group.WORLD if group is None else group
    check_group(group)
    check_tensor("cu_seqlens_global", cu_seqlens_global, shape=("N + 1",), dtypes=INTEGERS)
    if cu_seqlens_global.shape[0] < 2:
        raise ValueError("cu_seqlens_global: expected at least 2 entries (one sequence), found "
                         f"{cu_seqlens_global.shape[0]}")
    check_tensor("token_offsets", token_offsets, shape=(dist.get_world_size(group) + 1,), dtypes=INTEGERS, like=cu_seqlens_global)
    if validate:
        _check_values(cu_seqlens_global, token_offsets)
    return split(ContextParallel, group, dist.get_rank(group), cu_seqlens_global, token_offsets)


def _check_values(cu_seqlens: torch.Tensor, token_offsets: torch.Tensor) -> None:
    last = []
    for name, x in (("cu_seqlens_global", cu_seqlens), ("token_offsets", token_offsets)):
        values = read_values(name, x, "validate=True")
        last.append(values[-1])
        if values[0] != 0:
            raise ValueError(f"{name}: expected to start at 0, found {values[0]}")
        for i, (a, b) in enumerate(zip(values, values[1:], strict=False)):
            if b < a:
                raise ValueError(f"{name}: expected values that never decrease, found {a} then {b} at index {i + 1}")
    tokens, held = last
    if tokens > held:
        raise ValueError(f"token_offsets: expected to end at or after the last token, {tokens}, found {held}")
