"""Argument checks of the public ops: each names the argument, what was expected and what was found."""

from collections.abc import Sequence
from typing import Any

import torch

from graphlin.backends import get_backend
from graphlin.errors import HostSync

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
CHUNK_SIZES = (16, 32, 64)


def check_tensor(name: str, x: object, *, shape: Sequence[int | str] | None = None,
                 dtypes: Sequence[torch.dtype] = FLOATS, like: torch.Tensor | None = None) -> None:
    """Raises TypeError for a non-tensor, ValueError for one that is not dense, and for a wrong shape, dtype or device.

    shape: sizes, or letters for sizes that are free. like: a tensor whose device must be shared.
    """
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name}: expected a tensor, found {type(x).__name__}")
    if x.is_nested or x.layout is not torch.strided:
        found = "a nested one" if x.is_nested else f"one of layout {str(x.layout).removeprefix('torch.')}"
        raise ValueError(f"{name}: expected a dense tensor, found {found}; call .to_dense(), or pack sequences with cu_seqlens")
    if shape is not None:
        expected = "[" + ", ".join(str(s) for s in shape) + "]"
        if x.dim() != len(shape) or any(isinstance(s, int) and s != n for s, n in zip(shape, x.shape, strict=True)):
            raise ValueError(f"{name}: expected shape {expected}, found {list(x.shape)}")
    if x.dtype not in dtypes:
        names = ", ".join(str(d).removeprefix("torch.") for d in dtypes)
        raise ValueError(f"{name}: expected dtype {names}, found {str(x.dtype).removeprefix('torch.')}")
    if like is not None and x.device != like.device:
        raise ValueError(f"{name}: expected device {like.device}, found {x.device}")


def in_memory(x: torch.Tensor) -> torch.Tensor:
    """x as kernels read it: contiguous, and not the negative of what lies there (as `z.conj().imag` is, and stays if it is one
    element, which is contiguous)."""
    return (x.resolve_neg() if x.is_neg() else x).contiguous()


def check_chunk_size(chunk_size: int) -> None:
    """Raises ValueError unless chunk_size is one that the kernels are made for."""
    if not isinstance(chunk_size, int) or chunk_size not in CHUNK_SIZES:
        raise ValueError(f"chunk_size: expected one of {', '.join(map(str, CHUNK_SIZES))}, found {chunk_size!r}")


def check_scale(scale: object, K: int) -> float:
    """The factor on q, `K ** -0.5` for None. A tensor would be read on the host, so it is a TypeError."""
    if scale is None:
        return K ** -0.5
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        raise TypeError(f"scale: expected a Python number or None, found {type(scale).__name__}")
    return float(scale)


def check_cu_seqlens(cu_seqlens: torch.Tensor, x: torch.Tensor, name: str) -> None:
    """cu_seqlens must be `[N + 1]` integers on x's device, N >= 1, and x packed into one row of the batch."""
    check_tensor("cu_seqlens", cu_seqlens, shape=("N + 1",), dtypes=(torch.int32, torch.int64), like=x)
    if cu_seqlens.shape[0] < 2:
        raise ValueError(f"cu_seqlens: expected at least 2 entries (one sequence), found {cu_seqlens.shape[0]}")
    if x.shape[0] != 1:
        raise ValueError(f"{name}: expected batch 1 with cu_seqlens (pack the sequences along dim 1), found batch {x.shape[0]}")


def read_values(name: str, x: torch.Tensor, purpose: str) -> Any:
    """The tensor's values on the host (as `tolist`): one sync, refused inside a capture."""
    if get_backend(x.device).is_capturing():
        raise HostSync(f"{purpose} reads {name} on the host, which a capture cannot do; "
                       "leave it out of the captured call, or do it before the capture.")
    return x.tolist()


def check_cu_values(cu_seqlens: torch.Tensor, tokens: int) -> None:
    """Raises ValueError unless the values start at 0, never decrease and end within `tokens`."""
    values = read_values("cu_seqlens", cu_seqlens, "validate=True")
    if values[0] != 0:
        raise ValueError(f"cu_seqlens: expected to start at 0, found {values[0]}")
    for i, (a, b) in enumerate(zip(values, values[1:], strict=False)):
        if b < a:
            raise ValueError(f"cu_seqlens: expected values that never decrease, found {a} then {b} at index {i + 1}")
    if values[-1] > tokens:
        raise ValueError(f"cu_seqlens: expected the last value within the {tokens} tokens given, found {values[-1]}")
