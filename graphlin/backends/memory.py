"""What backends share to let several graphs of one pool write the same memory."""

from collections import Counter
from collections.abc import Sequence

import torch


def without_ownership(tensors: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Tensors on the same memory that do not keep it; those whose memory anything else holds too are left as they are."""
    given = [t for t in tensors if t is not None]
    bases = {id(t._base): t._base for t in given if t._base is not None}      # a gradient may be a view of an unseen sum
    known = Counter(map(_storage, ({id(t): t for t in given} | bases).values()))
    return [t if t is None or _owners(t) > known[_storage(t)] else alias(t) for t in tensors]


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _owners(tensor: torch.Tensor) -> int:
    """Tensors that share the storage: the count without the object that is asked through."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) - 1


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor on the same memory, made around its address, and read with the same sign."""
    storage = tensor.untyped_storage()
    memory = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), storage.device, storage.nbytes())
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    made = empty.set_(memory, tensor.storage_offset(), tensor.shape, tensor.stride())
    made = made.conj() if tensor.is_conj() else made
    return torch._neg_view(made) if tensor.is_neg() else made
