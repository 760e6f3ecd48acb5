"""What the launchers of the delta rules pass among themselves."""

from dataclasses import dataclass
from typing import NamedTuple

import torch


@dataclass(frozen=True)
class Prologue:
    """What the kernels do to q, k, g and beta first. beta_range 0: beta as given, else `beta_range * sigmoid(beta)`.

    gate: 0 or one of those in `gates`. lower_bound: of the gate BOUNDED, which alone may do without A_log. safe_gate: log decays
    are promised to be at least lower_bound, or -5 without one. needs_grad: what only a backward reads is to be kept.
    """

    l2norm: bool
    gate: int
    A_log: torch.Tensor | None
    dt_bias: torch.Tensor | None
    beta_range: float
    lower_bound: float | None = None
    safe_gate: bool = False
    needs_grad: bool = False

    @property
    def lowest(self) -> float:
        """The least log decay of a bounded gate, or that a promise allows."""
        return -5.0 if self.lower_bound is None else self.lower_bound

    @property
    def constexprs(self) -> dict:
        return dict(L2=self.l2norm, GATE=self.gate, BIAS=self.dt_bias is not None, BETA=self.beta_range)


class Operands(NamedTuple):
    """What the recurrences read beside v; A to c are made by the prep kernel and indexed by chunk slot.

    One decay a head: q, k are the op's own, kw is None, G `[NS, HV, BT]` holds chunk sums of log decays, and scales
    `[NS, HV, 3, BT]` scale the rows of what is read with k, written and output. One decay a channel: the prep kernel decays q,
    k and the written keys kw `[B, T, HV, K]`, nothing scales rows, and G `[NS, HV, K]` is the decay of whole chunks. All
    decays are logarithms to the base 2. The gradients read b (write strength), rq, rk (inverse norms) and c `[NS, HV, BT, K]`,
    sums over blocks of 16 rows, too; c is there only where a backward comes.
    """

    q: torch.Tensor
    k: torch.Tensor
    kw: torch.Tensor | None
    A: torch.Tensor
    P: torch.Tensor
    G: torch.Tensor
    scales: torch.Tensor | None
    b: torch.Tensor
    rq: torch.Tensor
    rk: torch.Tensor
    c: torch.Tensor | None

    @property
    def recurrence(self) -> tuple[torch.Tensor | None, ...]:
        """q to scales, what the serial kernels read."""
        return self[:7]

    @property
    def per_channel(self) -> bool:
        return self.kw is not None
