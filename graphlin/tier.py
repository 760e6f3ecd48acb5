"""The bounds that captured graphs are made for."""

from collections.abc import Iterable
from dataclasses import dataclass

from graphlin.chunking import max_chunks

CHUNK_SIZES = (16, 32, 64)


@dataclass(frozen=True)
class Tier:
    """Largest packed input that a graph takes: `tokens` rows in at most `seqs` sequences, cut into `chunk_size` chunks.

    Raises TypeError or ValueError, naming the argument, for a count that is not a positive integer and for a chunk
    size other than 16, 32 or 64.

    >>> Tier(tokens=4096, seqs=32).max_chunks
    95
    """

    tokens: int
    seqs: int
    chunk_size: int = 64

    def __post_init__(self) -> None:
        for name in ("tokens", "seqs", "chunk_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"Tier {name}: expected an int, found {value!r} of type {type(value).__name__}")
        for name in ("tokens", "seqs"):
            if getattr(self, name) < 1:
                raise ValueError(f"Tier {name}: expected at least 1, found {getattr(self, name)}")
        if self.chunk_size not in CHUNK_SIZES:
            raise ValueError(f"Tier chunk_size: expected one of {CHUNK_SIZES}, found {self.chunk_size}")

    @property
    def max_chunks(self) -> int:
        """Exact bound on the chunks of any input that fits: rows of its chunk table."""
        return max_chunks(self.tokens, self.seqs, self.chunk_size)

    def fits(self, tokens: int, seqs: int) -> bool:
        """Whether an input of this many tokens and sequences may be replayed; decided from shapes alone."""
        return tokens <= self.tokens and seqs <= self.seqs


def ladder(tokens: int, seqs: int, *, smallest: int = 512, factor: int = 2, chunk_size: int = 64) -> tuple[Tier, ...]:
    """Tiers from (tokens, seqs) downwards, each `factor` times smaller in both, as long as they hold `smallest` tokens.

    Counts are rounded up, and all tiers have one `chunk_size`. A batch over the smallest tier then fills more than 1 / factor
    of the rows of the tier that it is replayed in, unless it has too many sequences for the tier below.

    Raises TypeError or ValueError, naming the argument, where a tier would not be one, factor is below 2 or smallest below 1.

    >>> [(tier.tokens, tier.seqs) for tier in ladder(4096, 32)]
    [(4096, 32), (2048, 16), (1024, 8), (512, 4)]
    """
    tiers = [Tier(tokens, seqs, chunk_size)]
    for name, value, least in (("factor", factor, 2), ("smallest", smallest, 1)):
        if not isinstance(value, int) or value < least:
            raise ValueError(f"ladder {name}: expected an int of at least {least}, found {value!r}")
    while smallest <= (fewer := -(-tiers[-1].tokens // factor)) < tiers[-1].tokens:
        tiers.append(Tier(fewer, -(-tiers[-1].seqs // factor), chunk_size))
    return tuple(tiers)


def largest_first(tiers: Iterable[Tier]) -> tuple[Tier, ...]:
    """The order in which tiers are captured; the last one that an input fits is the one that it is replayed in."""
    return tuple(sorted(set(tiers), key=lambda tier: (tier.tokens, tier.seqs), reverse=True))
