"""The Kimi Delta Attention layer, with the parameter names and shapes of flash-linear-attention."""

import torch
from torch import nn

from graphlin.layers.delta_rule_layer import DeltaRuleLayer
from graphlin.ops.kda import chunk_kda


class KimiDeltaAttention(DeltaRuleLayer):
    """Kimi Delta Attention (Kimi Linear, Kimi Team, arXiv 2510.26692) over dense `[B, T]` or packed `[1, T]` sequences.

    The gated delta rule with a decay for each channel of a key, from a low-rank projection. Parameters have the names and
    shapes of flash-linear-attention's `KimiDeltaAttention`, so its checkpoints load with `load_state_dict`. With
    cu_seqlens a call makes no host sync and may be captured in a device graph.

    Args:
        hidden_size: width of the input and output. Default: 2048.
        expand_v: value head width over key head width; must give an integer. Default: 1.
        head_dim: width K of a query or key head. Default: 128.
        num_heads: query and key heads H. Default: 16.
        num_v_heads: value heads HV, a multiple of num_heads; each has its own decays. Default: num_heads.
        use_short_conv: short causal convolutions on q, k and v; otherwise silu alone. Default: True.
        allow_neg_eigval: write strengths in (0, 2) rather than (0, 1), see arXiv 2411.12537. Default: False.
        lower_bound: the least log decay of a token, in [-5, 0): the gate is then
            `lower_bound · sigmoid(exp(A_log) · (f_proj(x) + dt_bias))` rather than
            `-exp(A_log) · softplus(f_proj(x) + dt_bias)`. Default: None.
        safe_gate: lets the kernel rely on lower_bound, which is cheaper in float32 and bfloat16. Default: False.
        conv_size: width W of the convolutions. Default: 4.
        conv_bias: give the convolutions a bias. Default: False.
        norm_eps: added to the mean square in the output norm. Default: 1e-5.
        chunk_size: tokens in a chunk: 16, 32 or 64. Default: 64.

    Raises ValueError if expand_v gives no integer width, num_v_heads is no multiple of num_heads, or safe_gate has no
    lower_bound.

    >>> layer = KimiDeltaAttention(hidden_size=256, head_dim=64, num_heads=4)
    >>> y = layer(torch.randn(1, 100, 256), cu_seqlens=torch.tensor([0, 30, 100]))
    """

    def __init__(self, hidden_size: int = 2048, expand_v: float = 1, head_dim: int = 128, num_heads: int = 16,
                 num_v_heads: int | None = None, *, use_short_conv: bool = True, allow_neg_eigval: bool = False,
                 lower_bound: float | None = None, safe_gate: bool = False, conv_size: int = 4, conv_bias: bool = False,
                 norm_eps: float = 1e-5, chunk_size: int = 64) -> None:
        super().__init__(hidden_size, expand_v, head_dim, num_heads, num_v_heads, use_short_conv, allow_neg_eigval, chunk_size)
        if safe_gate and lower_bound is None:
            raise ValueError("safe_gate: expected a lower_bound, without which nothing bounds the gate; "
                             "pass one in [-5, 0), or leave safe_gate out")
        self.lower_bound, self.safe_gate = lower_bound, safe_gate
        decays = self.num_v_heads * head_dim
        self._add_convolutions(conv_size, conv_bias)
        self.f_proj = nn.Sequential(nn.Linear(hidden_size, self.head_v_dim, bias=False),
                                    nn.Linear(self.head_v_dim, decays, bias=False))
        self._add_strength_and_gate(num_steps=decays)
        self.g_proj = nn.Sequential(nn.Linear(hidden_size, self.head_v_dim, bias=False),
                                    nn.Linear(self.head_v_dim, self.value_dim))
        self._add_output(norm_eps, "sigmoid")

    def _draw_rate(self) -> None:
        """A uniform in (1, 16), or 1 with safe_gate."""
        if self.safe_gate:
            self.A_log.zero_()
        else:
            self.A_log.uniform_(1, 16).log_()

    def _delta_rule(self, hidden_states: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                    **options) -> tuple[torch.Tensor, torch.Tensor | None]:
        g = self.f_proj(hidden_states).unflatten(-1, (-1, self.head_k_dim))
        return chunk_kda(q, k, v, g, lower_bound=self.lower_bound, safe_gate=self.safe_gate, **options)

    def _output_gate(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.g_proj(hidden_states)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, lower_bound={self.lower_bound}"
