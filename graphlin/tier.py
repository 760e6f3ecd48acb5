"""The bound that a captured graph is made for."""

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
