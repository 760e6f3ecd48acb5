"""Chunkwise Kimi Delta Attention as a differentiable op."""

import torch

from graphlin.kernels.gates import BOUNDED, SOFTPLUS
from graphlin.kernels.kda_gradients import run_gradients
from graphlin.kernels.kda_prep import run_prep
from graphlin.ops.chunks import resolve_packing
from graphlin.ops.delta_rule import (
    LOWEST_BOUND,
    Call,
    Family,
    apply_delta_rule,
    check_gate,
    check_inputs,
    check_log_decays,
    strength_range,
)
from graphlin.ops.parts import Parts, resolve_parts
from graphlin.ops.validation import check_scale

KDA = Family(run_prep, run_gradients)


def chunk_kda(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, scale: float | None = None,
    initial_state: torch.Tensor | None = None, output_final_state: bool = False, *, use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False, A_log: torch.Tensor | None = None, dt_bias: torch.Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False, state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None, chunk_indices: torch.Tensor | None = None, chunk_size: int = 64,
    graph_capture: bool | None = None, validate: bool = False, lower_bound: float | None = None, safe_gate: bool = False,
    cp_context: Parts | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Kimi Delta Attention over dense or packed sequences, differentiable in every tensor argument.

    The gated delta rule with a decay for each channel. Per token of one value head, with `α = exp(g)`:
    `S ← diag(α) S;  S ← S + β k (v − Sᵀ k)ᵀ;  o = scale · Sᵀ q` (Kimi Linear, Kimi Team 2025, arXiv:2510.26692; computed
    chunk by chunk). Packed input is processed without a host sync and can be captured; results of a sequence do not depend on
    the rest of the batch, bit for bit, nor those of a token on later tokens.

    Args:
        q, k: `[B, T, H, K]`, float32, float16 or bfloat16; K up to 256.
        v: `[B, T, HV, V]` in q's dtype; HV a multiple of H, value head i reads key head `i // (HV // H)`; V up to 256.
        g: `[B, T, HV, K]`, any of these dtypes; natural log of the decays (<= 0), or raw gates with use_gate_in_kernel. Log
            decays below -32 act as -32, a decay of 1e-14; their gradient is 0. Positive ones give wrong results (validate=True
            raises).
        beta: `[B, T, HV]`, any of these dtypes; write strength, or its logit with use_beta_sigmoid_in_kernel.
        scale: factor on q, default `K ** -0.5`.
        initial_state: `[N, HV, K, V]` any of these dtypes (`[N, HV, V, K]` with state_v_first), default zeros. N is B, or the
            number of packed sequences.
        output_final_state: return the states after the last token of each sequence.
        use_qk_l2norm_in_kernel: q and k become `x / sqrt(sum x² + 1e-6)`.
        use_gate_in_kernel: g becomes `-exp(A_log) · softplus(g + dt_bias)`, or with lower_bound
            `lower_bound · sigmoid(exp(A_log) · (g + dt_bias))`; A_log `[HV]`, dt_bias `[HV * K]` optional. A_log above 80 acts
            as 80; it is required without lower_bound, and 0 if left out with one.
        use_beta_sigmoid_in_kernel: beta becomes `sigmoid(beta)`, or `2 · sigmoid(beta)` with allow_neg_eigval.
        allow_neg_eigval: see above; without use_beta_sigmoid_in_kernel it changes nothing (pass beta up to 2 yourself).
        state_v_first: states are `[N, HV, V, K]`.
        cu_seqlens: `[N + 1]` int32 or int64 on q's device, cumulative lengths of the packed sequences; B must be 1. Rows at and
            after `cu_seqlens[-1]` are inactive: never read, and 0 in o and in every gradient.
        chunk_indices: table of `prepare_chunk_indices` for the same cu_seqlens and chunk_size; built if None.
        chunk_size: 16, 32 or 64 rows.
        graph_capture: None or True: the static path, no host sync. False: an exact grid, whose table is chunk_indices (without
            sentinels) or is read from cu_seqlens on the host.
        validate: check the values of cu_seqlens, and that given log decays are <= 0, and >= -5 with safe_gate (a host sync;
            refused inside a capture).
        lower_bound: the least log decay of the bounded gate, in [-5, 0); only with use_gate_in_kernel.
        safe_gate: a promise that all log decays are at least lower_bound, or -5 without one. It allows a cheaper form, of the
            same accuracy, where the dtype has the range for it (not float16). A broken promise makes results wrong.
        cp_context: from `graphlin.parallel.context_parallel`, instead of cu_seqlens, where the batch's tokens are split over
            ranks (docs/parallel.md). N is then the whole batch's number of sequences; a rank returns the final states of those
            that end on it, 0 for others.

    Returns:
        o `[B, T, HV, V]` in q's dtype, and the final state in float32, or None.

    Raises:
        TypeError, ValueError: naming the argument, the expected and the found value.
        HostSync: graph_capture=False without chunk_indices, or validate, inside a capture.
        BackendUnavailable: no backend for the device.

    >>> q, k, v = (torch.randn(1, 100, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    >>> o, _ = chunk_kda(q, k, v, -torch.rand(1, 100, 2, 64, device="cuda"), torch.rand(1, 100, 2, device="cuda"))
    """
    check_inputs(q, k, v, g, beta, per_channel=True)
    cu_seqlens, chunk_indices = resolve_parts(cp_context, cu_seqlens, chunk_indices, q.shape[1], chunk_size, graph_capture)
    packing = resolve_packing("q", q, cu_seqlens, chunk_indices, chunk_size, graph_capture, validate)
    HV, K = v.shape[2], q.shape[3]
    check_gate(use_gate_in_kernel, A_log, dt_bias, HV, HV * K, q, lower_bound)
    if validate and not use_gate_in_kernel:
        check_log_decays(g, packing, LOWEST_BOUND if safe_gate else None)
    gate = 0 if not use_gate_in_kernel else SOFTPLUS.value if lower_bound is None else BOUNDED.value
    call = Call(KDA, packing, check_scale(scale, K), output_final_state, state_v_first,
                use_qk_l2norm_in_kernel, gate, strength_range(use_beta_sigmoid_in_kernel, allow_neg_eigval),
                None if lower_bound is None else float(lower_bound), safe_gate, parts=cp_context)
    return apply_delta_rule(q, k, v, g, beta, A_log, dt_bias, initial_state, call)
