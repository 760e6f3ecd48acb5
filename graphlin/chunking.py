"""How many chunks a packed batch can have; pure arithmetic shared by tiers and kernels."""


def max_chunks(tokens: int, seqs: int, chunk_size: int) -> int:
    """Exact bound on the chunks of `seqs` sequences that hold `tokens` tokens together.

    Chunks never cross sequences. The worst pack gives `n = min(tokens, seqs)` sequences one token each and spends the
    other `tokens - n` on whole further chunks.

    >>> max_chunks(4096, 32, 64)
    95
    """
    occupied = min(tokens, seqs)
    return occupied + (tokens - occupied) // chunk_size
