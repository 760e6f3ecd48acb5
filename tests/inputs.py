"""Random inputs of the delta rules, and one run of an op forward and backward."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F

from graphlin.ops.gated_delta_rule import chunk_gated_delta_rule
from graphlin.ops.kda import chunk_kda
from graphlin.ops.reference import gated_delta_rule_reference, kda_reference

RESULT_NAMES = {"initial_state": "dh0"}      # the gradient of any other argument x is called dx


@dataclass(frozen=True)
class GDN:
    """A gated delta rule problem: its shape, and which branches of the op it takes."""

    op: ClassVar[Callable] = staticmethod(chunk_gated_delta_rule)
    reference: ClassVar[Callable] = staticmethod(gated_delta_rule_reference)

    lengths: tuple[int, ...] = (21, 0, 32, 5)
    dense: bool = False                      # one batch row for each of the equal lengths
    slack: int = 0                           # rows after the last sequence
    H: int = 1
    HV: int = 2
    K: int = 16
    V: int = 16
    dtype: torch.dtype = torch.float32
    gate: str = "external"                   # "external": g is the log decay; "raw", "raw_bias": computed in the kernel
    decay: str | float = "mild"              # of an external g: mild, strong, weak, masked, tiny, or a number
    beta: str = "given"                      # given (0 to 2), sigmoid, twice_sigmoid
    keys: str = "random"                     # random, alike
    l2norm: bool = True
    states: str = "both"                     # both, initial, final, none
    state_v_first: bool = False
    chunk_size: int = 16
    scale: float | None = None

    @property
    def options(self) -> dict:
        """Keyword arguments of the op that are no tensors."""
        return {"scale": self.scale, "use_qk_l2norm_in_kernel": self.l2norm,
                "use_gate_in_kernel": self.gate != "external", "use_beta_sigmoid_in_kernel": self.beta != "given",
                "allow_neg_eigval": self.beta == "twice_sigmoid", "state_v_first": self.state_v_first,
                "output_final_state": self.states in ("both", "final")}

    @property
    def op_options(self) -> dict:
        """Those and what the recurrence, token by token, knows nothing of."""
        return {**self.options, "chunk_size": self.chunk_size}

    @property
    def gate_shape(self) -> tuple[int, ...]:
        """Of one token's log decays."""
        return (self.HV,)

    @property
    def state_shape(self) -> tuple[int, ...]:
        return len(self.lengths), self.HV, *((self.V, self.K) if self.state_v_first else (self.K, self.V))

    def __str__(self) -> str:
        given = [f"{name}={value}" for name, value in vars(self).items() if value != getattr(type(self), name)]
        return "-".join([type(self).__name__.lower(), *given])


@dataclass(frozen=True)
class KDA(GDN):
    """A Kimi Delta Attention problem: one decay for each channel, and the gates that it adds."""

    op: ClassVar[Callable] = staticmethod(chunk_kda)
    reference: ClassVar[Callable] = staticmethod(kda_reference)

    lower_bound: float | None = None         # of the gate in the kernel
    rate: bool = True                        # A_log is given
    safe_gate: bool = False

    @property
    def options(self) -> dict:
        return {**super().options, "lower_bound": self.lower_bound}

    @property
    def op_options(self) -> dict:
        return {**super().op_options, "safe_gate": self.safe_gate}

    @property
    def gate_shape(self) -> tuple[int, ...]:
        return self.HV, self.K


each_rule = pytest.mark.parametrize("rule", [GDN, KDA], ids=["gdn", "kda"])


def gdn_inputs(problem: GDN, device: torch.device, seed: int = 0) -> dict[str, torch.Tensor]:
    """Arguments of the op by name, drawn on the CPU; absent ones are left out."""
    p = problem
    random = torch.Generator().manual_seed(seed)
    batch, tokens = (len(p.lengths), p.lengths[0]) if p.dense else (1, sum(p.lengths) + p.slack)

    def normal(*shape):
        return torch.randn(*shape, generator=random)

    inputs = {"q": normal(batch, tokens, p.H, p.K), "k": _keys(p, normal, batch, tokens),
              "v": normal(batch, tokens, p.HV, p.V)}
    if not p.l2norm:
        inputs |= {name: F.normalize(inputs[name], dim=-1) for name in "qk"}
    raw = normal(batch, tokens, p.HV)
    inputs["beta"] = raw if p.beta != "given" else 2 * torch.rand(raw.shape, generator=random)
    inputs = {name: x.to(p.dtype) for name, x in inputs.items()}
    gates = (batch, tokens, *p.gate_shape)
    inputs["g"] = _log_decay(p.decay, gates, random) if p.gate == "external" else 2 * normal(*gates)
    if p.gate != "external" and getattr(p, "rate", True):
        inputs["A_log"] = 0.5 * normal(p.HV)
    if p.gate == "raw_bias":
        inputs["dt_bias"] = normal(prod(p.gate_shape))
    if p.states in ("both", "initial"):
        inputs["initial_state"] = normal(*p.state_shape)
    inputs = {name: x.to(device) for name, x in inputs.items()}
    if not p.dense:
        inputs["cu_seqlens"] = cu_of(p.lengths, device)
    return inputs


def _keys(p: GDN, normal: Callable, batch: int, tokens: int) -> torch.Tensor:
    if p.keys == "alike":
        return normal(1, 1, p.H, p.K) + 0.1 * normal(batch, tokens, p.H, p.K)
    return normal(batch, tokens, p.H, p.K)


def _log_decay(kind: str | float, shape: tuple[int, ...], random: torch.Generator) -> torch.Tensor:
    uniform = torch.rand(shape, generator=random)
    if isinstance(kind, float):
        return torch.full(shape, kind)
    if kind == "masked":
        return torch.where(uniform < 0.2, -1000., torch.where(uniform > 0.7, 0., -uniform))
    if kind == "tiny":                       # -1e-8 to -1e-30, with a single -100
        g = -(10 ** (-8 - 22 * uniform))
        g[:, shape[1] // 2] = -100.
        return g
    return -{"mild": 1., "strong": 20., "weak": 0.02}[kind] * uniform


def cu_of(lengths: tuple[int, ...], device: torch.device, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """`cu_seqlens` of these lengths."""
    return F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).to(device, dtype)


def gdn_upstream(problem: GDN, inputs: Mapping[str, torch.Tensor], seed: int = 1) -> dict[str, torch.Tensor]:
    """Gradients of the op's outputs: of o in its dtype, of the final state in float32."""
    random = torch.Generator().manual_seed(seed)
    upstream = {"o": torch.randn(inputs["v"].shape, generator=random).to(inputs["v"])}
    if problem.options["output_final_state"]:
        upstream["ht"] = torch.randn(problem.state_shape, generator=random).to(inputs["v"].device)
    return upstream


def run(op: Callable, inputs: Mapping[str, torch.Tensor], upstream: Mapping[str, torch.Tensor],
        **options) -> dict[str, torch.Tensor | None]:
    """Outputs `o`, `ht` and the gradients `d<argument>` of every float input, given those of the outputs.

    The op reads the given tensors themselves, so that a captured run may be replayed on other values.
    """
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()
              if x is not None and x.is_floating_point()}
    outputs = dict(zip(("o", "ht"), op(**{**inputs, **leaves}, **options), strict=True))
    grads = torch.autograd.grad([outputs[name] for name in upstream], list(leaves.values()),
                                [d.to(outputs[name].dtype) for name, d in upstream.items()], allow_unused=True)
    results = {name: x.detach() for name, x in outputs.items() if x is not None}
    return results | {RESULT_NAMES.get(name, "d" + name): d for name, d in zip(leaves, grads, strict=True)}


def in_float64(inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}


def guarded(x: torch.Tensor, fill: float = float("nan"), rows: int = 64) -> torch.Tensor:
    """A contiguous copy of x with `fill` in the memory before and after it."""
    margin = rows * max(1, x.shape[-1])
    memory = torch.full((x.numel() + 2 * margin,), fill, dtype=x.dtype, device=x.device)
    copy = memory[margin:margin + x.numel()].view(x.shape)
    return copy.copy_(x)


def memory_of(x: torch.Tensor) -> torch.Tensor:
    """The whole memory that x lies in, guards included, as integers."""
    return x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0).view(torch.int32)
