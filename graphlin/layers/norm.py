"""Gated RMS normalisation, computed in float32 whatever the module's dtype."""

import torch
from torch import nn

from graphlin.kernels.norm import MAX_SIZE
from graphlin.ops.gated_rms_norm import check_options, gated_rms_norm


class GatedRMSNorm(nn.Module):
    """`rms_norm(x) * weight * activation(gate)` over the last dimension; without a gate plain RMS normalisation.

    Shapes: x and gate `[..., size]`, weight `[size]`; the result has x's shape and dtype. It is `graphlin.gated_rms_norm`,
    one launch, which takes what that takes.

    Args:
        size: width of the last dimension, from 1 to 4096.
        eps: added to the mean square; positive. Default: 1e-5.
        activation: "silu", "swish" (the same) or "sigmoid", of the gate. Default: "silu".

    Raises TypeError for an eps that is no number, ValueError for another size, eps or activation.

    >>> norm = GatedRMSNorm(64)
    >>> y = norm(x, gate)
    """

    def __init__(self, size: int, eps: float = 1e-5, activation: str = "silu") -> None:
        super().__init__()
        if not isinstance(size, int) or not 1 <= size <= MAX_SIZE:
            raise ValueError(f"size: expected an int between 1 and {MAX_SIZE}, found {size!r}")
        check_options(eps, activation)
        self.eps = eps
        self.activation = activation
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        return gated_rms_norm(x, self.weight, gate, self.eps, self.activation)

    def extra_repr(self) -> str:
        return f"{self.weight.numel()}, eps={self.eps}, {self.activation}"
