"""Bytes that the graphs of a block will hold, told before one is captured."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from io import StringIO
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import nn

from graphlin.errors import Resource
from graphlin.packing import Dims, Signature
from graphlin.rehearsal import TierPrice
from graphlin.tier import Tier

MIB = 1 << 20


@dataclass(frozen=True)
class Price:
    """Bytes that captured graphs hold: `tiers` has a `TierPrice` for each tier (of each mode), largest first.

    A slot holds `per_slot`: static tensors (`static`) and the segments of its private pool (`pool`). There are `slots` of them,
    which hold `total`, in `graphs` graphs, of which each takes a stream or more on Ascend. Printing a price shows a table.
    """

    tiers: tuple[TierPrice, ...]
    slots: int = 1

    @property
    def static(self) -> int:
        return sum(tier.static for tier in self.tiers)

    @property
    def pool(self) -> int:
        return sum(tier.pool for tier in self.tiers)

    @property
    def per_slot(self) -> int:
        return self.static + self.pool

    @property
    def total(self) -> int:
        return self.slots * self.per_slot

    @property
    def graphs(self) -> int:
        return self.slots * sum(tier.graphs for tier in self.tiers)

    def as_json(self) -> dict[str, Any]:
        """All numbers, in bytes, as JSON has them."""
        tiers = [asdict(tier) | {"total": tier.total} for tier in self.tiers]
        return {"tiers": tiers, "static": self.static, "pool": self.pool, "per_slot": self.per_slot, "slots": self.slots,
                "total": self.total, "graphs": self.graphs}

    def __rich__(self) -> Table:
        table = Table(title="What the graphs hold, in MiB", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0),
                      caption=f"in {self.graphs} graph{'s' * (self.graphs != 1)}")
        for column in ("tier", "inputs", "outputs", "inter-\nmediates", "gradients", "static\nadds", "pool\nadds", "tier\nadds"):
            table.add_column(column, justify="right", no_wrap=True)
        for t in self.tiers:
            sizes = (t.inputs, t.outputs, t.intermediates, t.gradients, t.static, t.pool, t.total)
            table.add_row(f"{t.tier.tokens} x {t.tier.seqs}", *map(_mib, sizes))
        table.add_section()
        table.add_row("a slot", *[""] * 4, *map(_mib, (self.static, self.pool, self.per_slot)))
        table.add_row(f"{self.slots} slot{'s' * (self.slots > 1)}", *[""] * 6, _mib(self.total))
        return table

    def __str__(self) -> str:
        out = StringIO()
        Console(file=out, width=80, color_system=None).print(self)
        return out.getvalue().rstrip()


def price(block: nn.Module, tier: Tier | Sequence[Tier], sample_args: Sequence = (),
          sample_kwargs: Mapping[str, Any] | None = None, *, dims: Dims | None = None) -> Price:
    """What `graphlin.capture` of a call would hold in a slot, in bytes, before anything is captured or allocated.

    The capture is rehearsed in the current mode (grad, autocast, training) on tensors without memory, and a model of the
    device's allocator is told of every tensor. A block on the meta device is priced as on an NVIDIA device of compute
    capability 9.0. Not counted: what matrix libraries keep beside the pools (cuBLAS on Hopper 32 MiB for each thread and
    stream, so 64 for a slot with gradients), the graphs themselves, and kernels' code.

    Args:
        block: as for `capture`. Nothing in it is changed.
        tier: the bound, or several.
        sample_args, sample_kwargs: a call as for `capture`; only shapes, dtypes and requires_grad of its tensors count, so
            they may be small, and on the meta device. Default, for a block that takes cu_seqlens and has a `hidden_size`:
            a packed call of its parameters' dtype, whose input requires a gradient in grad mode.
        dims: as for `capture`.

    Raises:
        TypeError, ValueError: naming the argument.
        CaptureError: HostSync, or UnsupportedModule, where the block could not be captured; UnsupportedModule too where it
            can't run without memory, such as with kernels of its own that are no custom ops.
        BackendUnavailable: no backend serves the block's device in this process.

    >>> layer = graphlin.layers.GatedDeltaNet(hidden_size=2048, head_dim=128, num_heads=16).to("meta")
    >>> print(graphlin.price(layer, graphlin.Tier(4096, 32)))
    """
    from graphlin.capture import capture, check_sample  # which ask for prices themselves, for a budget
    args, kwargs = check_sample(sample_args, sample_kwargs)
    graphed = capture(block, tier, dims=dims, allow_unused_input=True)
    if not args and not kwargs:
        args, kwargs = _sample(block)
    return graphed.quote_call(args, kwargs)


def _sample(block: nn.Module) -> tuple[tuple, dict]:
    parameter = next(block.parameters(), None)
    width = getattr(block, "hidden_size", None)
    if parameter is None or not isinstance(width, int) or Signature(block).cu is None:
        raise ValueError("sample_args: expected a call, such as the one that will be captured: the block has no hidden_size, no "
                         "parameter or no cu_seqlens argument that would tell of its calls")
    hidden = torch.empty(1, 1, width, dtype=parameter.dtype, device="meta", requires_grad=torch.is_grad_enabled())
    return (hidden,), {"cu_seqlens": torch.empty(2, dtype=torch.int32, device="meta")}


def check_budget(budget: int, tiers: Sequence[Tier], quote: Callable[[Sequence[Tier]], Price]) -> None:
    """Raises Resource where all tiers together would pass the budget; it names those to drop, the largest first."""
    full = quote(tiers)
    if full.total <= budget:
        return
    for i in range(1, len(tiers)):
        rest = quote(tiers[i:])
        if rest.total <= budget:
            dropped = ", ".join(f"{tier.tokens} x {tier.seqs}" for tier in tiers[:i])
            advice = f"Drop {dropped}: the others hold {_mib(rest.total)} MiB"
            break
    else:
        advice = "No tier of these fits: take a smaller one"
    slots = f", or fewer slots: each of the {full.slots} holds {_mib(full.per_slot)} MiB" if full.slots > 1 else ""
    raise Resource(f"the graphs would hold {_mib(full.total)} MiB, over the budget of {_mib(budget)} MiB. {advice}{slots}. "
                   f"Nothing was captured.\n{full}")


def _mib(size: int) -> str:
    return f"{size / MIB:.1f}"
