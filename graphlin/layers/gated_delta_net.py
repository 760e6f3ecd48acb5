"""The Gated DeltaNet layer, with the parameter names and shapes of flash-linear-attention."""

import torch
from torch import nn

from graphlin.layers.delta_rule_layer import DeltaRuleLayer
from graphlin.ops.gated_delta_rule import chunk_gated_delta_rule


class GatedDeltaNet(DeltaRuleLayer):
    """Gated DeltaNet (Yang et al., arXiv 2412.06464) over dense `[B, T]` or packed `[1, T]` sequences.

    Parameters have the names and shapes of flash-linear-attention's `GatedDeltaNet`, so its checkpoints load with
    `load_state_dict`. With cu_seqlens a call makes no host sync and may be captured in a device graph.

    Args:
        hidden_size: width of the input and output. Default: 2048.
        expand_v: value head width over key head width; must give an integer. Default: 2.
        head_dim: width K of a query or key head. Default: 256.
        num_heads: query and key heads H. Default: 6.
        num_v_heads: value heads HV, a multiple of num_heads. Default: num_heads.
        use_gate: gate the output by silu(g_proj(x)). Default: True.
        use_short_conv: short causal convolutions on q, k and v; otherwise silu alone. Default: True.
        allow_neg_eigval: write strengths in (0, 2) rather than (0, 1), see arXiv 2411.12537. Default: False.
        conv_size: width W of the convolutions. Default: 4.
        conv_bias: give the convolutions a bias. Default: False.
        norm_eps: added to the mean square in the output norm. Default: 1e-5.
        chunk_size: tokens in a chunk: 16, 32 or 64. Default: 64.

    Raises ValueError if expand_v gives no integer width or num_v_heads is no multiple of num_heads.

    >>> layer = GatedDeltaNet(hidden_size=256, head_dim=64, num_heads=4, expand_v=1)
    >>> y = layer(torch.randn(1, 100, 256), cu_seqlens=torch.tensor([0, 30, 100]))
    """

    def __init__(self, hidden_size: int = 2048, expand_v: float = 2, head_dim: int = 256, num_heads: int = 6,
                 num_v_heads: int | None = None, *, use_gate: bool = True, use_short_conv: bool = True,
                 allow_neg_eigval: bool = False, conv_size: int = 4, conv_bias: bool = False, norm_eps: float = 1e-5,
                 chunk_size: int = 64) -> None:
        super().__init__(hidden_size, expand_v, head_dim, num_heads, num_v_heads, use_short_conv, allow_neg_eigval, chunk_size)
        self.use_gate = use_gate
        self.a_proj = nn.Linear(hidden_size, self.num_v_heads, bias=False)
        self._add_strength_and_gate(num_steps=self.num_v_heads)
        self._add_convolutions(conv_size, conv_bias)
        if use_gate:
            self.g_proj = nn.Linear(hidden_size, self.value_dim, bias=False)
        self._add_output(norm_eps, "silu")

    def _draw_rate(self) -> None:
        """A uniform in (0, 16)."""
        self.A_log.uniform_(0, 16).log_()

    def _delta_rule(self, hidden_states: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                    **options) -> tuple[torch.Tensor, torch.Tensor | None]:
        return chunk_gated_delta_rule(q, k, v, self.a_proj(hidden_states), **options)

    def _output_gate(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        return self.g_proj(hidden_states) if self.use_gate else None
