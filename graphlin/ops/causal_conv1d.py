"""Short causal convolution as a differentiable op."""

from functools import partial

import torch

from graphlin.kernels.ahead import apply
from graphlin.kernels.conv import MAX_WIDTH, run_conv_forward
from graphlin.kernels.conv_backward import run_conv_backward
from graphlin.kernels.packing import Packing
from graphlin.ops.chunks import resolve_packing
from graphlin.ops.first_order import first_order
from graphlin.ops.parts import Parts, resolve_parts, with_a_row
from graphlin.ops.validation import check_tensor, in_memory

ACTIVATIONS = (None, "silu", "swish")


def causal_conv1d(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, residual: torch.Tensor | None = None,
    initial_state: torch.Tensor | None = None, output_final_state: bool = False, activation: str | None = None, *,
    cu_seqlens: torch.Tensor | None = None, chunk_indices: torch.Tensor | None = None, chunk_size: int = 64,
    graph_capture: bool | None = None, validate: bool = False, cp_context: Parts | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Depthwise causal convolution over dense or packed sequences, differentiable in every tensor argument.

    `y[t] = act(bias + Σ_j weight[:, W-1-j] · x[t-j]) + residual[t]`, j from 0 to W-1, where rows before the first of a
    sequence come from its initial state (the operator of Tri Dao's causal-conv1d and of flash-linear-attention). Sums
    are float32. Packed input is processed without a host sync and can be captured; a sequence's results do not depend
    on the rest of the batch, nor y and the gradient of x on chunk_size, bit for bit.

    Args:
        x: `[B, T, D]`, float32, float16 or bfloat16.
        weight: `[D, W]`, any of these dtypes; W from 1 to 8, the last column weighs the token itself.
        bias: `[D]`, any of these dtypes, default none.
        residual: `[B, T, D]`, any of these dtypes, added after the activation; default none.
        initial_state: `[N, D, W]`, any of these dtypes: the W inputs before the first, slot W-1 the newest; default
            zeros. N is B, or the number of packed sequences.
        output_final_state: return the last W inputs of each sequence, to be the initial state of what follows.
        activation: None, "silu" or "swish" (the same).
        cu_seqlens: `[N + 1]` int32 or int64 on x's device, cumulative lengths of the packed sequences; B must be 1.
            Rows at and after `cu_seqlens[-1]` are inactive: never read, and 0 in y and in every gradient.
        chunk_indices: table of `prepare_chunk_indices` for the same cu_seqlens and chunk_size; built if None.
        chunk_size: 16, 32 or 64 rows that one program works on.
        graph_capture: None or True: the static path, no host sync. False: an exact grid, whose table is chunk_indices
            (without sentinels) or is read from cu_seqlens on the host.
        validate: check the values of cu_seqlens (a host sync; refused inside a capture).
        cp_context: from `graphlin.parallel.context_parallel`, instead of cu_seqlens, where the batch's tokens are split over
            ranks (docs/parallel.md). N is then the whole batch's number of sequences; a rank returns the final states of those
            that end on it, 0 for others.

    Returns:
        y `[B, T, D]` in x's dtype, and the final state `[N, D, W]` or None. The final state has the initial state's
        dtype, so that states of float32 stay float32 from call to call; without an initial state, x's.

    Raises:
        TypeError, ValueError: naming the argument, the expected and the found value.
        HostSync: graph_capture=False without chunk_indices, or validate, inside a capture.
        BackendUnavailable: no backend for the device.

    >>> x, weight = torch.randn(1, 100, 256, device="cuda"), torch.randn(256, 4, device="cuda")
    >>> y, _ = causal_conv1d(x, weight, activation="silu", cu_seqlens=torch.tensor([0, 30, 100], device="cuda"))
    """
    check_tensor("x", x, shape=("B", "T", "D"))
    cu_seqlens, chunk_indices = resolve_parts(cp_context, cu_seqlens, chunk_indices, x.shape[1], chunk_size, graph_capture)
    packing = resolve_packing("x", x, cu_seqlens, chunk_indices, chunk_size, graph_capture, validate)
    _check_parameters(x, weight, bias, activation)
    if residual is not None:
        check_tensor("residual", residual, shape=tuple(x.shape), like=x)
    if initial_state is not None:
        check_tensor("initial_state", initial_state, shape=(packing.N, *weight.shape), like=x)
    packing, rows, added = with_a_row(cp_context, packing, x, residual)
    tensors = [None if t is None else in_memory(t) for t in (rows, weight, bias, added, initial_state)]
    run = partial(apply, CausalConv1d) if cp_context is None else CausalConv1d.apply
    y, final_state = run(*tensors, bool(output_final_state), activation is not None, packing, cp_context)
    return y if x.shape[1] else y[:, :0], final_state


class CausalConv1d(torch.autograd.Function):
    """One launch forward; backward one, and one reduction over the chunks."""

    @staticmethod
    def forward(ctx, x, weight, bias, residual, initial_state, output_final_state, silu, packing: Packing, parts: Parts | None):
        ctx.set_materialize_grads(False)
        states = initial_state if parts is None else parts.rows_in(x, weight.shape[1], initial_state)
        # cu_seqlens and the table are saved so that autograd notices when they are written before the backward.
        ctx.save_for_backward(packing.cu, packing.chunks, x, weight, bias, states)
        ctx.options = (None if residual is None else residual.dtype, None if initial_state is None else initial_state.dtype, silu,
                       packing, parts)
        y, final = run_conv_forward(x, weight, bias, residual, states, output_final_state, silu, packing)
        if parts is not None and final is not None:
            final = parts.at_end(final).to(x.dtype if initial_state is None else initial_state.dtype)
        return y, final

    @staticmethod
    @first_order
    def backward(ctx, dy, dfinal):
        _, _, x, weight, bias, states = ctx.saved_tensors
        residual_dtype, state_dtype, silu, packing, parts = ctx.options
        _, _, _, want_residual, want_initial, *_ = ctx.needs_input_grad
        dy = torch.zeros_like(x) if dy is None else in_memory(dy)
        if dfinal is not None:
            dfinal = in_memory(dfinal if parts is None else parts.at_end(dfinal))
        want_states = want_initial or (parts is not None and states is not None)
        dx, *grads, dstates = run_conv_backward(x, weight, bias, states, dy, dfinal, residual_dtype if want_residual else None,
                                                want_states, silu, packing)
        if parts is not None:
            dstates = parts.rows_out(dx, dstates, weight.shape[1])
        return dx, *grads, dstates.to(state_dtype) if want_initial else None, None, None, None, None


def _check_parameters(x, weight, bias, activation) -> None:
    D = x.shape[2]
    check_tensor("weight", weight, shape=(D, "W"), like=x)
    if not 1 <= weight.shape[1] <= MAX_WIDTH:
        raise ValueError(f"weight: expected a width W between 1 and {MAX_WIDTH}, found {weight.shape[1]}")
    if bias is not None:
        check_tensor("bias", bias, shape=(D,), like=x)
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation: expected None, 'silu' or 'swish', found {activation!r}")
