"""The norm under launch records that its tests of values never choose."""

from dataclasses import replace

import pytest
import torch

from graphlin.kernels import norm
from graphlin.kernels.launch import record_for
from tests.ops.norm_check import Norm, norm_inputs, run_norm
from tests.tolerances import assert_close_rms


@pytest.mark.parametrize(("BR", "ROWS", "num_warps"), [(1, 16, 1), (4, 4, 2), (16, 64, 4), (32, 16, 2)])
def test_tiles_change_rounding_alone(device, monkeypatch, BR, ROWS, num_warps):
    """BR rows at a time, partial sums over ROWS, which may be fewer than a tile has."""
    inputs = norm_inputs(Norm(rows=(75,)), device)
    expected = run_norm(inputs)

    def record(kernel, *args, **kwargs):
        own = record_for(kernel, *args, **kwargs)
        tiles = {"BR": BR, "ROWS": ROWS}
        return replace(own, tiles={name: tiles.get(name, value) for name, value in own.tiles.items()}, num_warps=num_warps)

    monkeypatch.setattr(norm, "record_for", record)
    for name, x in run_norm(inputs).items():
        assert_close_rms("dx" if name == "dgate" else name, x, expected[name], torch.float32)
