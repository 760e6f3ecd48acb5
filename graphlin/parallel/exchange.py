"""What the ranks of a process group tell each other: one all-gather, and whether they mean the same by it."""

from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from graphlin.agreement import backends_of, gather_ranks, host_device
from graphlin.backends import get_backend
from graphlin.errors import UnsupportedModule

CAPTURABLE = ("nccl", "hccl")   # whose collectives are work on the device, which a graph can hold
_MESSAGE_BYTES = 128

_agreed: WeakKeyDictionary = WeakKeyDictionary()   # process group -> what its ranks have agreed to exchange


def backend_of(group: dist.ProcessGroup, device: torch.device) -> str:
    """The name of the group's backend for tensors of a device: gloo, nccl, hccl, …; raises ValueError where it has none."""
    backends = backends_of(group)
    if device.type not in backends:
        raise ValueError(f"group: expected a process group with a backend for tensors on {device.type}, found one for "
                         f"{dist.get_backend_config(group)}")
    return backends[device.type]


def all_gather(group: dist.ProcessGroup, name: str, x: torch.Tensor) -> torch.Tensor:
    """`x [...]` of every rank, `[world, ...]`; all ranks must call it alike.

    Before ranks exchange something of a name, shape and dtype for the first time, or each time over gloo, they compare these.

    Raises:
        ValueError: on every rank, where ranks differ in what they exchange; the group has no backend for the device.
        ExchangeFailed: the exchange broke off, or another rank did not take part within the group's timeout.
        UnsupportedModule: inside a capture, over a backend whose collectives run on the host.
    """
    if x.untyped_storage().device.type == "meta":
        return x.new_empty(dist.get_world_size(group), *x.shape)
    backend = backend_of(group, x.device)
    if get_backend(x.device).is_capturing():
        if backend not in CAPTURABLE:
            raise UnsupportedModule(f"{name} is exchanged over {backend}, whose collectives run on the host, which a graph can't "
                                    f"hold: use a group of {' or '.join(CAPTURABLE)}, or call the block eagerly.")
    else:
        _agree(group, f"{name} {list(x.shape)} {x.dtype}", host_device(group, x.device), always=backend == "gloo")
    return gather_ranks(group, name, x)


def _agree(group: dist.ProcessGroup, message: str, device: torch.device, always: bool) -> None:
    """Raises ValueError, on every rank, unless all ranks bring the same message; skipped where they have done so before."""
    known = _agreed.setdefault(group, set())
    if message in known and not always:
        return
    text = message.encode()[:_MESSAGE_BYTES]
    mine = torch.tensor(list(text.ljust(_MESSAGE_BYTES)), dtype=torch.uint8).to(device)
    found = [bytes(row).decode(errors="replace").strip() for row in gather_ranks(group, message, mine).tolist()]
    if len(set(found)) > 1:
        told = "; ".join(f"rank {rank}: {each}" for rank, each in enumerate(found))
        raise ValueError(f"cp_context: expected all ranks to exchange tensors of one shape and dtype, found {told}; heads, head "
                         "sizes, widths and dtypes must be the same on every rank")
    known.add(message)
