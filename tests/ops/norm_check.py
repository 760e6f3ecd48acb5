"""The norm's problems, their random inputs, and the standard check: results and gradients against float64."""

from dataclasses import dataclass

import torch

from graphlin.ops.gated_rms_norm import gated_rms_norm
from graphlin.ops.reference import gated_rms_norm_reference
from tests.inputs import in_float64
from tests.tolerances import assert_close_rms

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Norm:
    """A problem of the norm: its shape, and which branches of the op it takes."""

    rows: tuple[int, ...] = (2, 21)
    D: int = 24
    dtype: torch.dtype = torch.float32
    weight: torch.dtype | None = None        # dtype of the weight where it is another
    gate: torch.dtype | str | None = None    # the gate's where it is another; "none" for no gate
    activation: str = "silu"
    eps: float = 1e-5

    @property
    def options(self) -> dict:
        """Keyword arguments of the op and of the reference that are no tensors."""
        return {"activation": self.activation, "eps": self.eps}

    def __str__(self) -> str:
        return "-".join(f"{name}={value}" for name, value in vars(self).items() if value != getattr(Norm, name))


def norm_inputs(problem: Norm, device: torch.device, seed: int = 0) -> Tensors:
    """Arguments of the op by name, and the gradient of its result as `dy`, drawn on the CPU."""
    p, random = problem, torch.Generator().manual_seed(seed)
    drawn = {name: torch.randn(*p.rows, p.D, generator=random).to(p.dtype) for name in ("x", "gate", "dy")}
    drawn["weight"] = (0.5 + torch.rand(p.D, generator=random)).to(p.weight or p.dtype)
    if p.gate == "none":
        del drawn["gate"]
    else:
        drawn["gate"] = 2 * drawn["gate"].to(p.gate or p.dtype)
    return {name: x.to(device) for name, x in drawn.items()}


def run_norm(inputs: Tensors, op=gated_rms_norm, wanted: tuple[str, ...] = ("x", "weight", "gate"), **options) -> Tensors:
    """Result `y` and the gradients of the arguments in `wanted`, as `d<argument>`."""
    arguments = {name: x.detach() for name, x in inputs.items() if name != "dy"}
    leaves = {name: arguments[name].requires_grad_() for name in wanted if name in arguments}
    y = op(**arguments, **options)
    grads = torch.autograd.grad(y, list(leaves.values()), inputs["dy"].to(y.dtype))
    return {"y": y.detach()} | {f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}


def standard_norm_check(problem: Norm, device: torch.device) -> None:
    """Checks values, shapes and dtypes of one run."""
    inputs = norm_inputs(problem, device)
    actual = run_norm(inputs, **problem.options)
    expected = run_norm(in_float64(inputs), gated_rms_norm_reference, **problem.options)
    assert actual.keys() == expected.keys()
    for name, x in expected.items():
        own = inputs["x" if name == "y" else name[1:]].dtype
        assert actual[name].dtype == own, name
        assert_close_rms("dx" if name == "dgate" else name, actual[name], x, own)
