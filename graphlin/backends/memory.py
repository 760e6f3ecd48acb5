"""What backends share to let several graphs of one pool write the same memory."""

from collections import Counter
from collections.abc import Sequence

import torch


def without_ownership(tensors: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Tensors on the same memory that do not keep it; those whose memory anything else holds too are left as they are."""
    views = Counter(_storage(t) for t in tensors if t is not None)
    return [t if t is None or _owners(t) > views[_storage(t)] else alias(t) for t in tensors]


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _use_count(tensor: torch.Tensor) -> int:
    """References to the storage, those of the object that is asked through among them: one or two, by PyTorch's version."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata)


_ALONE = _use_count(torch.empty(1))


def _owners(tensor: torch.Tensor) -> int:
    """Tensors that share the storage."""
    return 1 + _use_count(tensor) - _ALONE


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor on the same memory, made around its address."""
    storage = tensor.untyped_storage()
    memory = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), storage.device, storage.nbytes())
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty.set_(memory, tensor.storage_offset(), tensor.shape, tensor.stride())
