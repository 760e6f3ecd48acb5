"""Layers with the parameter names and shapes of flash-linear-attention."""

from graphlin.layers.gated_delta_net import GatedDeltaNet
from graphlin.layers.inactive import zero_inactive_rows
from graphlin.layers.kimi_delta_attention import KimiDeltaAttention

__all__ = ["GatedDeltaNet", "KimiDeltaAttention", "zero_inactive_rows"]
