"""What the Gated DeltaNet launchers pass among themselves."""

from dataclasses import dataclass
from typing import NamedTuple

import torch


@dataclass(frozen=True)
class Prologue:
    """What the kernels do to q, k, g and beta first. beta_range 0: beta as given, else `beta_range * sigmoid(beta)`."""

    l2norm: bool
    A_log: torch.Tensor | None
    dt_bias: torch.Tensor | None
    beta_range: float

    @property
    def constexprs(self) -> dict:
        return dict(L2=self.l2norm, GATE=self.A_log is not None, BIAS=self.dt_bias is not None, BETA=self.beta_range)


class Workspace(NamedTuple):
    """What the prep kernel hands on, indexed by chunk slot."""

    A: torch.Tensor
    P: torch.Tensor
    G: torch.Tensor
    b: torch.Tensor
    rq: torch.Tensor
    rk: torch.Tensor
