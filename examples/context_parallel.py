"""One packed batch over several processes: `torchrun --nproc-per-node 2 examples/context_parallel.py`.

Each rank holds a part of the batch's tokens; sequences run on over the ranks. Where the ranks have a device each, the step is
captured, collectives included, and replayed for batches cut in other places; on CPUs it runs eagerly. Every rank prints how far
its outputs and its share of the gradients are from those of one process that holds the whole batch.
"""

import os

import torch
import torch.distributed as dist
from torch import nn

import graphlin
from graphlin.parallel import context_parallel

BATCHES = [((20, 30, 14), 32), ((64,), 21), ((5, 33, 26), 38)]      # lengths of the sequences, tokens on the first rank
TIER_TOKENS, TIER_SEQS = 64, 4


class Block(nn.Module):
    """A layer over this rank's tokens. The context is made inside, so that a graph reads it anew at each replay."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor, cu_seqlens: torch.Tensor, token_offsets: torch.Tensor) -> torch.Tensor:
        return self.layer(x, cp_context=context_parallel(None, cu_seqlens, token_offsets))


def main(device: torch.device) -> list[float]:
    """Largest difference, relative to the largest value, of output and gradients on this rank, for each batch."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    layer = graphlin.layers.GatedDeltaNet(hidden_size=32, head_dim=16, num_heads=1, num_v_heads=2, expand_v=1, chunk_size=16)
    block = Block(layer.to(device))
    if dist.get_backend() != "gloo":
        block = graphlin.capture(block, graphlin.Tier(TIER_TOKENS, TIER_SEQS, chunk_size=16), group=dist.group.WORLD)
    differences = []
    for lengths, first in BATCHES:
        x = torch.randn(1, sum(lengths), 32, device=device)
        cu = torch.tensor([0, *lengths, *[0] * (TIER_SEQS - len(lengths))], device=device).cumsum(0).int()
        cuts = [first + (sum(lengths) - first) * i // max(world - 1, 1) for i in range(world - 1)]
        offsets = torch.tensor([0, *cuts, sum(lengths)], device=device)
        own = slice(*offsets[rank:rank + 2].tolist())
        parameters = list(layer.parameters())
        y = block(x[:, own], cu, offsets)
        grads = torch.autograd.grad(y.square().sum(), parameters)
        for grad in grads:
            dist.all_reduce(grad)
        whole = layer(x, cu_seqlens=cu)
        expected = torch.autograd.grad(whole.square().sum(), parameters)
        differences.append(max(_difference(*pair) for pair in zip((y, *grads), (whole[:, own], *expected), strict=True)))
        print(f"rank {rank} of {world}, {y.shape[1]} of {sum(lengths)} tokens: {differences[-1]:.1e} from one process")
    if dist.get_backend() != "gloo":
        print(f"rank {rank}: {block.stats.replays} replays")
        block.reset()       # before the process group ends, which waits for graphs that hold its collectives
    return differences


def _difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).detach().abs().max() / expected.detach().abs().max()) if found.numel() else 0.0


if __name__ == "__main__":
    on_device = torch.cuda.is_available()
    rank = int(os.environ["LOCAL_RANK"])
    if on_device:
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if on_device else "gloo")
    main(torch.device("cuda", rank) if on_device else torch.device("cpu"))
    dist.destroy_process_group()
