"""What calls of a captured block are told apart by, and the graphs of each kind."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import NamedTuple

import torch
from torch import nn

from graphlin.packing import Layout, Role, Structure
from graphlin.rehearsal import Specimen
from graphlin.replay import Pair
from graphlin.slots import Slot
from graphlin.tier import Tier

INTEGERS = {torch.int32: torch.int64, torch.int64: torch.int32}


class Key(NamedTuple):
    """Calls of one key replay the same graphs, at any sizes.

    `leaves` is dtype, device index and requires_grad of every tensor, `training` the flag of every module of the block,
    `trainable` requires_grad of every parameter (None without grad mode), `autocast` its dtype (None where it is off).
    """

    structure: Structure
    leaves: tuple[tuple[torch.dtype, int, bool], ...]
    grad: bool
    training: tuple[bool, ...]
    trainable: tuple[bool, ...] | None
    autocast: torch.dtype | None

    def with_other_integer(self, index: int) -> "Key | None":
        """The key of the same call with int32 in place of int64 in one tensor, or the reverse."""
        dtype, *rest = self.leaves[index]
        if dtype not in INTEGERS:
            return None
        leaves = list(self.leaves)
        leaves[index] = INTEGERS[dtype], *rest
        return self._replace(leaves=tuple(leaves))


@dataclass(eq=False)
class Mode:
    """What one key stands for: the layout of its calls, the tiers they are captured in, largest first, and for each slot that
    has them the captured pairs in that order. Once it is captured, `output_roles` are the varying dims of outputs, and
    `returns_integers` says whether one of them is int32 or int64."""

    layout: Layout
    structure: Structure
    tiers: tuple[Tier, ...]
    needs_grad: bool
    grad_leaves: tuple[int, ...]
    grad_params: tuple[nn.Parameter, ...]
    specimen: Specimen
    pairs: dict[Slot, tuple[Pair, ...]] = field(default_factory=dict)
    output_roles: list[tuple[Role, ...]] | None = None
    returns_integers: bool = False

    def fit(self, tokens: int, seqs: int) -> int | None:
        """The rung of the smallest tier that an input of these sizes fits; 0 is the largest tier."""
        for rung, most_tokens, most_seqs in self._bounds:
            if tokens <= most_tokens and seqs <= most_seqs:
                return rung
        return None

    @cached_property
    def _bounds(self) -> list[tuple[int, int, int]]:
        """Of each tier, the smallest first."""
        return [(rung, tier.tokens, tier.seqs) for rung, tier in enumerate(self.tiers)][::-1]

    def takes_any_integer_lengths(self) -> bool:
        """Whether the graphs may read cu_seqlens of the other integer dtype: copy-in converts it, and no output tells."""
        return not self.returns_integers

    def drop(self, slots: Sequence[Slot]) -> None:
        for slot in slots:
            for pair in self.pairs.pop(slot, ()):
                pair.reset()


class Call(NamedTuple):
    """One call, matched with its mode and a tier of that: `rung` counts them from the largest."""

    key: Key
    mode: Mode
    rung: int
    leaves: list[torch.Tensor]
    sizes: tuple[int, int]
    batch: tuple[int, int] | None

    @property
    def tier(self) -> Tier:
        return self.mode.tiers[self.rung]


new_call = partial(tuple.__new__, Call)  # of a tuple of its fields, in a third of the time
