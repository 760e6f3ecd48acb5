"""Uninitialised memory that shows who reads it, and who writes beside it."""

import os
import sys
from collections.abc import Callable

import torch
from torch.utils._device import _device_constructors

_empty = torch.empty      # as it is outside tests
_device_constructors()    # torch lists what `with torch.device(...)` affects once, and must see its own functions then

GUARD = 4096            # elements before and after each tensor
POISON = 0x7ffb         # in every 16 bits: a NaN in every float dtype, none that arithmetic makes, and a large integer


class PoisonedMemory:
    """Makes `torch.empty` and its kin give tensors full of poison, between guards that must stay as they are.

    All memory is held until `check`, so that what was written beside a tensor is still there to be seen.
    """

    def __init__(self) -> None:
        self._held: list[tuple[str, torch.Tensor, int]] = []

    def allocating(self, allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """`allocate`, whose results are poisoned and guarded."""
        def poisoned(*args, **kwargs):
            out = allocate(*args, **kwargs)
            if out.untyped_storage().device.type != "meta" and out.numel():  # which fake tensors have too
                caller = sys._getframe(1)
                self._enclose(out, f"{os.path.basename(caller.f_code.co_filename)}:{caller.f_lineno}")
            return out
        return poisoned

    @torch.no_grad()
    def _enclose(self, out: torch.Tensor, where: str) -> None:
        units, margin = -(-out.untyped_storage().nbytes() // 2), GUARD * out.element_size() // 2
        memory = _empty(units + 2 * margin, dtype=torch.int16, device=out.device).fill_(POISON)
        out.set_(memory.untyped_storage(), GUARD, out.shape, out.stride())
        if out.dtype == torch.bool:
            out.fill_(True)
        capturing = getattr(torch.get_device_module(out.device), "is_current_stream_capturing", bool)
        if not capturing():     # in a capture the fill runs at a replay, if ever
            self._held.append((f"{out.dtype} {list(out.shape)} of {where}", memory, margin))

    def check(self) -> None:
        """Asserts that all guards are as they were, and lets go of the memory."""
        held, self._held = self._held, []
        written = [[(guard != POISON).any() for guard in (memory[:margin], memory[-margin:])] for _, memory, margin in held]
        for (name, _, _), guards in zip(held, torch.tensor(written).tolist(), strict=True):
            for side, was_written in zip(("before", "after"), guards, strict=True):
                assert not was_written, f"memory {side} the tensor {name} was written"
