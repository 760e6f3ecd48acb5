"""RMS normalisation with an output gate as a differentiable op."""

import torch

from graphlin.kernels.ahead import apply
from graphlin.kernels.norm import MAX_SIZE, run_norm_backward, run_norm_forward
from graphlin.ops.first_order import first_order
from graphlin.ops.validation import check_tensor, in_memory

ACTIVATIONS = ("silu", "swish", "sigmoid")


def gated_rms_norm(x: torch.Tensor, weight: torch.Tensor, gate: torch.Tensor | None = None, eps: float = 1e-5,
                   activation: str = "silu") -> torch.Tensor:
    """RMS normalisation of rows, times an activation of their gate; differentiable in every tensor argument.

    `y = x / sqrt(mean(x²) + eps) · weight · act(gate)` over the last dimension, in float32 (Zhang and Sennrich, arXiv
    1910.07467, with the output gate of Gated DeltaNet, silu, arXiv 2412.06464, or of Kimi Linear, sigmoid, arXiv 2510.26692).
    One launch forward; backward one, and one reduction for the weight's gradient. A row's results do not depend on the
    other rows, bit for bit; nor does the weight's gradient on rows of zeros after the last.

    Args:
        x: `[..., D]`, float32, float16 or bfloat16; D from 1 to 4096.
        weight: `[D]`, any of these dtypes.
        gate: `[..., D]` like x, any of these dtypes; default none, which leaves the factor out.
        eps: added to the mean square; a positive number, of at least 1.2e-38. Default: 1e-5.
        activation: "silu", "swish" (the same) or "sigmoid", of the gate. Default: "silu".

    Returns:
        y `[..., D]` in x's dtype.

    Raises:
        TypeError, ValueError: naming the argument, the expected and the found value.
        BackendUnavailable: no backend for the device.

    >>> x, gate = torch.randn(1, 100, 8, 128, device="cuda"), torch.randn(1, 100, 8, 128, device="cuda")
    >>> y = gated_rms_norm(x, torch.ones(128, device="cuda"), gate)
    """
    check_tensor("x", x)
    if x.dim() == 0 or not 1 <= x.shape[-1] <= MAX_SIZE:
        raise ValueError(f"x: expected shape [..., D] with D between 1 and {MAX_SIZE}, found {list(x.shape)}")
    check_tensor("weight", weight, shape=x.shape[-1:], like=x)
    if gate is not None:
        check_tensor("gate", gate, shape=tuple(x.shape), like=x)
    check_options(eps, activation)
    tensors = [None if t is None else in_memory(t) for t in (x, weight, gate)]
    y, = apply(GatedRMSNormFunction, *tensors, float(eps), activation != "sigmoid")
    return y


class GatedRMSNormFunction(torch.autograd.Function):
    """One launch forward; backward one, and one reduction. Nothing but the inputs is kept between them."""

    @staticmethod
    def forward(ctx, x, weight, gate, eps: float, silu: bool):
        ctx.save_for_backward(x, weight, gate)
        ctx.options = eps, silu
        return run_norm_forward(x, weight, gate, eps, silu),

    @staticmethod
    @first_order
    def backward(ctx, dy):
        x, weight, gate = ctx.saved_tensors
        return *run_norm_backward(x, weight, gate, in_memory(dy), *ctx.options, ctx.needs_input_grad[:3]), None, None


def check_options(eps: object, activation: object) -> None:
    """Raises TypeError or ValueError unless eps is a normal positive float32 and the activation one of the kernels'."""
    if isinstance(eps, bool) or not isinstance(eps, (int, float)):
        raise TypeError(f"eps: expected a Python number, found {type(eps).__name__}")
    least, most = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
    if not least <= eps <= most:
        raise ValueError(f"eps: expected a positive number of at least {least:.2g}, without which rows of zeros have no result "
                         f"in float32, and at most {most:.2g}, found {eps}")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation: expected 'silu', 'swish' or 'sigmoid', found {activation!r}")
