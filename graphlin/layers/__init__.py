"""Layers with the parameter names and shapes of flash-linear-attention."""

from graphlin.layers.gated_delta_net import GatedDeltaNet
from graphlin.layers.inactive import zero_inactive_rows

__all__ = ["GatedDeltaNet", "zero_inactive_rows"]
