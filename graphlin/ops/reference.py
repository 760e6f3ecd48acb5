"""The specification: per-token recurrences in plain PyTorch, differentiated by autograd.

Slow, simple and as exact as the dtype of the inputs: tests call these in float64. They read lengths on the host and
are never captured.
"""

from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

_SEGMENT = 64      # tokens between two states that autograd keeps; the ones between are computed again in backward


def gated_delta_rule_reference(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None,
                               initial_state: Tensor | None = None, output_final_state: bool = False, *,
                               use_qk_l2norm_in_kernel: bool = False, use_gate_in_kernel: bool = False,
                               A_log: Tensor | None = None, dt_bias: Tensor | None = None,
                               use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False,
                               state_v_first: bool = False,
                               cu_seqlens: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Gated delta rule, one token at a time (Yang et al., "Gated Delta Networks", arXiv:2412.06464).

    With `g` the log decay and `beta` the write strength of a value head, and `S` its `[K, V]` state:

        S <- exp(g_t) S;    S <- S + beta_t k_t (v_t - S^T k_t)^T;    o_t = scale S^T q_t

    Arguments are those of `chunk_gated_delta_rule`: q, k `[B, T, H, K]`, v `[B, T, HV, V]`, g, beta `[B, T, HV]`,
    A_log, dt_bias `[HV]`, states `[N, HV, K, V]` (`[N, HV, V, K]` with `state_v_first`), cu_seqlens `[N + 1]`.
    `scale` defaults to `K ** -0.5`. With `use_gate_in_kernel`, `g` is replaced by `-exp(A_log) softplus(g + dt_bias)`.
    Arithmetic and results are float64 for float64 inputs and float32 otherwise. Rows at and after `cu_seqlens[-1]` are
    never read and come out as 0.

    >>> o, final_state = gated_delta_rule_reference(q, k, v, g, beta, output_final_state=True)
    """
    tokens = q.shape[1]
    q, k, v, g, beta = (_active_rows(x, cu_seqlens) for x in (q, k, v, g, beta))
    log_decay = softplus_gate(g, A_log, dt_bias) if use_gate_in_kernel else g
    return _delta_rule(q, k, v, log_decay[..., None], _write_strength(beta, use_beta_sigmoid_in_kernel, allow_neg_eigval),
                       scale, initial_state, output_final_state, l2norm=use_qk_l2norm_in_kernel,
                       state_v_first=state_v_first, cu_seqlens=cu_seqlens, tokens=tokens)


def kda_reference(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None,
                  initial_state: Tensor | None = None, output_final_state: bool = False, *,
                  use_qk_l2norm_in_kernel: bool = False, use_gate_in_kernel: bool = False, A_log: Tensor | None = None,
                  dt_bias: Tensor | None = None, use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False,
                  state_v_first: bool = False, cu_seqlens: Tensor | None = None,
                  lower_bound: float | None = None) -> tuple[Tensor, Tensor | None]:
    """Kimi Delta Attention, one token at a time (Kimi Team, "Kimi Linear", arXiv:2510.26692).

    The gated delta rule with a log decay g `[B, T, HV, K]` of each channel, `S <- exp(g_t)[:, None] S`, and otherwise as
    `gated_delta_rule_reference`; dt_bias is `[HV * K]`. With `lower_bound` the gate is
    `lower_bound sigmoid(exp(A_log) (g + dt_bias))`, and A_log may be absent, which is 0.

    >>> o, final_state = kda_reference(q, k, v, g, beta, output_final_state=True)
    """
    tokens = q.shape[1]
    q, k, v, g, beta = (_active_rows(x, cu_seqlens) for x in (q, k, v, g, beta))
    if use_gate_in_kernel:
        A_log = g.new_zeros(v.shape[2]) if A_log is None else A_log
        dt_bias = None if dt_bias is None else dt_bias.view(g.shape[2:])
        gate = softplus_gate if lower_bound is None else partial(bounded_gate, lower_bound=lower_bound)
        g = gate(g, A_log[:, None], dt_bias)
    return _delta_rule(q, k, v, g, _write_strength(beta, use_beta_sigmoid_in_kernel, allow_neg_eigval), scale, initial_state,
                       output_final_state, l2norm=use_qk_l2norm_in_kernel, state_v_first=state_v_first,
                       cu_seqlens=cu_seqlens, tokens=tokens)


def softplus_gate(g: Tensor, A_log: Tensor, dt_bias: Tensor | None) -> Tensor:
    """Log decay `-exp(A_log) softplus(g + dt_bias)` of raw `g` `[..., HV]`; softplus is exact everywhere."""
    biased = g if dt_bias is None else g + dt_bias
    return -_decay_rate(A_log) * torch.logaddexp(biased, torch.zeros_like(biased))


def bounded_gate(g: Tensor, A_log: Tensor, dt_bias: Tensor | None, lower_bound: float) -> Tensor:
    """Log decay `lower_bound sigmoid(exp(A_log) (g + dt_bias))`."""
    biased = g if dt_bias is None else g + dt_bias
    return lower_bound * torch.sigmoid(_decay_rate(A_log) * biased)


def _decay_rate(A_log: Tensor) -> Tensor:
    """`exp(A_log)`, where A_log above 80 acts as 80."""
    return A_log.clamp(max=80).exp()


def delta_rule_recurrence(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor,
                          scale: float) -> tuple[Tensor, Tensor]:
    """The recurrence itself, over a batch of sequences of equal length.

    q, k `[N, L, HV, K]`, v `[N, L, HV, V]`, log decay g `[N, L, HV, K]` (per channel) or `[N, L, HV, 1]` (per head),
    beta `[N, L, HV]`, state `[N, HV, K, V]`. Returns o like v and the last state. A row of zeros leaves the state as it
    is, to the bit, which makes zero padding exact.
    """
    outputs = []
    for start in range(0, q.shape[1], _SEGMENT):
        rows = slice(start, start + _SEGMENT)
        o, state = checkpoint(_segment, q[:, rows], k[:, rows], v[:, rows], g[:, rows], beta[:, rows], state, scale,
                              use_reentrant=False, preserve_rng_state=False)
        outputs.append(o)
    return torch.cat(outputs, 1) if outputs else v, state


def _segment(q, k, v, g, beta, state, scale):
    decay, written, outputs = g.exp(), beta[..., None] * k, []
    for t in range(q.shape[1]):
        state = decay[:, t, :, :, None] * state
        error = v[:, t] - _read(state, k[:, t])
        state = state + written[:, t, :, :, None] * error[:, :, None, :]
        outputs.append(scale * _read(state, q[:, t]))
    return torch.stack(outputs, 1), state


def _read(state: Tensor, key: Tensor) -> Tensor:
    """`S^T key` of each sequence and head: `[N, HV, K, V]`, `[N, HV, K]` -> `[N, HV, V]`."""
    return (key[:, :, None, :] @ state)[:, :, 0]


def _delta_rule(q, k, v, g, beta, scale, initial_state, output_final_state, *, l2norm, state_v_first, cu_seqlens, tokens):
    """What the delta rules share around their recurrence: active rows in, `tokens` rows out.

    g is `[B, T, HV, 1]` or `[B, T, HV, K]`.
    """
    K, V, HV = q.shape[-1], v.shape[-1], v.shape[2]
    if l2norm:
        q, k = _l2norm(q), _l2norm(k)
    rows = [q.repeat_interleave(HV // q.shape[2], 2), k.repeat_interleave(HV // k.shape[2], 2), v, g, beta]
    if cu_seqlens is not None:
        active = _active_mask(cu_seqlens)
        rows = [_to_sequences(x, active) for x in rows]
    if initial_state is None:
        state = v.new_zeros(rows[0].shape[0], HV, K, V)
    else:
        state = _compute(initial_state.transpose(-1, -2) if state_v_first else initial_state)
    o, state = delta_rule_recurrence(*rows, state, K ** -0.5 if scale is None else scale)
    if cu_seqlens is not None:
        o = _to_rows(o, active, tokens)
    if not output_final_state:
        return o, None
    return o, state.transpose(-1, -2) if state_v_first else state


def _compute(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _active_rows(x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """The rows of x `[B, T, ...]` that belong to a sequence, in the dtype of the arithmetic."""
    return _compute(x if cu_seqlens is None else x[:, :int(cu_seqlens[-1])])


def _l2norm(x: Tensor) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def _write_strength(beta: Tensor, use_sigmoid: bool, allow_neg_eigval: bool) -> Tensor:
    if not use_sigmoid:
        return beta
    return (2 if allow_neg_eigval else 1) * beta.sigmoid()


def _active_mask(cu_seqlens: Tensor) -> Tensor:
    """`[N, L]`, true at the tokens of each sequence, with L the longest length."""
    lengths = cu_seqlens.diff()
    longest = max(lengths.tolist(), default=0)
    return torch.arange(longest, device=cu_seqlens.device) < lengths[:, None]


def _to_sequences(x: Tensor, active: Tensor) -> Tensor:
    """Packed `[1, T, ...]` to sequences padded with zeros `[N, L, ...]`."""
    return x.new_zeros(*active.shape, *x.shape[2:]).index_put((active,), x[0])


def _to_rows(x: Tensor, active: Tensor, tokens: int) -> Tensor:
    """The way back: `[N, L, ...]` to `[1, T, ...]`, with zeros at rows that belong to no sequence."""
    rows = x[active]
    return F.pad(rows, (0, 0) * (rows.dim() - 1) + (0, tokens - rows.shape[0]))[None]


def prepare_chunk_indices_reference(cu_seqlens: Tensor, max_tokens: int, chunk_size: int = 64) -> Tensor:
    """Chunk table `[NT_max, 2]` int32: `(sequence, chunk in sequence)` of each chunk in order, then rows of -1.

    NT_max is the most chunks that N sequences of `max_tokens` tokens together can have.
    """
    lengths = cu_seqlens.diff().tolist()
    table = [(i_n, i_t) for i_n, n in enumerate(lengths) for i_t in range(-(-n // chunk_size))]
    occupied = min(max_tokens, len(lengths))
    table += [(-1, -1)] * (occupied + (max_tokens - occupied) // chunk_size - len(table))
    return torch.tensor(table, dtype=torch.int32, device=cu_seqlens.device).reshape(-1, 2)


def chunk_local_cumsum_reference(g: Tensor, chunk_size: int = 64, reverse: bool = False, *,
                                 cu_seqlens: Tensor | None = None) -> Tensor:
    """Inclusive sum of `g` `[B, T, ...]` along tokens, started anew at each chunk of each sequence.

    `reverse` sums from a chunk's last token down to its first. Rows of no sequence are 0. Float32, or float64 for
    float64 input.
    """
    cuts = [0, g.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
    sums = torch.zeros_like(_compute(g))
    for first, last in pairwise(cuts):
        for start in range(first, last, chunk_size):
            rows = slice(start, min(start + chunk_size, last))
            chunk = _compute(g[:, rows])
            sums[:, rows] = chunk.flip(1).cumsum(1).flip(1) if reverse else chunk.cumsum(1)
    return sums


def causal_conv1d_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None,
                            initial_state: Tensor | None = None, output_final_state: bool = False,
                            activation: str | None = None, *,
                            cu_seqlens: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Short causal convolution, one sequence at a time.

        y_t = act(bias + sum_j weight[:, W-1-j] x_{t-j}) + residual_t

    with j from 0 to W-1 and the rows before a sequence's first from its initial state, whose last slot is the newest.
    Arguments are those of `causal_conv1d`: x, residual `[B, T, D]`, weight `[D, W]`, bias `[D]`, states `[N, D, W]`,
    activation None, "silu" or "swish", cu_seqlens `[N + 1]`. Arithmetic and results are float64 for float64 inputs and
    float32 otherwise. Rows at and after `cu_seqlens[-1]` are never read and come out as 0.

    >>> y, final_state = causal_conv1d_reference(x, weight, activation="silu", output_final_state=True)
    """
    tokens, width = x.shape[1], weight.shape[1]
    x, weight = _compute(x), _compute(weight)
    sequences = list(x) if cu_seqlens is None else [x[0, a:b] for a, b in pairwise(cu_seqlens.tolist())]
    outputs, states = [], []
    for i, rows in enumerate(sequences):
        before = x.new_zeros(width, x.shape[2]) if initial_state is None else initial_state[i].to(x.dtype).T
        extended = torch.cat([before, rows])
        outputs.append(torch.einsum("tdw,dw->td", extended.unfold(0, width, 1)[1:], weight))
        states.append(extended[len(rows):].T)
    y = torch.stack(outputs) if cu_seqlens is None else torch.cat(outputs)[None]
    if bias is not None:
        y = y + bias
    if activation is not None:
        y = F.silu(y)
    if residual is not None:
        y = y + residual[:, :y.shape[1]]
    y = F.pad(y, (0, 0, 0, tokens - y.shape[1]))
    return y, torch.stack(states) if output_final_state else None


def gated_rms_norm_reference(x: Tensor, weight: Tensor, gate: Tensor | None = None, eps: float = 1e-5,
                             activation: str = "silu") -> Tensor:
    """RMS normalisation over the last dimension (Zhang and Sennrich, arXiv:1910.07467), times the activation of a gate.

        y = x / sqrt(mean(x^2) + eps) * weight * act(gate)

    Arguments are those of `gated_rms_norm`: x, gate `[..., D]`, weight `[D]`, activation "silu", "swish" or "sigmoid".
    Arithmetic and result are float64 for float64 inputs and float32 otherwise.

    >>> y = gated_rms_norm_reference(x, weight, gate)
    """
    x = _compute(x)
    y = x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * _compute(weight)
    if gate is None:
        return y
    gate = _compute(gate)
    return y * (gate.sigmoid() if activation == "sigmoid" else F.silu(gate))
