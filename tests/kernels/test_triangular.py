"""The inverse of unit lower triangles, from every size of the blocks that it starts with."""

import pytest
import torch
import triton
import triton.language as tl

from graphlin.backends import LaunchRecord
from graphlin.kernels.launch import launch
from graphlin.kernels.triangular import two_unit_lower_inverses, unit_lower_inverse


@triton.jit
def invert(x, y, BT: tl.constexpr, BI: tl.constexpr, PREC: tl.constexpr, DOT_BLOCKS: tl.constexpr):
    o = tl.arange(0, BT)
    p = o[:, None] * BT + o[None, :]
    tl.store(y + p, unit_lower_inverse(tl.load(x + p), BT, BI, PREC, DOT_BLOCKS))


@triton.jit
def invert_two(x, y, BI: tl.constexpr, PREC: tl.constexpr, SWAPPED: tl.constexpr):
    o = tl.arange(0, 32)
    o_y = (o + 16 * SWAPPED) % 32
    p_x = o[:, None] * 32 + o[None, :]
    p_y = 1024 + o_y[:, None] * 32 + o_y[None, :]
    b_x, b_y = two_unit_lower_inverses(tl.load(x + p_x), tl.load(x + p_y), BI, PREC, False, SWAPPED)
    tl.store(y + p_x, b_x)
    tl.store(y + p_y, b_y)


BLOCKS = [(16, 4), (16, 8), (16, 16), (32, 4), (32, 8), (32, 16), (32, 32)]


@pytest.mark.parametrize(("BT", "BI", "dot_blocks"), [(*block, False) for block in BLOCKS]
                         + [(BT, BI, True) for BT, BI in BLOCKS if BI >= 16])
def test_inverse_of_a_unit_lower_triangle(device, BT, BI, dot_blocks):
    x = (torch.randn(BT, BT, device=device) / 2).tril(-1)
    y = torch.empty_like(x)
    precision = "tf32x3" if device.type == "cuda" else "ieee"
    launch(invert, 1, x, y, record=LaunchRecord(dict(BI=BI, PREC=precision, DOT_BLOCKS=dot_blocks)), BT=BT)
    expected = torch.linalg.inv(torch.eye(BT, dtype=torch.float64) + x.cpu().double())
    assert (y.cpu() - expected).norm() <= 2e-5 * expected.norm()


@pytest.mark.parametrize("split", [False, True], ids=["float32", "bf16x3"])
@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("BI", [4, 8, 16])
def test_two_inverses_at_once(device, BI, swapped, split):
    if split and device.type != "cuda":
        return                                                   # no other device's record splits; the interpreter can't
    x = (torch.randn(2, 32, 32, device=device) / 2).tril(-1)
    y = torch.empty_like(x)
    precision = "bf16x3" if split else "tf32x3" if device.type == "cuda" else "ieee"
    launch(invert_two, 1, x, y, record=LaunchRecord(dict(BI=BI, PREC=precision), num_warps=2), SWAPPED=swapped)
    expected = torch.linalg.inv(torch.eye(32, dtype=torch.float64) + x.cpu().double())
    for one, other in zip(y.cpu(), expected, strict=True):
        assert (one - other).norm() <= (2e-4 if split else 2e-5) * other.norm()
        assert one.diagonal().eq(1).all() and one.triu(1).eq(0).all()
