"""Capture Gated DeltaNet and Kimi Delta Attention blocks once; replay them for every packed batch inside a tier."""

from graphlin import layers, parallel
from graphlin.backends import GraphBackend, register_backend
from graphlin.capture import capture
from graphlin.errors import (
    BackendUnavailable,
    CaptureError,
    ColdKernel,
    ExchangeFailed,
    GraphlinError,
    HostSync,
    RanksDiffer,
    ReplayError,
    Resource,
    SlotInUse,
    StaleAddress,
    StructureMismatch,
    TierOverflow,
    TierUnderflow,
    UnsupportedModule,
)
from graphlin.graphed import GraphedBlock
from graphlin.ops import (
    causal_conv1d,
    chunk_gated_delta_rule,
    chunk_kda,
    chunk_local_cumsum,
    gated_rms_norm,
    prepare_chunk_indices,
)
from graphlin.price import Price, price
from graphlin.tier import Tier, ladder
from graphlin.verify import verify

__version__ = "0.1.0"
__all__ = [
    "BackendUnavailable",
    "CaptureError",
    "ColdKernel",
    "ExchangeFailed",
    "GraphBackend",
    "GraphedBlock",
    "GraphlinError",
    "HostSync",
    "Price",
    "RanksDiffer",
    "ReplayError",
    "Resource",
    "SlotInUse",
    "StaleAddress",
    "StructureMismatch",
    "Tier",
    "TierOverflow",
    "TierUnderflow",
    "UnsupportedModule",
    "capture",
    "causal_conv1d",
    "chunk_gated_delta_rule",
    "chunk_kda",
    "chunk_local_cumsum",
    "gated_rms_norm",
    "ladder",
    "layers",
    "parallel",
    "prepare_chunk_indices",
    "price",
    "register_backend",
    "verify",
]
