"""The convolution's problems, their random inputs, and the standard check: results and gradients against float64."""

from dataclasses import dataclass

import torch

from graphlin.ops.causal_conv1d import causal_conv1d
from graphlin.ops.reference import causal_conv1d_reference
from tests.inputs import cu_of, in_float64, run
from tests.tolerances import assert_close_rms

ALL = ("bias", "residual", "initial_state", "final_state")


@dataclass(frozen=True)
class Conv:
    """A convolution problem: its shape, and which branches of the op it takes."""

    lengths: tuple[int, ...] = (0, 1, 3, 4, 0, 19)
    dense: bool = False                      # one batch row for each of the equal lengths
    slack: int = 0                           # rows of NaN after the last sequence
    D: int = 5
    W: int = 4
    dtype: torch.dtype = torch.float32
    parameters: torch.dtype | None = None    # dtype of weight, bias and states where it is another
    extras: tuple[str, ...] = ALL
    activation: str | None = "silu"
    chunk_size: int = 16

    @property
    def options(self) -> dict:
        """Keyword arguments of the op and of the reference that are no tensors."""
        return {"activation": self.activation, "output_final_state": "final_state" in self.extras}

    def __str__(self) -> str:
        return "-".join(f"{name}={value}" for name, value in vars(self).items() if value != getattr(Conv, name))


def conv_inputs(problem: Conv, device: torch.device, seed: int = 0) -> dict[str, torch.Tensor]:
    """Arguments of the op by name, drawn on the CPU; absent ones are left out."""
    p, random = problem, torch.Generator().manual_seed(seed)
    tokens, seqs = sum(p.lengths), len(p.lengths)
    shapes = {"x": (tokens, p.D), "weight": (p.D, p.W), "bias": (p.D,), "residual": (tokens, p.D),
              "initial_state": (seqs, p.D, p.W)}
    inputs = {name: torch.randn(shape, generator=random) for name, shape in shapes.items()
              if name in ("x", "weight", *p.extras)}
    for name, x in inputs.items():
        x = x.to(p.dtype if name in ("x", "residual") else p.parameters or p.dtype)
        inputs[name] = _arranged(p, x).to(device) if name in ("x", "residual") else x.to(device)
    return inputs if p.dense else inputs | {"cu_seqlens": cu_of(p.lengths, device)}


def conv_upstream(problem: Conv, inputs: dict[str, torch.Tensor], seed: int = 1) -> dict[str, torch.Tensor]:
    """Gradients of y and the final state, in the dtypes of these."""
    p, random = problem, torch.Generator().manual_seed(seed)
    upstream = {"o": _arranged(p, torch.randn(sum(p.lengths), p.D, generator=random)).to(inputs["x"])}
    if "final_state" in p.extras:
        states = torch.randn(len(p.lengths), p.D, p.W, generator=random)
        upstream["ht"] = states.to(inputs.get("initial_state", inputs["x"]))
    return upstream


def _arranged(p: Conv, rows: torch.Tensor) -> torch.Tensor:
    """Rows as `[B, T, D]` or, with slack, `[1, T, D]`."""
    if p.dense:
        return rows.view(len(p.lengths), -1, p.D)
    return torch.cat([rows, rows.new_full((p.slack, p.D), float("nan"))])[None]


def run_conv(problem: Conv, inputs: dict[str, torch.Tensor], **options) -> dict[str, torch.Tensor]:
    """Results of the op and all gradients, by name; see `tests.inputs.run`."""
    return run(causal_conv1d, inputs, conv_upstream(problem, inputs),
               **{"chunk_size": problem.chunk_size, **problem.options, **options})


def standard_conv_check(problem: Conv, device: torch.device) -> dict[str, torch.Tensor]:
    """Checks values, dtypes and zeros of inactive rows of one run, and returns its results."""
    inputs = conv_inputs(problem, device)
    actual = run_conv(problem, inputs)
    expected = run(causal_conv1d_reference, in_float64(inputs), conv_upstream(problem, inputs), **problem.options)
    assert actual.keys() == expected.keys()
    for name, x in expected.items():
        argument = {"o": "x", "ht": "initial_state", "dh0": "initial_state"}.get(name, name[1:])
        assert actual[name].dtype == inputs.get(argument, inputs["x"]).dtype, name
        assert_close_rms(name, actual[name], x, problem.dtype)
        if name in ("o", "dx", "dresidual") and problem.slack:
            assert torch.count_nonzero(actual[name][:, -problem.slack:]) == 0, f"inactive rows of {name} are not 0"
    return actual
