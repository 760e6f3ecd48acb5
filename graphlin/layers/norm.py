"""Gated RMS normalisation, computed in float32 whatever the module's dtype."""

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F


class GatedRMSNorm(nn.Module):
    """`rms_norm(x) * weight * activation(gate)` over the last dimension; without a gate plain RMS normalisation.

    Shapes: x and gate `[..., size]`, weight `[size]`; the result has x's shape and dtype. Formula: Zhang and Sennrich,
    arXiv 1910.07467, with the output gate of Gated DeltaNet (silu, arXiv 2412.06464) or Kimi Linear (sigmoid,
    arXiv 2510.26692).

    >>> norm = GatedRMSNorm(64)
    >>> y = norm(x, gate)
    """

    def __init__(self, size: int, eps: float = 1e-5,
                 activation: Callable[[torch.Tensor], torch.Tensor] = F.silu) -> None:
        super().__init__()
        self.eps = eps
        self.activation = activation
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        y = F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps)
        if gate is not None:
            y = y * self.activation(gate.float())
        return y.to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.weight.numel()}, eps={self.eps}, {self.activation.__name__}"
