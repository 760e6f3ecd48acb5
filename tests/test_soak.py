"""Thousands of random calls of one captured block in training mode: no mismatch, no error, memory flat."""

import gc
import random
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from graphlin.capture import capture
from graphlin.layers import GatedDeltaNet, KimiDeltaAttention
from graphlin.tier import Tier
from tests.blocks import AtTier, Mixer

pytestmark = pytest.mark.raw_memory


@dataclass(frozen=True)
class Soak:
    """`calls` random packs; each `compared`-th is run eagerly too, at its tier's shapes. One in `over` is over the tiers."""

    block: nn.Module
    tiers: tuple[Tier, ...]
    width: int
    calls: int
    compared: int
    over: int
    slots: int = 2

    def lengths(self) -> list[int]:
        """Sequences that fit one of the tiers (a third of them empty), or one more or some tokens more than the largest."""
        tier = random.choice(self.tiers)
        seqs, tokens = random.randint(1, tier.seqs), random.randint(0, tier.tokens)
        if random.randrange(self.over) == 0:
            seqs, tokens = random.choice([(self.tiers[0].seqs + 1, tokens), (seqs, self.tiers[0].tokens + random.randint(1, 9))])
        weights = [random.choice([0, 1, 1]) * random.random() for _ in range(seqs - 1)] + [1e-9]
        ends = [0, *(int(tokens * sum(weights[:i + 1]) / sum(weights)) for i in range(seqs))]
        return [b - a for a, b in zip(ends[:-1], [*ends[1:-1], tokens], strict=True)]


def run_soak(soak, device):
    """Runs the calls; returns the graphed block, how many were over the tiers, and memory after a quarter and at the end."""
    block = soak.block.to(device).train()
    graphed = capture(block, soak.tiers, slots=soak.slots, num_warmup_iters=1)
    over, memory = 0, []
    dtype = next(block.parameters()).dtype
    for i in range(soak.calls):
        lengths = soak.lengths()
        slack = random.choice([0, 0, 3])
        tier = graphed.select(sum(lengths) + slack, len(lengths))
        over += tier is None
        x, cu = make_pack(lengths, slack, soak.width, dtype, device)
        weight = torch.randn_like(x)
        found = step(graphed, x, cu, weight)
        if i % soak.compared == 0 or tier is None:
            expected = step(AtTier(block, tier), x, cu, weight)
            wrong = [n for n, (f, e) in enumerate(zip(found, expected, strict=True)) if not torch.equal(f, e)]
            assert not wrong, f"call {i}, lengths {lengths} with {slack} more rows, {tier}: results {wrong} differ from eager"
            del expected
        del found, x, cu, weight
        if i in (soak.calls // 4, soak.calls - 1):             # all modes and tiers are captured by then, caches are full
            memory.append(held(device))
    return graphed, over, memory


def make_pack(lengths, slack, width, dtype, device):
    tokens = sum(lengths)
    x = torch.randn(1, tokens + slack, width, device=device, dtype=dtype)
    x[:, tokens:] = float("nan")
    cu = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32).to(device)
    return x.requires_grad_(), cu


def step(block, x, cu, weight):
    """Output and gradients, with inactive rows left out."""
    active = torch.arange(x.shape[1], device=x.device)[:, None] < cu[-1]
    y = block(x, cu)
    grads = torch.autograd.grad((torch.where(active, y, 0) * weight).sum(), [x, *block.parameters()])
    return [y.detach(), *grads]


def held(device):
    """Bytes of all live tensors, and of the memory that the device's allocator holds for them and for captures' pools. What it
    keeps of calls that were not captured, to use it again, is given back first: how much follows from their random sizes."""
    gc.collect()
    if device.type == "cpu":
        storages = [t.untyped_storage() for t in gc.get_objects()  # without sparse ones, which another test may leave
                    if type(t) in (torch.Tensor, nn.Parameter) and t.layout is torch.strided]
        return sum({s._cdata: s.nbytes() for s in storages}.values()), 0
    # The thread that runs a device's backward lets go of its last graph only after the caller has the gradients, at the latest
    # when it runs the next one: here one of no memory.
    x = torch.empty(0, device=device, requires_grad=True)
    torch.autograd.grad(x * 1, x, torch.empty(0, device=device))
    memory = torch.get_device_module(device)
    memory.synchronize()
    memory.empty_cache()
    return memory.memory_allocated(device), memory.memory_reserved(device)


def assert_sound(soak, graphed, over, memory):
    stats = graphed.stats
    (first, first_reserved), (last, last_reserved) = memory
    assert last <= first and last_reserved <= first_reserved, memory
    assert (stats.replays, stats.backward_replays, dict(stats.eager)) == (
        soak.calls - over, soak.calls - over, {"TierOverflow": over})
    assert 0 < over < soak.calls / 2 and stats.captures == len(soak.tiers) * soak.slots


def layer(kind, width, chunk_size=64, dtype=torch.bfloat16):
    torch.manual_seed(0)
    return kind(hidden_size=width, head_dim=128 if width > 16 else 16, num_heads=max(1, width // 128), expand_v=1,
                chunk_size=chunk_size).to(dtype)


def test_two_hundred_calls_of_a_small_block(device):
    soak = Soak(Mixer(), (Tier(24, 5), Tier(16, 3), Tier(8, 2)), width=8, calls=200, compared=5, over=20)
    assert_sound(soak, *run_soak(soak, device))


def test_calls_of_a_small_layer(device):
    """The kernels too, in the few programs that the interpreter has time for."""
    block = layer(GatedDeltaNet, 16, chunk_size=16, dtype=torch.float32)
    soak = Soak(block, (Tier(32, 3, 16), Tier(16, 2, 16)), width=16, calls=6, compared=5, over=4, slots=1)
    random.seed(4)
    assert_sound(soak, *run_soak(soak, device))


@pytest.mark.slow
@pytest.mark.device_only
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", [GatedDeltaNet, KimiDeltaAttention])
def test_twenty_thousand_calls_of_a_layer(device, kind):
    tiers = (Tier(4096, 32), Tier(2048, 16), Tier(512, 8))
    soak = Soak(layer(kind, 1024), tiers, width=1024, calls=20_000, compared=50, over=50)
    graphed, over, memory = run_soak(soak, device)
    print(f"{kind.__name__}: {graphed.stats}, allocated and reserved bytes {memory}")  # noqa: T201
    assert_sound(soak, graphed, over, memory)
