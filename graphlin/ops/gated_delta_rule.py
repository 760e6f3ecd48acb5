"""Chunkwise Gated DeltaNet as a differentiable op."""

import torch

from graphlin.kernels.gdn_gradients import run_gradients
from graphlin.kernels.gdn_prep import run_prep
from graphlin.kernels.gdn_problem import Prologue, Workspace
from graphlin.kernels.gdn_recurrence import run_recurrence, run_two_recurrences
from graphlin.kernels.packing import Packing
from graphlin.kernels.reduce import reduce_partials
from graphlin.ops.chunks import resolve_packing
from graphlin.ops.validation import check_scale, check_tensor, read_values

MAX_HEAD_DIM = 256


def chunk_gated_delta_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, scale: float | None = None,
    initial_state: torch.Tensor | None = None, output_final_state: bool = False, *, use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False, A_log: torch.Tensor | None = None, dt_bias: torch.Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False, state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None, chunk_indices: torch.Tensor | None = None, chunk_size: int = 64,
    graph_capture: bool | None = None, validate: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gated delta rule over dense or packed sequences, differentiable in every tensor argument.

    Per token of one value head, with `α = exp(g)`: `S ← α S;  S ← S + β k (v − Sᵀ k)ᵀ;  o = scale · Sᵀ q`
    (Gated Delta Networks, Yang et al. 2024; computed chunk by chunk). Packed input is processed without a host sync and can be
    captured; results of a sequence do not depend on the rest of the batch, bit for bit.

    Args:
        q, k: `[B, T, H, K]`, float32, float16 or bfloat16; K up to 256.
        v: `[B, T, HV, V]` in q's dtype; HV a multiple of H, value head i reads key head `i // (HV // H)`; V up to 256.
        g: `[B, T, HV]`, any of these dtypes; natural log of the decay (<= 0), or the raw gate with use_gate_in_kernel.
        beta: `[B, T, HV]`, any of these dtypes; write strength, or its logit with use_beta_sigmoid_in_kernel.
        scale: factor on q, default `K ** -0.5`.
        initial_state: `[N, HV, K, V]` any of these dtypes (`[N, HV, V, K]` with state_v_first), default zeros. N is B, or the
            number of packed sequences.
        output_final_state: return the states after the last token of each sequence.
        use_qk_l2norm_in_kernel: q and k become `x / sqrt(sum x² + 1e-6)`.
        use_gate_in_kernel: g becomes `-exp(A_log) · softplus(g + dt_bias)`; A_log `[HV]` required, dt_bias `[HV]` optional.
        use_beta_sigmoid_in_kernel: beta becomes `sigmoid(beta)`, or `2 · sigmoid(beta)` with allow_neg_eigval.
        allow_neg_eigval: see above; without use_beta_sigmoid_in_kernel it changes nothing (pass beta up to 2 yourself).
        state_v_first: states are `[N, HV, V, K]`.
        cu_seqlens: `[N + 1]` int32 or int64 on q's device, cumulative lengths of the packed sequences; B must be 1. Rows at and
            after `cu_seqlens[-1]` are inactive: never read, and 0 in o and in every gradient.
        chunk_indices: table of `prepare_chunk_indices` for the same cu_seqlens and chunk_size; built if None.
        chunk_size: 16, 32 or 64 rows.
        graph_capture: None or True: the static path, no host sync. False: an exact grid, whose table is chunk_indices (without
            sentinels) or is read from cu_seqlens on the host.
        validate: check the values of cu_seqlens, and that given log decays are <= 0 (a host sync; refused inside a capture).

    Returns:
        o `[B, T, HV, V]` in q's dtype, and the final state in float32, or None.

    Raises:
        TypeError, ValueError: naming the argument, the expected and the found value.
        HostSync: graph_capture=False without chunk_indices, or validate, inside a capture.
        BackendUnavailable: no backend for the device.

    >>> q, k, v = (torch.randn(1, 100, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    >>> o, _ = chunk_gated_delta_rule(q, k, v, -torch.rand(1, 100, 2, device="cuda"), torch.rand(1, 100, 2, device="cuda"))
    """
    _check_inputs(q, k, v, g, beta)
    packing = resolve_packing("q", q, cu_seqlens, chunk_indices, chunk_size, graph_capture, validate)
    HV, K, V = v.shape[2], q.shape[3], v.shape[3]
    if initial_state is not None:
        shape = (packing.N, HV, V, K) if state_v_first else (packing.N, HV, K, V)
        check_tensor("initial_state", initial_state, shape=shape, like=q)
        initial_state = initial_state.contiguous()
    _check_gate(use_gate_in_kernel, A_log, dt_bias, HV, q)
    if validate and not use_gate_in_kernel:
        active = g[:, :read_values("cu_seqlens", cu_seqlens[-1], "validate=True")] if packing.varlen else g
        if read_values("g", (active > 0).any(), "validate=True"):
            raise ValueError("g: expected log decays <= 0, found a positive value; pass log(decay), or use_gate_in_kernel=True")
    beta_range = (2.0 if allow_neg_eigval else 1.0) if use_beta_sigmoid_in_kernel else 0.0
    scale = check_scale(scale, K)
    inputs = [x.contiguous() for x in (q, k, v, g, beta)]
    return GatedDeltaRule.apply(*inputs, A_log, dt_bias, initial_state, output_final_state, use_qk_l2norm_in_kernel, beta_range,
                                state_v_first, packing, scale)


class GatedDeltaRule(torch.autograd.Function):
    """Two launches forward; backward four, and one reduction where A_log is learned."""

    @staticmethod
    def forward(ctx, q, k, v, g, beta, A_log, dt_bias, h0, store_ht, l2norm, beta_range, v_first, packing: Packing, scale):
        prologue = Prologue(l2norm, A_log, dt_bias, beta_range)
        ctx.set_materialize_grads(False)
        ctx.options = (l2norm, beta_range, v_first, packing, scale)
        if v.numel() == 0:
            ctx.save_for_backward(q, k, v, g, beta, A_log, dt_bias, h0)
            return _empty_forward(v, h0, store_ht, v_first, packing, q.shape[3])
        work = run_prep(q, k, g, beta, prologue, packing, scale)
        o, ht = run_recurrence(q, k, v, work, h0, store_ht, v_first, packing, scale)
        ctx.save_for_backward(q, k, v, g, beta, A_log, dt_bias, h0, *work)
        return o, ht

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, do, dht):
        q, k, v, g, beta, A_log, dt_bias, h0, *work = ctx.saved_tensors
        l2norm, beta_range, v_first, packing, scale = ctx.options
        if not work:
            dh0 = None if h0 is None else torch.zeros_like(h0) if dht is None else dht.to(h0.dtype)
            zeros = [None if x is None else torch.zeros_like(x) for x in (q, k, v, g, beta, A_log, dt_bias)]
            return *zeros, dh0, *[None] * 6
        prologue, work = Prologue(l2norm, A_log, dt_bias, beta_range), Workspace(*work)
        do = torch.zeros_like(v) if do is None else do.contiguous()
        dht = None if dht is None else dht.contiguous()
        St, E, Rt, dv, dh0 = run_two_recurrences(q, k, v, do, work, h0, dht, ctx.needs_input_grad[7], v_first, packing, scale)
        dq, dk, dg, dbeta, dgate = run_gradients(q, k, g, beta, do, E, dv, St, Rt, work, prologue, packing, scale)
        dA_log = ddt_bias = None
        if A_log is not None and (ctx.needs_input_grad[5] or ctx.needs_input_grad[6]):
            sums = reduce_partials(dgate.view(dgate.shape[0], -1), packing).view(2, -1)
            dA_log = sums[0].to(A_log.dtype)
            ddt_bias = None if dt_bias is None else sums[1].to(dt_bias.dtype)
        return dq, dk, dv, dg, dbeta, dA_log, ddt_bias, dh0, *[None] * 6


def _empty_forward(v, h0, store_ht, v_first, packing, K):
    """No token or no head: nothing to launch, and the states pass through."""
    o = torch.empty_like(v)
    if not store_ht:
        return o, None
    HV, V = v.shape[2:]
    if h0 is not None:
        return o, h0.to(torch.float32, copy=True)
    return o, v.new_zeros(packing.N, HV, *((V, K) if v_first else (K, V)), dtype=torch.float32)


def _check_inputs(q, k, v, g, beta) -> None:
    check_tensor("q", q, shape=("B", "T", "H", "K"))
    B, T, H, K = q.shape
    check_tensor("k", k, shape=(B, T, H, K), dtypes=(q.dtype,), like=q)
    check_tensor("v", v, shape=(B, T, "HV", "V"), dtypes=(q.dtype,), like=q)
    HV, V = v.shape[2:]
    if H == 0 or HV % H != 0:
        raise ValueError(f"v: expected a number of value heads that is a multiple of the {H} key heads of q, found {HV}")
    for name, size in (("K", K), ("V", V)):
        if not 1 <= size <= MAX_HEAD_DIM:
            raise ValueError(f"{name}: expected a head size between 1 and {MAX_HEAD_DIM}, found {size}")
    check_tensor("g", g, shape=(B, T, HV), like=q)
    check_tensor("beta", beta, shape=(B, T, HV), like=q)


def _check_gate(use_gate: bool, A_log, dt_bias, HV: int, q: torch.Tensor) -> None:
    if not use_gate:
        for name, x in (("A_log", A_log), ("dt_bias", dt_bias)):
            if x is not None:
                raise ValueError(f"{name}: expected None without use_gate_in_kernel, found a tensor; "
                                 "pass use_gate_in_kernel=True or leave it out")
        return
    if A_log is None:
        raise ValueError("A_log: expected a tensor [HV] with use_gate_in_kernel=True, found None")
    check_tensor("A_log", A_log, shape=(HV,), like=q)
    if dt_bias is not None:
        check_tensor("dt_bias", dt_bias, shape=(HV,), like=q)
