"""Zeros in inactive rows, by all programs of a launch and by the last of them."""

import pytest
import torch
import triton
import triton.language as tl

from graphlin.backends import LaunchRecord
from graphlin.kernels import common
from graphlin.kernels.common import zero_inactive_rows
from graphlin.kernels.launch import launch
from tests.inputs import cu_of


@triton.jit
def zero(x, cu, N, T, X: tl.constexpr):
    zero_inactive_rows(x, cu, N, T, X, 16)


@pytest.mark.parametrize("programs", [1, 511, 512, 520])
@pytest.mark.parametrize("active", [0, 3, 70])
def test_the_last_programs_zero_the_inactive_rows_and_no_other(device, programs, active):
    x = torch.ones(70, 5, device=device)
    launch(zero, programs, x, cu_of((active, 0), device), 2, 70, record=LaunchRecord(), X=5)
    assert torch.equal(x, (torch.arange(70, device=device) < active).float()[:, None].expand(70, 5))
    assert common.LAST_PROGRAMS.value == 512
