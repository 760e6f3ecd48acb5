"""What the delta rule layers share: projections, convolutions, states and the call, around a rule of their own."""

import math
from abc import ABC, abstractmethod

import torch
from torch import nn
from torch.nn import functional as F

from graphlin.layers.inactive import zero_inactive_rows
from graphlin.layers.norm import GatedRMSNorm
from graphlin.layers.short_convolution import ShortConvolution
from graphlin.ops.chunks import prepare_chunk_indices
from graphlin.ops.parts import Parts, check_parts

# Range of the step sizes softplus(dt_bias) at the start, as in Mamba-2 (arXiv 2405.21060).
DT_MIN, DT_MAX = 1e-3, 1e-1

States = tuple[torch.Tensor, ...]


class DeltaRuleLayer(nn.Module, ABC):
    """Base of the layers over dense `[B, T]` or packed `[1, T]` sequences.

    A layer calls the `_add` methods in the order in which flash-linear-attention registers its modules, since optimiser
    states are kept by parameter order, and defines `_draw_rate`, `_delta_rule` and `_output_gate`.

    Raises ValueError if expand_v gives no integer width or num_v_heads is no multiple of num_heads.
    """

    def __init__(self, hidden_size: int, expand_v: float, head_dim: int, num_heads: int, num_v_heads: int | None,
                 use_short_conv: bool, allow_neg_eigval: bool, chunk_size: int) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.head_k_dim, self.head_v_dim = head_dim, _value_width(head_dim, expand_v)
        self.num_heads = num_heads
        self.num_v_heads = num_heads if num_v_heads is None else num_v_heads
        if self.num_v_heads % num_heads:
            raise ValueError(f"num_v_heads: expected a multiple of num_heads={num_heads}, found {num_v_heads}")
        self.use_short_conv = use_short_conv
        self.allow_neg_eigval = allow_neg_eigval
        self.chunk_size = chunk_size
        self.key_dim, self.value_dim = num_heads * head_dim, self.num_v_heads * self.head_v_dim

        self.q_proj = nn.Linear(hidden_size, self.key_dim, bias=False)
        self.k_proj = nn.Linear(hidden_size, self.key_dim, bias=False)
        self.v_proj = nn.Linear(hidden_size, self.value_dim, bias=False)

    def _add_convolutions(self, width: int, bias: bool) -> None:
        if self.use_short_conv:
            self.q_conv1d = ShortConvolution(self.key_dim, width, bias)
            self.k_conv1d = ShortConvolution(self.key_dim, width, bias)
            self.v_conv1d = ShortConvolution(self.value_dim, width, bias)

    def _add_strength_and_gate(self, num_steps: int) -> None:
        """The write strength, and the gate's parameters: a rate A for each value head, and `num_steps` step sizes."""
        self.b_proj = nn.Linear(self.hidden_size, self.num_v_heads, bias=False)
        self.A_log = nn.Parameter(torch.empty(self.num_v_heads))
        self.dt_bias = nn.Parameter(torch.empty(num_steps))
        # Optimisers that split parameters by this mark keep weight decay off the gate.
        self.A_log._no_weight_decay = self.dt_bias._no_weight_decay = True
        self.reset_gate_parameters()

    def _add_output(self, norm_eps: float, activation: str) -> None:
        self.o_norm = GatedRMSNorm(self.head_v_dim, norm_eps, activation)
        self.o_proj = nn.Linear(self.value_dim, self.hidden_size, bias=False)

    @torch.no_grad()
    def reset_gate_parameters(self) -> None:
        """Draws the rate by `_draw_rate`, and the step size log-uniformly from (1e-3, 1e-1), as flash-linear-attention does."""
        self._draw_rate()
        step = self.dt_bias.uniform_(math.log(DT_MIN), math.log(DT_MAX)).exp_()
        step.add_(torch.log(-torch.expm1(-step)))  # the inverse of softplus

    def forward(self, hidden_states: torch.Tensor, cu_seqlens: torch.Tensor | None = None,
                chunk_indices: torch.Tensor | None = None, initial_state: States | None = None,
                output_final_state: bool = False, cp_context: Parts | None = None) -> torch.Tensor | tuple[torch.Tensor, States]:
        """Mixes tokens within each sequence.

        Args:
            hidden_states: `[B, T, hidden_size]`; with cu_seqlens B is 1 and rows from cu_seqlens[-1] on are ignored.
            cu_seqlens: `[N + 1]` int32 or int64 starts of the packed sequences; never changed. Default: N = B rows.
            chunk_indices: the table of `graphlin.prepare_chunk_indices(cu_seqlens, T, chunk_size)`, where the caller
                has built it for several layers. Default: built here.
            initial_state: the states of an earlier call, one row a sequence. Default: zeros.
            output_final_state: return the states after the last token too. Default: False.
            cp_context: from `graphlin.parallel.context_parallel`, instead of cu_seqlens, where the batch's tokens are split over
                ranks: hidden_states are this rank's, N counts the whole batch's sequences. Default: none.

        Returns `o`, shaped like hidden_states, or `(o, states)`. `states` is the delta rule's state
        `[N, num_v_heads, head_dim, head_v_dim]` and, with short convolutions, the last inputs of q, k and v
        `[N, channels, conv_size]`.

        Raises ValueError naming the argument where a shape does not fit, and where its dtype is not that of all projections
        (without autocast; gate parameters and norms may be float32 in a bfloat16 layer).
        """
        if cp_context is not None:
            check_parts(cp_context, cu_seqlens, chunk_indices)
        active = cu_seqlens if cp_context is None else cp_context.cu_seqlens
        self._check(hidden_states, active, initial_state)
        if active is not None:
            hidden_states = zero_inactive_rows(hidden_states, active)
        if cu_seqlens is not None and chunk_indices is None:
            chunk_indices = prepare_chunk_indices(cu_seqlens, hidden_states.shape[1], self.chunk_size)
        packing = {"cu_seqlens": cu_seqlens, "chunk_indices": chunk_indices, "chunk_size": self.chunk_size,
                   "cp_context": cp_context}

        delta_state, *conv_states = initial_state or (None,) * self._num_states
        qkv, conv_states = self._mix_locally(hidden_states, conv_states, output_final_state, packing)
        qkv = [x.unflatten(-1, (-1, width)) for x, width in
               zip(qkv, (self.head_k_dim, self.head_k_dim, self.head_v_dim), strict=True)]
        o, delta_state = self._delta_rule(
            hidden_states, *qkv, beta=self.b_proj(hidden_states), initial_state=delta_state,
            output_final_state=output_final_state, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True,
            A_log=self.A_log, dt_bias=self.dt_bias, use_beta_sigmoid_in_kernel=True,
            allow_neg_eigval=self.allow_neg_eigval, **packing)

        gate = self._output_gate(hidden_states)
        o = self.o_norm(o, None if gate is None else gate.unflatten(-1, (-1, self.head_v_dim)))
        o = self.o_proj(o.flatten(-2))
        return (o, (delta_state, *conv_states)) if output_final_state else o

    @abstractmethod
    def _draw_rate(self) -> None:
        """Fills A_log."""

    @abstractmethod
    def _delta_rule(self, hidden_states: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                    **options) -> tuple[torch.Tensor, torch.Tensor | None]:
        """o `[B, T, num_v_heads, head_v_dim]` and the final state; options hold beta and what all rules take."""

    @abstractmethod
    def _output_gate(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """What o_norm's activation takes, `[B, T, value_dim]`, or None."""

    def _mix_locally(self, hidden_states: torch.Tensor, states: list, output_final_state: bool, packing: dict) -> tuple:
        """The convolved q, k and v `[B, T, channels]`, and the states of the convolutions."""
        projected = [proj(hidden_states) for proj in (self.q_proj, self.k_proj, self.v_proj)]
        if not self.use_short_conv:
            return [F.silu(x) for x in projected], ()
        convs = (self.q_conv1d, self.k_conv1d, self.v_conv1d)
        return zip(*(conv(x, state, output_final_state, **packing)
                     for conv, x, state in zip(convs, projected, states, strict=True)), strict=True)

    @property
    def _num_states(self) -> int:
        return 4 if self.use_short_conv else 1

    def _check(self, hidden_states: torch.Tensor, cu_seqlens: torch.Tensor | None, initial_state: States | None) -> None:
        if hidden_states.ndim != 3 or hidden_states.shape[-1] != self.hidden_size:
            raise ValueError(f"hidden_states: expected shape [B, T, {self.hidden_size}], "
                             f"found {list(hidden_states.shape)}")
        if cu_seqlens is not None and hidden_states.shape[0] != 1:
            raise ValueError(f"hidden_states: expected a batch of 1 with cu_seqlens, found {hidden_states.shape[0]}; "
                             "pack the rows into one")
        if initial_state is not None and len(initial_state) != self._num_states:
            raise ValueError(f"initial_state: expected the {self._num_states} states that this layer returns, "
                             f"found {len(initial_state)}")
        if hidden_states.is_meta or not torch.is_autocast_enabled(hidden_states.device.type):  # which the meta device has not
            self._check_dtype(hidden_states.dtype)

    def _check_dtype(self, dtype: torch.dtype) -> None:
        for name, module in self._modules.items():
            for linear in module if isinstance(module, nn.Sequential) else (module,):
                if isinstance(linear, nn.Linear) and linear.weight.dtype != dtype:
                    expected, found = (str(d).removeprefix("torch.") for d in (linear.weight.dtype, dtype))
                    raise ValueError(f"hidden_states: expected dtype {expected} as that of {name}, found {found}; cast one to "
                                     "the other (all projections to one dtype), or call the layer under torch.autocast")

    def extra_repr(self) -> str:
        return (f"hidden_size={self.hidden_size}, heads={self.num_heads}x{self.head_k_dim}, "
                f"value_heads={self.num_v_heads}x{self.head_v_dim}, chunk_size={self.chunk_size}")


def _value_width(head_dim: int, expand_v: float) -> int:
    width = round(head_dim * expand_v)
    if not math.isclose(width, head_dim * expand_v, rel_tol=1e-5):
        raise ValueError(f"expand_v: expected head_dim * expand_v to be an integer, found {head_dim} * {expand_v} "
                         f"= {head_dim * expand_v}")
    return width
