"""Launch records of the host: tiles large enough that few programs run in the slow interpreter."""

import torch

from graphlin.backends.protocol import LaunchRecord

_TILES: dict[str, dict] = {}


def launch_record(kernel: str, *, arch: str, K: int, V: int, BT: int, dtype: torch.dtype) -> LaunchRecord:
    """The host's record of a kernel; every architecture, shape and dtype shares it."""
    return LaunchRecord(tiles=_TILES.get(kernel, {}), waves=1)
