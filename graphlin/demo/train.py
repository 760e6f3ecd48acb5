"""Trains the demo's model on packed batches, with its blocks run eagerly or replayed from a graph."""

from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter

import torch
from torch import nn
from torch.nn import functional as F

import graphlin
from graphlin.backends import get_backend
from graphlin.demo.data import Batch
from graphlin.demo.model import ByteModel

SEED = 0


@dataclass(frozen=True)
class Settings:
    """Sizes of the demo on one kind of device."""

    tier: graphlin.Tier
    num_blocks: int
    hidden_size: int
    num_heads: int
    head_dim: int
    dtype: torch.dtype
    learning_rate: float
    num_warmup_iters: int


# An interpreted Triton program takes tens of milliseconds, so a step on the CPU is as small as shows the point.
CPU = Settings(graphlin.Tier(tokens=96, seqs=4), num_blocks=1, hidden_size=32, num_heads=1, head_dim=32,
               dtype=torch.float32, learning_rate=2e-2, num_warmup_iters=1)
ACCELERATOR = Settings(graphlin.Tier(tokens=4096, seqs=32), num_blocks=4, hidden_size=512, num_heads=4, head_dim=128,
                       dtype=torch.bfloat16, learning_rate=2e-3, num_warmup_iters=3)


@dataclass
class Run:
    """What one training run left: loss (nats a byte) and wall time (seconds) of each step, and the model."""

    model: ByteModel
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def state(self) -> torch.Tensor:
        """All losses and final parameters, as one vector to compare runs by."""
        return torch.cat([torch.tensor(self.losses), *(p.detach().flatten().float().cpu() for p in self.model.parameters())])


class PaddedBlocks(nn.Module):
    """Runs blocks eagerly at the tier's shapes, as the graph does, so that the two may be compared bit for bit.

    Matrix libraries choose their kernels by the number of rows; at other shapes the last bits differ. A batch over the
    tier runs at its own shapes, as it does in the captured model.
    """

    def __init__(self, blocks: nn.Module, tier: graphlin.Tier) -> None:
        super().__init__()
        self.block = blocks
        self.tier = tier

    def forward(self, hidden: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
        tokens, seqs = hidden.shape[1], cu_seqlens.shape[0] - 1
        if not self.tier.fits(tokens, seqs):
            return self.block(hidden, cu_seqlens)
        padded = F.pad(hidden, (0, 0, 0, self.tier.tokens - tokens))
        ends = cu_seqlens[-1:].expand(self.tier.seqs - seqs)
        return self.block(padded, torch.cat([cu_seqlens, ends]))[:, :tokens]


def best_device() -> torch.device:
    """The accelerator of this machine if graphlin has a backend for it, else the CPU; raises BackendUnavailable without one."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        try:
            get_backend(accelerator)
            return accelerator
        except graphlin.BackendUnavailable:
            pass
    get_backend("cpu")
    return torch.device("cpu")


def train(mixer: str, settings: Settings, batches: list[Batch], device: torch.device,
          wrap: Callable[[nn.Module], nn.Module], advance: Callable[[], None]) -> Run:
    """Trains a new model, always from the same initial weights, one step a batch.

    `mixer` is a name of MIXERS; `wrap` decides how the model's blocks run, `advance` is called after each step.
    """
    torch.manual_seed(SEED)
    model = ByteModel([mixer] * settings.num_blocks, settings.hidden_size, settings.num_heads, settings.head_dim,
                      settings.tier.chunk_size).to(device, settings.dtype)
    model.blocks = wrap(model.blocks)
    optimizer = torch.optim.AdamW(model.parameters(), settings.learning_rate)
    backend = get_backend(device)
    run = Run(model)
    for batch in batches:
        backend.synchronize(device)
        start = perf_counter()
        loss = model.loss(batch.inputs, batch.targets, batch.cu_seqlens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        backend.synchronize(device)
        run.seconds.append(perf_counter() - start)
        run.losses.append(loss.item())
        advance()
    return run
