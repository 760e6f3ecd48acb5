"""The calls that are measured: random inputs of an op, and the work that one contestant makes of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

import graphlin
from graphlin.bench.results import FORWARD

# An op as a contestant offers it: takes the arguments by name, returns the output.
Op = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Sizes:
    """All about the problems but tokens and sequences: heads, head size, channels and width of the convolution, the width
    of layers, dtype."""

    H: int = 16
    HV: int = 32
    K: int = 128
    D: int = 8192
    W: int = 4
    hidden: int = 2048
    dtype: torch.dtype = torch.bfloat16


@dataclass(frozen=True)
class Problem:
    """One call: `tensors` (leaves that take gradients) and `options` by argument name, and the output's gradient."""

    op: str
    tensors: dict[str, torch.Tensor]
    options: dict
    grad: torch.Tensor

    def work(self, op: Op, direction: str) -> Callable[[], Sequence[torch.Tensor]]:
        """A call of `op`: forward without gradients returns `[output]`, forward+backward all gradients after it."""
        arguments = self.tensors | self.options

        def forward() -> Sequence[torch.Tensor]:
            with torch.no_grad():
                return [op(**arguments)]

        def both() -> Sequence[torch.Tensor]:
            output = op(**arguments)
            return [output, *torch.autograd.grad(output, list(self.tensors.values()), self.grad)]

        return forward if direction == FORWARD else both

    def names(self, direction: str) -> list[str]:
        """Names of what `work` returns."""
        return ["output"] if direction == FORWARD else ["output", *(f"gradient of {name}" for name in self.tensors)]


def random_cuts(tokens: int, seqs: int, device: torch.device, entries: int | None = None) -> torch.Tensor:
    """cu_seqlens int32 of `seqs` sequences with distinct random ends, the same for every run.

    Padded to `entries` by sequences of no token. Raises ValueError where there are fewer tokens than sequences.
    """
    if not 1 <= seqs <= tokens:
        raise ValueError(f"seqs: expected between 1 and the {tokens} tokens, found {seqs}")
    generator = torch.Generator().manual_seed(tokens + seqs)
    inner = (torch.randperm(tokens - 1, generator=generator)[:seqs - 1] + 1).sort().values.tolist()
    padding = [tokens] * (0 if entries is None else entries - seqs - 1)
    return torch.tensor([0, *inner, tokens, *padding], dtype=torch.int32, device=device)


class _Draw:
    """Random leaves on a device, from a fixed seed."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        torch.manual_seed(0)

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.randn(*shape, device=self.device).to(dtype or self.dtype).requires_grad_()

    def uniform(self, *shape: int, factor: float = 1.0) -> torch.Tensor:
        return (factor * torch.rand(*shape, device=self.device)).requires_grad_()


def gdn(rows: int, cu_seqlens: torch.Tensor, sizes: Sizes) -> Problem:
    """Gated DeltaNet: l2norm in the kernel, log decays and write strengths given."""
    draw = _Draw(cu_seqlens.device, sizes.dtype)
    q, k = (draw.normal(1, rows, sizes.H, sizes.K) for _ in range(2))
    v = draw.normal(1, rows, sizes.HV, sizes.K)
    g, beta = draw.uniform(1, rows, sizes.HV, factor=-0.1), draw.uniform(1, rows, sizes.HV)
    options = {"use_qk_l2norm_in_kernel": True, "cu_seqlens": cu_seqlens}
    return Problem("gdn", {"q": q, "k": k, "v": v, "g": g, "beta": beta}, options, torch.randn_like(v))


def kda(rows: int, cu_seqlens: torch.Tensor, sizes: Sizes) -> Problem:
    """Kimi Delta Attention with H = HV: l2norm, the gate with bound -5 and the sigmoid in the kernel."""
    draw = _Draw(cu_seqlens.device, sizes.dtype)
    q, k, v, g = (draw.normal(1, rows, sizes.HV, sizes.K) for _ in range(4))
    beta = draw.normal(1, rows, sizes.HV)
    A_log = torch.zeros(sizes.HV, device=cu_seqlens.device).requires_grad_()
    dt_bias = draw.normal(sizes.HV * sizes.K, dtype=torch.float32)
    options = {"use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "lower_bound": -5.0, "safe_gate": True,
               "use_beta_sigmoid_in_kernel": True, "cu_seqlens": cu_seqlens}
    return Problem("kda", {"q": q, "k": k, "v": v, "g": g, "beta": beta, "A_log": A_log, "dt_bias": dt_bias}, options,
                   torch.randn_like(v))


def conv(rows: int, cu_seqlens: torch.Tensor, sizes: Sizes) -> Problem:
    """The short convolution with silu."""
    draw = _Draw(cu_seqlens.device, sizes.dtype)
    x, weight = draw.normal(1, rows, sizes.D), draw.normal(sizes.D, sizes.W)
    return Problem("conv", {"x": x, "weight": weight}, {"activation": "silu", "cu_seqlens": cu_seqlens}, torch.randn_like(x))


PROBLEMS: dict[str, Callable[[int, torch.Tensor, Sizes], Problem]] = {"gdn": gdn, "kda": kda, "conv": conv}

OUR_OPS: dict[str, Op] = {
    "gdn": lambda **arguments: graphlin.chunk_gated_delta_rule(**arguments)[0],
    "kda": lambda **arguments: graphlin.chunk_kda(**arguments)[0],
    "conv": lambda **arguments: graphlin.causal_conv1d(**arguments)[0],
}
