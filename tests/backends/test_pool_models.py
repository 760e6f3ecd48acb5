"""The models of memory pools, with which captures are priced, against the pools themselves."""

import random

import pytest
import torch

from graphlin.backends import get_backend
from graphlin.backends.caching_pool import CachingPool
from graphlin.backends.host.memory import KeepingPool

MIB = 1 << 20


def steps(seed: int, count: int = 400):
    """Allocations of 1 byte to 64 MiB, and frees of the i-th of those alive."""
    draw, live = random.Random(seed), 0
    for _ in range(count):
        if live and draw.random() < 0.5:
            yield "free", draw.randrange(live)
            live -= 1
        else:
            yield "allocate", int(2 ** draw.uniform(0, 26))
            live += 1


def play(seed: int, allocate, free) -> None:
    live = []
    for step, number in steps(seed):
        if step == "free":
            free(live.pop(number))
        else:
            live.append(allocate(number))


def modelled(seed: int) -> int:
    pool = CachingPool()
    play(seed, pool.allocate, pool.free)
    return pool.nbytes()


@pytest.mark.parametrize(("seed", "segments"), list(enumerate(
    (195035136, 182452224, 161480704, 272629760, 266338304, 224395264))))
def test_the_model_holds_what_the_allocator_held(seed, segments):
    """Numbers of PyTorch 2.11's own allocator, after the same steps in a capture with a pool of its own."""
    assert modelled(seed) == segments


@pytest.mark.device_only
@pytest.mark.raw_memory
def test_the_model_follows_the_allocator_here(device):
    backend, device = get_backend(device), torch.empty(0, device=device).device
    for seed in range(100, 120):
        pool = backend.new_pool()
        with backend.capture(pool=pool, stream=backend.side_stream(device)):
            play(seed, lambda size: [torch.empty(size, dtype=torch.uint8, device=device)], list.clear)
        assert backend.pool_bytes(pool, device) == modelled(seed), f"seed {seed}"


@pytest.mark.parametrize(("sizes", "held"), [
    ([1], 2), ([MIB], 2), ([MIB, MIB], 2), ([MIB, MIB, 1], 4),                      # small ones share 2 MiB
    ([MIB + 1], 20), ([9 * MIB, 9 * MIB], 20), ([10 * MIB - 512] * 3, 40),          # up to 10 MiB share 20
    ([10 * MIB], 10), ([10 * MIB + 1], 12), ([33 * MIB], 34),                       # larger ones have their own
    ([], 0),
])
def test_segments(sizes, held):
    pool = CachingPool()
    for size in sizes:
        pool.allocate(size)
    assert pool.nbytes() == held * MIB


def test_a_freed_block_serves_the_next_that_fits_best():
    pool = CachingPool()
    large, small = pool.allocate(64 * MIB), pool.allocate(32 * MIB)
    pool.free(large)
    pool.free(small)
    assert pool.allocate(30 * MIB).size == 30 * MIB and pool.nbytes() == 96 * MIB   # of the smaller one, which is split
    assert pool.allocate(64 * MIB).size == 64 * MIB and pool.nbytes() == 96 * MIB
    pool.allocate(2 * MIB - 512)                                                   # the rest of the split
    assert pool.nbytes() == 96 * MIB


def test_a_rest_of_at_most_a_mebibyte_is_not_split_off():
    pool = CachingPool()
    pool.free(pool.allocate(20 * MIB))
    assert pool.allocate(19 * MIB).size == 20 * MIB


def test_freed_neighbours_become_one_block():
    pool = CachingPool()
    blocks = [pool.allocate(5 * MIB) for _ in range(4)]
    assert pool.nbytes() == 20 * MIB
    for i in (1, 3, 2):
        pool.free(blocks[i])
    pool.allocate(15 * MIB)
    assert pool.nbytes() == 20 * MIB
    pool.allocate(5 * MIB)
    assert pool.nbytes() == 40 * MIB


def test_the_hosts_pool_keeps_everything():
    pool = KeepingPool()
    pool.free(pool.allocate(3))
    pool.allocate(5)
    assert pool.nbytes() == 8
