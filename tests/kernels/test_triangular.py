"""The inverse of unit lower triangles, from every size of the blocks that it starts with."""

import pytest
import torch
import triton
import triton.language as tl

from graphlin.backends import LaunchRecord
from graphlin.kernels.launch import launch
from graphlin.kernels.triangular import unit_lower_inverse


@triton.jit
def invert(x, y, BT: tl.constexpr, BI: tl.constexpr, PREC: tl.constexpr, DOT_BLOCKS: tl.constexpr):
    o = tl.arange(0, BT)
    p = o[:, None] * BT + o[None, :]
    tl.store(y + p, unit_lower_inverse(tl.load(x + p), BT, BI, PREC, DOT_BLOCKS))


BLOCKS = [(16, 4), (16, 8), (16, 16), (32, 4), (32, 8), (32, 16), (32, 32)]


@pytest.mark.parametrize(("BT", "BI", "dot_blocks"), [(*block, False) for block in BLOCKS]
                         + [(BT, BI, True) for BT, BI in BLOCKS if BI >= 16])
def test_inverse_of_a_unit_lower_triangle(device, BT, BI, dot_blocks):
    x = (torch.randn(BT, BT, device=device) / 2).tril(-1)
    y = torch.empty_like(x)
    precision = "ieee" if device.type == "cpu" else "tf32x3"
    launch(invert, 1, x, y, record=LaunchRecord(dict(BI=BI, PREC=precision, DOT_BLOCKS=dot_blocks)), BT=BT)
    expected = torch.linalg.inv(torch.eye(BT, dtype=torch.float64) + x.cpu().double())
    assert (y.cpu() - expected).norm() <= 2e-5 * expected.norm()
