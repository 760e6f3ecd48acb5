"""What the ranks of a process group decide together, so that none waits in a collective that another never reaches."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from graphlin.errors import ExchangeFailed, RanksDiffer


def check_group(group: object) -> None:
    """Raises TypeError unless group is a process group that this rank is in."""
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group: expected a torch.distributed process group that this rank is in, found {group!r}")


def backends_of(group: dist.ProcessGroup) -> dict[str, str]:
    """What exchanges the tensors of each type of device: cpu -> gloo, cuda -> nccl, …"""
    return dict(each.split(":") for each in dist.get_backend_config(group).split(","))


def host_device(group: dist.ProcessGroup, device: torch.device) -> torch.device:
    """Where tensors lie that ranks exchange for the host: on the CPU if the group has a backend for it, else on `device`."""
    return torch.device("cpu") if "cpu" in backends_of(group) else device


def gather_ranks(group: dist.ProcessGroup, name: str, x: torch.Tensor) -> torch.Tensor:
    """`x [...]` of every rank, `[world, ...]`; raises ExchangeFailed, which says what it is by name."""
    found = x.new_empty(dist.get_world_size(group), *x.shape)
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # the former from PyTorch 2.13 on
    try:
        gather(found.view(-1), x.contiguous().view(-1), group=group)
    except RuntimeError as error:
        raise ExchangeFailed(f"rank {dist.get_rank(group)} of {dist.get_world_size(group)} could not exchange {name}: another "
                             "rank failed, or did not take part in time. All ranks must make the same calls in the same order. "
                             f"{error}") from error
    return found


def check_agreement(group: dist.ProcessGroup, device: torch.device, answers: Sequence[int]) -> None:
    """Raises RanksDiffer, on every rank, unless all ranks give the same answers, none of them 0, and ExchangeFailed where
    another stays away; waits for the device if the group has no backend for the CPU."""
    mine = torch.tensor(answers, dtype=torch.int64).to(host_device(group, device))
    rows = gather_ranks(group, "whether to capture", mine).tolist()
    if 0 in rows[0] or any(row != rows[0] for row in rows):
        raise RanksDiffer(f"not every rank can capture this call now (of ranks 0 to {len(rows) - 1}, pairs to capture: "
                          f"{', '.join(str(min(row)) for row in rows)}), so all run it eagerly; the next call of its mode is "
                          "tried again")
