"""What the compile lanes compile: the public ops, each in a named set of variants of its compile-time switches."""

from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

import graphlin
from graphlin.kernels.copy_rows import RowCopy, deliver
from graphlin.kernels.norm import MAX_SIZE
from graphlin.parallel.context import ContextParallel
from graphlin.parallel.split import split


@dataclass(frozen=True)
class Variant:
    """One setting of the ops' compile-time switches. The default is the main one: that of a real layer, packed."""

    dtype: torch.dtype = torch.bfloat16
    H: int = 16
    HV: int = 32
    K: int = 128
    V: int = 128
    chunk_size: int = 64
    taps: int = 4
    packed: bool = True
    extras: bool = True
    """Gate, sigmoid, l2norm, bias, residual and activation inside the kernels, and states in and out."""
    graph_capture: bool | None = None
    state_v_first: bool = False

    @property
    def is_main(self) -> bool:
        """Whether it uses the main launch records, which may not spill much whatever the other switches."""
        return (self.dtype, self.K, self.V, self.chunk_size) == (torch.bfloat16, 128, 128, 64)


VARIANTS = {
    "main": Variant(),
    "bare": Variant(extras=False),
    "dense": Variant(packed=False),
    "exact": Variant(graph_capture=False),
    "fp16": Variant(dtype=torch.float16),
    "fp32": Variant(dtype=torch.float32),
    "one-group": Variant(H=32, HV=32),
    "small": Variant(K=64, V=64),
    "odd": Variant(K=100, V=60),
    "uneven": Variant(V=100),
    "large": Variant(K=256, V=256),
    "large-fp32": Variant(K=256, V=256, dtype=torch.float32),
    "chunk-32": Variant(chunk_size=32),
    "chunk-16": Variant(chunk_size=16),
    "v-first": Variant(state_v_first=True),
    "taps-8": Variant(taps=8),
}
TOKENS, SEQS = 256, 4
LONG = 41, 161    # chunks of a sequence that is split, in halves and in quarters


def make(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A leaf that wants a gradient; its values are never read."""
    return torch.zeros(shape, dtype=dtype, requires_grad=True)


def packing(variant: Variant, tokens: int = TOKENS, seqs: int = SEQS) -> dict[str, Any]:
    """The packing arguments that the ops share."""
    if not variant.packed:
        return {"chunk_size": variant.chunk_size}
    cu = torch.arange(0, tokens + 1, tokens // seqs, dtype=torch.int32)
    return {"chunk_size": variant.chunk_size, "cu_seqlens": cu, "graph_capture": variant.graph_capture}


class Across(ContextParallel):
    """The view of a rank whose group is not there: it gets from every other rank what it sends itself."""

    def all_gather(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """x for each rank."""
        return x.expand(self.world, *x.shape)


def packings(variant: Variant) -> list[dict[str, Any]]:
    """The packing arguments, and those of the middle rank of three and the last of two if tokens are packed."""
    cu = torch.tensor([0, TOKENS] + [TOKENS] * (SEQS - 1), dtype=torch.int32)
    views = [split(Across, None, 1, cu, torch.arange(world + 1) * TOKENS) for world in (3, 2)] if variant.packed else []
    return [packing(variant), *[{"chunk_size": variant.chunk_size, "cp_context": view} for view in views]]


def differentiate(*outputs: torch.Tensor | None) -> None:
    """Runs the backward of all outputs."""
    present = [x for x in outputs if x is not None]
    torch.autograd.backward(present, [torch.zeros_like(x) for x in present])


def run_chunks(variant: Variant) -> None:
    """The chunk table and the cumulative sums, both ways."""
    graphlin.prepare_chunk_indices(torch.tensor([0, TOKENS], dtype=torch.int32), TOKENS, variant.chunk_size)
    for reverse in (False, True):
        graphlin.chunk_local_cumsum(make(1, TOKENS, variant.HV), reverse=reverse, **packing(variant))


def run_gated_delta_rule(variant: Variant) -> None:
    """Gated DeltaNet, forward and backward, of several sequences and of one, and forward over long ones."""
    dtype, H, HV = variant.dtype, variant.H, variant.HV
    state = (HV, variant.V, variant.K) if variant.state_v_first else (HV, variant.K, variant.V)
    extras: dict[str, Any] = {}
    if variant.extras:
        extras = dict(output_final_state=True, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, A_log=make(HV),
                      dt_bias=make(HV), use_beta_sigmoid_in_kernel=True)
    gate_dtype = dtype if variant.extras else torch.float32

    def run(tokens: int, seqs: int, arguments: dict[str, Any]) -> tuple[torch.Tensor | None, ...]:
        initial = make(seqs if variant.packed else 1, *state) if variant.extras else None
        return graphlin.chunk_gated_delta_rule(
            make(1, tokens, H, variant.K, dtype=dtype), make(1, tokens, H, variant.K, dtype=dtype),
            make(1, tokens, HV, variant.V, dtype=dtype), make(1, tokens, HV, dtype=gate_dtype),
            make(1, tokens, HV, dtype=dtype), initial_state=initial, state_v_first=variant.state_v_first, **extras, **arguments)

    for arguments in packings(variant):
        differentiate(*run(TOKENS, SEQS, arguments))
    differentiate(*run(TOKENS, 1, packing(variant, TOKENS, 1)))
    with torch.no_grad():
        for tokens in (chunks * variant.chunk_size for chunks in LONG):
            run(tokens, 1, packing(variant, tokens, 1))


def run_kda(variant: Variant) -> None:
    """Kimi Delta Attention with each of its gates, forward and backward, of one sequence alone, and forward over a long one."""
    dtype, H, HV = variant.dtype, variant.H, variant.HV
    state = (HV, variant.V, variant.K) if variant.state_v_first else (HV, variant.K, variant.V)
    gates: list[dict[str, Any]] = [{}]
    if variant.extras:
        extras = dict(output_final_state=True, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True,
                      use_beta_sigmoid_in_kernel=True, dt_bias=make(HV * variant.K))
        gates = [dict(extras, A_log=make(HV)), dict(extras, A_log=make(HV), lower_bound=-5.0, safe_gate=True),
                 dict(extras, lower_bound=-5.0)]
    gate_dtype = dtype if variant.extras else torch.float32

    def run(tokens: int, seqs: int, gate: dict[str, Any], arguments: dict[str, Any]) -> tuple[torch.Tensor | None, ...]:
        initial = make(seqs if variant.packed else 1, *state) if variant.extras else None
        return graphlin.chunk_kda(
            make(1, tokens, H, variant.K, dtype=dtype), make(1, tokens, H, variant.K, dtype=dtype),
            make(1, tokens, HV, variant.V, dtype=dtype), make(1, tokens, HV, variant.K, dtype=gate_dtype),
            make(1, tokens, HV, dtype=dtype), initial_state=initial, state_v_first=variant.state_v_first, **gate, **arguments)

    for gate, arguments in product(gates, packings(variant)):
        differentiate(*run(TOKENS, SEQS, gate, arguments))
    gate = gates[len(gates) // 2]
    differentiate(*run(TOKENS, 1, gate, packing(variant, TOKENS, 1)))
    with torch.no_grad():
        tokens = LONG[0] * variant.chunk_size
        run(tokens, 1, gate, packing(variant, tokens, 1))


def run_causal_conv1d(variant: Variant) -> None:
    """The short convolution over all heads' values, forward and backward."""
    D, dtype, seqs = variant.HV * variant.V, variant.dtype, SEQS if variant.packed else 1
    extras: dict[str, Any] = {}
    if variant.extras:
        extras = dict(bias=make(D, dtype=dtype), residual=make(1, TOKENS, D, dtype=dtype), activation="silu",
                      initial_state=make(seqs, D, variant.taps, dtype=dtype), output_final_state=True)
    differentiate(*graphlin.causal_conv1d(
        make(1, TOKENS, D, dtype=dtype), make(D, variant.taps, dtype=dtype), **extras, **packing(variant)))


def run_gated_rms_norm(variant: Variant) -> None:
    """The output norm over the heads' values and over the widest rows, with each gate or with none, forward and backward."""
    for D in (variant.V, MAX_SIZE):
        x, gate = (make(1, TOKENS, D, dtype=variant.dtype) for _ in range(2))
        weight = make(D, dtype=variant.dtype)
        for options in ({"gate": gate}, {"gate": gate, "activation": "sigmoid"}) if variant.extras else ({},):
            differentiate(graphlin.gated_rms_norm(x, weight, **options))


def run_copy_in(variant: Variant) -> None:
    """The copy of active rows into a graph's static buffers, and of its output to where the copy-in said."""
    cu = torch.arange(0, TOKENS + 1, TOKENS // SEQS, dtype=torch.int32)
    x = torch.zeros(1, TOKENS, variant.HV * variant.V, dtype=variant.dtype)
    mailbox = torch.zeros(1, 2, dtype=torch.int64)
    copy = RowCopy(torch.zeros_like(x), dim=1, mailbox=mailbox)
    copy(x, cu)
    copy(x, cu, torch.zeros(SEQS + 1, dtype=torch.int32))
    copy(x, None)
    deliver(copy.static, 1, mailbox)


RUNS = (run_chunks, run_gated_delta_rule, run_kda, run_causal_conv1d, run_gated_rms_norm, run_copy_in)
