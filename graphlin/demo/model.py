"""A small byte-level language model whose blocks a graph can hold."""

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional as F

from graphlin import prepare_chunk_indices
from graphlin.layers import GatedDeltaNet, KimiDeltaAttention, zero_inactive_rows

BYTES = 256
MIXERS = {"gdn": GatedDeltaNet, "kda": KimiDeltaAttention}


class Block(nn.Module):
    """A mixer of tokens, named as in MIXERS, and a two-layer perceptron, each behind a norm and beside a residual."""

    def __init__(self, mixer: str, hidden_size: int, num_heads: int, head_dim: int, chunk_size: int) -> None:
        super().__init__()
        self.mixer_norm = nn.RMSNorm(hidden_size)
        self.mixer = MIXERS[mixer](hidden_size, expand_v=1, head_dim=head_dim, num_heads=num_heads, chunk_size=chunk_size)
        self.mlp_norm = nn.RMSNorm(hidden_size)
        self.mlp = nn.Sequential(nn.Linear(hidden_size, 4 * hidden_size), nn.SiLU(), nn.Linear(4 * hidden_size, hidden_size))

    def forward(self, hidden: torch.Tensor, cu_seqlens: torch.Tensor, chunk_indices: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.mixer(self.mixer_norm(hidden), cu_seqlens, chunk_indices)
        return hidden + self.mlp(self.mlp_norm(hidden))


class Blocks(nn.Module):
    """The part that is captured: a block for each mixer, hidden states `[1, T, hidden]` in and out.

    The chunk table is built once for all blocks.
    """

    def __init__(self, mixers: Sequence[str], *sizes: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(mixer, *sizes) for mixer in mixers)
        self.chunk_size = self.blocks[0].mixer.chunk_size

    def forward(self, hidden: torch.Tensor, cu_seqlens: torch.Tensor,
                chunk_indices: torch.Tensor | None = None) -> torch.Tensor:
        hidden = zero_inactive_rows(hidden, cu_seqlens)
        if chunk_indices is None:
            chunk_indices = prepare_chunk_indices(cu_seqlens, hidden.shape[1], self.chunk_size)
        for block in self.blocks:
            hidden = block(hidden, cu_seqlens, chunk_indices)
        return hidden


class ByteModel(nn.Module):
    """Embedding, blocks and a head that predicts the next byte."""

    def __init__(self, mixers: Sequence[str], hidden_size: int, num_heads: int, head_dim: int, chunk_size: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, hidden_size)
        self.blocks: nn.Module = Blocks(mixers, hidden_size, num_heads, head_dim, chunk_size)
        self.norm = nn.RMSNorm(hidden_size)
        self.head = nn.Linear(hidden_size, BYTES)

    def loss(self, inputs: torch.Tensor, targets: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy in nats a byte: inputs `[1, T]`, targets `[T]`, cu_seqlens `[N + 1]`."""
        hidden = self.blocks(self.embedding(inputs), cu_seqlens)
        return F.cross_entropy(self.head(self.norm(hidden))[0].float(), targets)
