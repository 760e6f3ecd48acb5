"""The public differentiable ops."""

from graphlin.ops.causal_conv1d import causal_conv1d
from graphlin.ops.chunks import chunk_local_cumsum, prepare_chunk_indices
from graphlin.ops.gated_delta_rule import chunk_gated_delta_rule
from graphlin.ops.gated_rms_norm import gated_rms_norm
from graphlin.ops.kda import chunk_kda

__all__ = ["causal_conv1d", "chunk_gated_delta_rule", "chunk_kda", "chunk_local_cumsum", "gated_rms_norm",
           "prepare_chunk_indices"]
