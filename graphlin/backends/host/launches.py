"""What counts as a launch in the profiler's events of a CPU run."""

from collections.abc import Sequence
from typing import Any

import torch

# Profiler ranges around what leaves no event of its own.
LAUNCH_MARK = "graphlin::launch"
REPLAY_MARK = "graphlin::replay"


def count_launches(events: Sequence[Any]) -> int:
    """ATen ops that do work (no views, no allocations), Triton launches and host-graph replays, each as one."""
    return sum(_launches_under(event) for event in events if event.cpu_parent is None)


def _launches_under(event: Any) -> int:
    """Launches under one profiler event; a launch's or replay's own inner ops are part of it."""
    if event.name in (LAUNCH_MARK, REPLAY_MARK):
        return 1
    inner = sum(_launches_under(child) for child in event.cpu_children)
    return inner or int(event.name.startswith("aten::") and _does_work(event.name.removeprefix("aten::")))


def _does_work(op: str) -> bool:
    if op.startswith(("empty", "new_empty", "_unsafe_view")) or not hasattr(torch.ops.aten, op):
        return False
    packet = getattr(torch.ops.aten, op)
    schema = getattr(packet, packet.overloads()[0])._schema
    return any(r.alias_info is None or r.alias_info.is_write for r in schema.returns)
