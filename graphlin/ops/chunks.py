"""Chunk bookkeeping: the table of chunks, cumulative sums inside chunks, and how an op resolves its packing arguments."""

import torch

from graphlin.chunking import max_chunks
from graphlin.kernels.chunk_table import chunk_table
from graphlin.kernels.cumsum import run_chunk_local_cumsum
from graphlin.kernels.packing import Packing
from graphlin.ops.validation import check_chunk_size, check_cu_seqlens, check_cu_values, check_tensor, in_memory, read_values


def prepare_chunk_indices(cu_seqlens: torch.Tensor, max_tokens: int, chunk_size: int = 64) -> torch.Tensor:
    """Builds the chunk table of a packed batch on its device, in one launch and without a host sync.

    Row i is `(sequence, chunk in sequence)` of the i-th chunk; chunks never cross sequences, empty sequences have none.
    Rows past the last chunk are sentinels `(-1, -1)`.

    Args:
        cu_seqlens: `[N + 1]` int32 or int64, cumulative lengths; read on the device.
        max_tokens: bound on `cu_seqlens[-1]`; values beyond it are clamped.
        chunk_size: rows of a chunk, 16, 32 or 64.

    Returns:
        `[NT_max, 2]` int32 with `NT_max = n + (max_tokens - n) // chunk_size`, `n = min(max_tokens, N)`.

    Raises:
        TypeError, ValueError: naming the argument, the expected and the found value.

    >>> prepare_chunk_indices(torch.tensor([0, 70, 70, 80]), max_tokens=96).tolist()
    [[0, 0], [0, 1], [2, 0], [-1, -1]]
    """
    check_chunk_size(chunk_size)
    check_tensor("cu_seqlens", cu_seqlens, shape=("N + 1",), dtypes=(torch.int32, torch.int64))
    if cu_seqlens.shape[0] < 2:
        raise ValueError(f"cu_seqlens: expected at least 2 entries (one sequence), found {cu_seqlens.shape[0]}")
    if isinstance(max_tokens, bool) or not isinstance(max_tokens, int) or max_tokens < 0:
        raise ValueError(f"max_tokens: expected a non-negative integer, found {max_tokens!r}")
    return chunk_table(cu_seqlens.contiguous(), max_tokens, chunk_size)


def chunk_local_cumsum(g: torch.Tensor, chunk_size: int = 64, reverse: bool = False, *,
                       cu_seqlens: torch.Tensor | None = None, chunk_indices: torch.Tensor | None = None,
                       graph_capture: bool | None = None) -> torch.Tensor:
    """Inclusive cumulative sum of log decays inside each chunk (not differentiable; the ops do this inside their kernels).

    Args:
        g: `[B, T, H]` or `[B, T, H, K]`, float; B must be 1 with cu_seqlens.
        chunk_size: 16, 32 or 64.
        reverse: sum from the end of the chunk.
        cu_seqlens, chunk_indices, graph_capture: as in `chunk_gated_delta_rule`.

    Returns:
        float32 like g; rows at and after `cu_seqlens[-1]` are 0.

    Raises:
        TypeError, ValueError: naming the argument, the expected and the found value.

    >>> chunk_local_cumsum(torch.ones(1, 3, 1), chunk_size=16).flatten()
    tensor([1., 2., 3.])
    """
    check_tensor("g", g)
    if g.dim() not in (3, 4):
        raise ValueError(f"g: expected shape [B, T, H] or [B, T, H, K], found {list(g.shape)}")
    packing = resolve_packing("g", g, cu_seqlens, chunk_indices, chunk_size, graph_capture)
    return run_chunk_local_cumsum(in_memory(g.detach()), packing, reverse)


def resolve_packing(name: str, x: torch.Tensor, cu_seqlens: torch.Tensor | None, chunk_indices: torch.Tensor | None,
                    chunk_size: int, graph_capture: bool | None, validate: bool = False) -> Packing:
    """Checks the packing arguments of an op on x `[B, T, ...]` (called `name`) and builds what is missing."""
    check_chunk_size(chunk_size)
    if graph_capture is not None and not isinstance(graph_capture, bool):
        raise TypeError(f"graph_capture: expected None, True or False, found {graph_capture!r}")
    if cu_seqlens is None:
        if chunk_indices is not None:
            raise ValueError("chunk_indices: expected None without cu_seqlens, found a tensor; pass cu_seqlens too")
        batch, tokens = x.shape[:2]
        per_sequence = -(-tokens // chunk_size)
        return Packing(None, None, batch, tokens, batch * per_sequence, per_sequence, chunk_size, capture=False)
    check_cu_seqlens(cu_seqlens, x, name)
    tokens, seqs = x.shape[1], cu_seqlens.shape[0] - 1
    if validate:
        check_cu_values(cu_seqlens, tokens)
    cu_seqlens = cu_seqlens.contiguous()
    capture = graph_capture is not False
    if chunk_indices is not None:
        check_tensor("chunk_indices", chunk_indices, shape=("NT", 2), dtypes=(torch.int32, torch.int64), like=x)
        needed = max_chunks(tokens, seqs, chunk_size)
        if capture and chunk_indices.shape[0] < needed:
            raise ValueError(f"chunk_indices: expected at least {needed} rows for {tokens} tokens in {seqs} sequences at "
                             f"chunk_size {chunk_size}, found {chunk_indices.shape[0]}; build it with prepare_chunk_indices, "
                             "or pass graph_capture=False with an exact table")
        if validate:
            _check_table(chunk_indices, cu_seqlens, tokens, chunk_size, capture)
        chunks = chunk_indices.contiguous() if capture else _without_sentinels(chunk_indices, seqs)
    elif capture:
        chunks = chunk_table(cu_seqlens, tokens, chunk_size)
    else:
        chunks = _exact_table(cu_seqlens, tokens, chunk_size)
    return Packing(cu_seqlens, chunks, seqs, tokens, chunks.shape[0], 0, chunk_size, capture)


def _check_table(chunk_indices: torch.Tensor, cu_seqlens: torch.Tensor, tokens: int, chunk_size: int, capture: bool) -> None:
    """Raises ValueError unless the table is that of these sequences: sentinels last, or none on the exact path."""
    expected = _chunk_rows(cu_seqlens, tokens, chunk_size)
    found = read_values("chunk_indices", chunk_indices, "validate=True")
    sentinels = [[-1, -1]] * (len(found) - len(expected)) if capture else []
    if found != expected + sentinels:
        row = next((i for i, (a, b) in enumerate(zip(found, expected + sentinels, strict=False)) if a != b), len(expected))
        raise ValueError(f"chunk_indices: expected the table of cu_seqlens at chunk_size {chunk_size} ({len(expected)} chunks, "
                         f"{'sentinels last' if capture else 'no sentinels'}), found another one from row {row} on; build it "
                         "with prepare_chunk_indices for the same cu_seqlens and chunk_size")


def _without_sentinels(chunk_indices: torch.Tensor, seqs: int) -> torch.Tensor:
    """A copy without negative or too large sequence numbers: the exact path's kernels have no code that would skip them."""
    chunks = chunk_indices.clamp(min=0)
    chunks[:, 0].clamp_(max=seqs - 1)
    return chunks


def _exact_table(cu_seqlens: torch.Tensor, tokens: int, chunk_size: int) -> torch.Tensor:
    """The table without sentinels, from values read on the host."""
    rows = _chunk_rows(cu_seqlens, tokens, chunk_size)
    return torch.tensor(rows, dtype=torch.int32).reshape(-1, 2).to(cu_seqlens.device)


def _chunk_rows(cu_seqlens: torch.Tensor, tokens: int, chunk_size: int) -> list[list[int]]:
    check_cu_values(cu_seqlens, tokens)
    values = read_values("cu_seqlens", cu_seqlens, "graph_capture=False, or validate=True with chunk_indices,")
    return [[i, t] for i, (a, b) in enumerate(zip(values, values[1:], strict=False)) for t in range(-(-(b - a) // chunk_size))]
