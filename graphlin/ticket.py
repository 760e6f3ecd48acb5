"""What a call was matched with, so that the next one like it is matched in fewer steps."""

from collections.abc import Mapping, Sequence
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch._C._dynamo.guards import TensorGuards

from graphlin.modes import Call, new_call
from graphlin.packing import PLAIN, Signature
from graphlin.watch import Watch

_training, _requires_grad = itemgetter("training"), attrgetter("requires_grad")


def form_of(args: tuple, kwargs: Mapping[str, Any]) -> tuple:
    """What tells the calls apart that a ticket may be for."""
    return torch.is_grad_enabled(), len(args), *kwargs


class Ticket:
    """The mode that a captured call was matched with. It admits calls of the same form whose key is the same, at any sizes.

    PyTorch's guards tell in one step whether tensors have the types, dtypes, devices, requires_grad, fixed sizes and dispatch
    keys that the call's had. They are narrower than a key is, and so is the ticket: what it does not admit may still be of the
    mode.

    >>> ticket = Ticket.of(call, signature, args, kwargs)
    >>> again = ticket.admit(args, kwargs, watch, None)
    """

    def __init__(self, call: Call, order: list[int], constants: list[tuple[int, Any]]) -> None:
        self._key, self._mode = call.key, call.mode
        self._order = order if constants or order != sorted(order) else None  # None: what is given are the tensors, in order
        self._constants = constants
        layout = call.mode.layout
        varying = [None if leaf.role is None else leaf.role.dim for leaf in layout.leaves]
        self._guards = TensorGuards(
            *call.leaves, dynamic_dims_sizes=[[None if i == dim else size for i, size in enumerate(t.shape)]
                                              for t, dim in zip(call.leaves, varying, strict=True)],
            dynamic_dims_strides=[[None] * t.dim() for t in call.leaves])
        self._tokens, self._seqs = layout.places
        self._others = [(i, leaf.role) for i, leaf in enumerate(layout.leaves)
                        if leaf.role is not None and i not in (layout.tokens, layout.seqs)]

    @staticmethod
    def of(call: Call, signature: Signature, args: tuple, kwargs: Mapping[str, Any]) -> "Ticket | None":
        """None where tensors are not all given as arguments of their own, or where other values may change unseen."""
        structure = call.mode.structure
        if call.batch is not None or any(entry is not torch.Tensor and entry[0] not in PLAIN for entry in structure):
            return None
        if any(t.layout is not torch.strided for t in call.leaves):
            return None
        names = [*signature.names[:len(args)], *kwargs]
        given = dict(zip(names, (*args, *kwargs.values()), strict=True))
        taken = [name for name, entry in zip(signature.names, structure, strict=True) if entry is torch.Tensor]
        if any(name not in given for name in taken) or (signature.builds_table and "chunk_indices" in given):
            return None
        constants = [(i, given[name]) for i, name in enumerate(names) if name not in taken]
        return Ticket(call, [names.index(name) for name in taken], constants)

    def admit(self, args: tuple, kwargs: Mapping[str, Any], watch: Watch, autocast: torch.dtype | None) -> Call | None:
        """The call, matched and with its tier, if it is of the ticket's mode and fits; the block may yet be stale."""
        leaves = given = [*args, *kwargs.values()]
        for i, constant in self._constants:
            if given[i] is not constant:
                return None
        if self._order is not None:
            leaves = [given[i] for i in self._order]
        _, _, _, training, trainable, cast = self._key
        if not (self._guards.check(*leaves) and cast is autocast and tuple(map(_training, watch.attributes)) == training
                and (trainable is None or tuple(map(_requires_grad, watch.params)) == trainable)):
            return None
        sizes = tokens, seqs = _count(leaves, self._tokens), _count(leaves, self._seqs)
        for i, role in self._others:
            if leaves[i].shape[role.dim] != role.size(tokens, seqs):
                return None
        rung = None if seqs < 0 else self._mode.fit(tokens, seqs)
        return None if rung is None else new_call((self._key, self._mode, rung, leaves, sizes, None))


def _count(leaves: Sequence[torch.Tensor], place: tuple[int, int, int] | None) -> int:
    if place is None:
        return 0
    i, dim, extra = place
    return leaves[i].shape[dim] - extra
