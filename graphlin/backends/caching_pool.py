"""A private pool of PyTorch's CUDA allocator, without the memory: which segments a sequence of allocations would take."""

from bisect import bisect_left, insort
from dataclasses import dataclass

# c10/cuda/CUDACachingAllocator.cpp and c10/core/AllocatorConfig.h of PyTorch 2.8 to 2.13, in bytes.
MIN_BLOCK = 512                  # kMinBlockSize: sizes are multiples of it
SMALL = 1 << 20                  # kSmallSize: up to it, allocations share segments of SMALL_SEGMENT
SMALL_SEGMENT = 2 << 20          # kSmallBuffer
LARGE_SEGMENT = 20 << 20         # kLargeBuffer: the segment of an allocation under OWN_SEGMENT
OWN_SEGMENT = 10 << 20           # kMinLargeAlloc: from it on a segment is the allocation, rounded to ROUND_LARGE
ROUND_LARGE = 2 << 20            # kRoundLarge


@dataclass(eq=False)
class Block:
    """A part of a segment; `before` and `after` are its neighbours there."""

    address: int
    size: int
    small: bool
    free: bool = False
    before: "Block | None" = None
    after: "Block | None" = None


class CachingPool:
    """Follows get_free_block, should_split, get_allocation_size and try_merge_blocks of the allocator.

    It assumes what a capture in a pool of its own has: one stream, no expandable segments (the allocator uses none for
    private pools), max_split_size, roundup_power2_divisions and large_segment_size_mb left at their defaults, and later
    segments at higher addresses (that alone decides which of two equal free blocks is taken). Segments stay until the
    pool goes. cuBLAS keeps its workspace by handle and stream (aten/src/ATen/cuda/CublasHandlePool.cpp); the warm-up on
    the capture's stream makes it, outside the pool, so it is not counted.

    >>> pool = CachingPool()
    >>> block = pool.allocate(100)
    >>> pool.nbytes()
    2097152
    """

    def __init__(self) -> None:
        self._free: dict[bool, list[Block]] = {True: [], False: []}
        self._held = 0

    def nbytes(self) -> int:
        return self._held

    def allocate(self, nbytes: int) -> Block:
        size = max(MIN_BLOCK, _round_up(nbytes, MIN_BLOCK))
        small = size <= SMALL
        blocks = self._free[small]
        fit = bisect_left(blocks, (size, -1), key=_order)
        block = blocks.pop(fit) if fit < len(blocks) else self._new_segment(size, small)
        block.free = False
        rest = block.size - size
        if rest >= MIN_BLOCK if small else rest > SMALL:
            self._split(block, size)
        return block

    def free(self, block: Block) -> None:
        for neighbour in (block.before, block.after):
            if neighbour is not None and neighbour.free:
                self._free[block.small].remove(neighbour)
                _merge(block, neighbour)
        self._put(block)

    def _new_segment(self, size: int, small: bool) -> Block:
        if small:
            length = SMALL_SEGMENT
        else:
            length = LARGE_SEGMENT if size < OWN_SEGMENT else _round_up(size, ROUND_LARGE)
        self._held += length
        return Block(self._held - length, length, small)

    def _split(self, block: Block, size: int) -> None:
        rest = Block(block.address + size, block.size - size, block.small, before=block, after=block.after)
        if block.after is not None:
            block.after.before = rest
        block.size, block.after = size, rest
        self._put(rest)

    def _put(self, block: Block) -> None:
        block.free = True
        insort(self._free[block.small], block, key=_order)


def _order(block: Block) -> tuple[int, int]:
    """Best fit, then lowest address."""
    return block.size, block.address


def _merge(block: Block, neighbour: Block) -> None:
    block.size += neighbour.size
    if neighbour is block.before:
        block.address, block.before = neighbour.address, neighbour.before
        if block.before is not None:
            block.before.after = block
    else:
        block.after = neighbour.after
        if block.after is not None:
            block.after.before = block


def _round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit
