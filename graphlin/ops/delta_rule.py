"""What the delta rules share around their kernels: argument checks, and one autograd function over a family's kernels."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from numbers import Real

import torch

from graphlin.kernels.ahead import apply
from graphlin.kernels.delta_problem import Operands, Prologue
from graphlin.kernels.delta_recurrence import run_recurrence
from graphlin.kernels.delta_two_recurrences import run_two_recurrences
from graphlin.kernels.packing import Packing
from graphlin.kernels.reduce import reduce_partials
from graphlin.ops.first_order import first_order
from graphlin.ops.parts import Parts, with_a_row
from graphlin.ops.validation import check_tensor, in_memory, read_values

MAX_HEAD_DIM = 256
LOWEST_BOUND = -5.0      # of log decays that a bounded gate, or a promise, keeps


@dataclass(frozen=True)
class Family:
    """The kernels of one delta rule: the first, before the recurrence, and those of the gradients after both recurrences.

    They return `Operands`; and dq, dk, dg, dbeta with per-chunk partials `[NT, ...]` of dA_log `[HV]`, then ddt_bias, or None.
    """

    prep: Callable[..., Operands]
    gradients: Callable[..., tuple]


@dataclass(frozen=True)
class Call:
    """What one call asks for, apart from its tensors; gate to needs_grad as in `Prologue`. parts: a `cp_context`."""

    family: Family
    packing: Packing
    scale: float
    output_final_state: bool
    state_v_first: bool
    l2norm: bool
    gate: int
    beta_range: float
    lower_bound: float | None = None
    safe_gate: bool = False
    needs_grad: bool = False
    parts: Parts | None = None

    def prologue(self, A_log: torch.Tensor | None, dt_bias: torch.Tensor | None) -> Prologue:
        return Prologue(self.l2norm, self.gate, A_log, dt_bias, self.beta_range, self.lower_bound, self.safe_gate,
                        self.needs_grad)

    def states_in(self, operands: Operands, v: torch.Tensor, h0: torch.Tensor | None) -> tuple[tuple, torch.Tensor | None]:
        """What is carried from rank to rank, and the states from which the recurrences start."""
        if self.parts is None:
            return (), h0
        carried = self.parts.carry_states(operands, v, h0, self.state_v_first, self.packing)
        return carried, self.parts.states_in(h0, carried, self.state_v_first)

    def states_and_gradients(self, operands: Operands, do: torch.Tensor, h0: torch.Tensor | None, dht: torch.Tensor | None,
                             carried: tuple) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The states from which the recurrences start, and the gradients of those in which they end."""
        if self.parts is None:
            return h0, dht
        dends = self.parts.gradients_out(operands, do, dht, carried, self.state_v_first, self.packing)
        return self.parts.states_in(h0, carried, self.state_v_first), dends


class DeltaRule(torch.autograd.Function):
    """Two launches forward, three where long sequences are split; backward the family's own after one, and one reduction where
    a gate's parameters are learned."""

    @staticmethod
    def forward(ctx, q, k, v, g, beta, A_log, dt_bias, h0, call: Call):
        ctx.set_materialize_grads(False)
        ctx.call = call
        if v.numel() == 0:
            ctx.save_for_backward(None, None, q, k, v, g, beta, A_log, dt_bias, h0)
            return _empty_forward(v, h0, q.shape[3], call)
        operands = call.family.prep(q, k, g, beta, call.prologue(A_log, dt_bias), call.packing, call.scale)
        carried, states = call.states_in(operands, v, h0)
        o, ht = run_recurrence(operands, v, states, call.output_final_state, call.state_v_first, call.packing)
        # cu_seqlens and the table are saved so that autograd notices when they are written before the backward.
        ctx.save_for_backward(call.packing.cu, call.packing.chunks, q, k, v, g, beta, A_log, dt_bias, h0, *operands, *carried)
        return o, ht if ht is None or call.parts is None else call.parts.at_end(ht)

    @staticmethod
    @first_order
    def backward(ctx, do, dht):
        _, _, q, k, v, g, beta, A_log, dt_bias, h0, *kept = ctx.saved_tensors
        call = ctx.call
        if not kept:
            dh0 = None if h0 is None else torch.zeros_like(h0) if dht is None else dht.to(h0.dtype)
            return *[None if x is None else torch.zeros_like(x) for x in (q, k, v, g, beta, A_log, dt_bias)], dh0, None
        operands, carried = Operands(*kept[:len(Operands._fields)]), kept[len(Operands._fields):]
        prologue = call.prologue(A_log, dt_bias)
        do = torch.zeros_like(v) if do is None else in_memory(do)
        dht = None if dht is None else in_memory(dht)
        states, dends = call.states_and_gradients(operands, do, h0, dht, carried)
        St, E, Rt, dv, dh0 = run_two_recurrences(operands, v, do, states, dends, ctx.needs_input_grad[7], call.state_v_first,
                                                 call.packing)
        if dh0 is not None and call.parts is not None:
            dh0 = call.parts.at_start(dh0).to(h0.dtype)
        dq, dk, dg, dbeta, partials = call.family.gradients(q, k, g, beta, do, E, dv, St, Rt, operands, prologue, call.packing,
                                                            call.scale)
        dA_log = ddt_bias = None
        if partials is not None and (ctx.needs_input_grad[5] or ctx.needs_input_grad[6]):
            sums = reduce_partials(partials.flatten(1), call.packing)
            dA_log, ddt_bias = sums.split([v.shape[2], sums.shape[0] - v.shape[2]])
            dA_log = None if A_log is None else dA_log.to(A_log.dtype)
            ddt_bias = None if dt_bias is None else ddt_bias.to(dt_bias.dtype)
        return dq, dk, dv, dg, dbeta, dA_log, ddt_bias, dh0, None


def _empty_forward(v, h0, K, call):
    """No token or no head: nothing to launch, and the states pass through."""
    o = torch.empty_like(v)
    if not call.output_final_state:
        return o, None
    if h0 is not None:
        return o, h0.to(torch.float32, copy=True)
    return o, v.new_zeros(call.packing.N, *state_shape(v, K, call.state_v_first), dtype=torch.float32)


def state_shape(v: torch.Tensor, K: int, state_v_first: bool) -> tuple[int, int, int]:
    """Shape of one sequence's state."""
    HV, V = v.shape[2:]
    return (HV, V, K) if state_v_first else (HV, K, V)


def apply_delta_rule(q, k, v, g, beta, A_log, dt_bias, initial_state, call: Call) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Checks the state and runs the op on contiguous tensors."""
    if initial_state is not None:
        shape = (call.packing.N, *state_shape(v, q.shape[3], call.state_v_first))
        check_tensor("initial_state", initial_state, shape=shape, like=q)
        initial_state = in_memory(initial_state)
    A_log, dt_bias = (None if x is None else in_memory(x) for x in (A_log, dt_bias))
    tokens = v.shape[1]
    packing, *rows = with_a_row(call.parts, call.packing, q, k, v, g, beta)
    tensors = *[in_memory(x) for x in rows], A_log, dt_bias, initial_state
    needs_grad = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    run = partial(apply, DeltaRule) if call.parts is None else DeltaRule.apply
    o, final_state = run(*tensors, replace(call, packing=packing, needs_grad=needs_grad))
    return o if tokens else o[:, :0], final_state


def strength_range(use_sigmoid: bool, allow_neg_eigval: bool) -> float:
    """The factor on `sigmoid(beta)`; 0 where beta is given as it is."""
    return (2.0 if allow_neg_eigval else 1.0) if use_sigmoid else 0.0


def check_inputs(q, k, v, g, beta, per_channel: bool) -> None:
    """q to beta: shapes, dtypes, devices and head sizes; g has a value for each channel, or one for each head."""
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
    check_tensor("g", g, shape=(B, T, HV, K) if per_channel else (B, T, HV), like=q)
    check_tensor("beta", beta, shape=(B, T, HV), like=q)


def check_gate(use_gate: bool, A_log, dt_bias, HV: int, biases: int, q: torch.Tensor, lower_bound: float | None = None) -> None:
    """The gate's parameters: A_log `[HV]`, dt_bias of `biases` values, and the bound, without which A_log is required."""
    if not use_gate:
        for name, x in (("A_log", A_log), ("dt_bias", dt_bias), ("lower_bound", lower_bound)):
            if x is not None:
                found = "a tensor" if isinstance(x, torch.Tensor) else repr(x)
                raise ValueError(f"{name}: expected None without use_gate_in_kernel, found {found}; "
                                 "pass use_gate_in_kernel=True or leave it out")
        return
    if lower_bound is not None:
        if isinstance(lower_bound, bool) or not isinstance(lower_bound, Real):
            raise TypeError(f"lower_bound: expected a number, found {type(lower_bound).__name__}")
        if not LOWEST_BOUND <= lower_bound < 0:
            raise ValueError(f"lower_bound: expected a log decay in [{LOWEST_BOUND:g}, 0), found {lower_bound}")
    if A_log is not None:
        check_tensor("A_log", A_log, shape=(HV,), like=q)
    elif lower_bound is None:
        raise ValueError("A_log: expected a tensor [HV] with use_gate_in_kernel=True, found None")
    if dt_bias is not None:
        check_tensor("dt_bias", dt_bias, shape=(biases,), like=q)


def check_log_decays(g: torch.Tensor, packing: Packing, lowest: float | None = None) -> None:
    """Reads active log decays on the host: they must be <= 0, and at least `lowest` where that was promised."""
    active = g[:, :read_values("cu_seqlens", packing.cu[-1], "validate=True")] if packing.varlen else g
    if read_values("g", (active > 0).any(), "validate=True"):
        raise ValueError("g: expected log decays <= 0, found a positive value; pass log(decay), or use_gate_in_kernel=True")
    if lowest is not None and read_values("g", (active < lowest).any(), "validate=True"):
        raise ValueError(f"g: expected log decays >= {lowest:g} with safe_gate=True, found a lower value; pass safe_gate=False")
