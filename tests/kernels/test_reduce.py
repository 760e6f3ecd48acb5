"""Sums over chunks: an order that depends on the chunks that are there, and on nothing else."""

import pytest
import torch

from graphlin.kernels.packing import Packing
from graphlin.kernels.reduce import reduce_partials, reduce_partials_into


def packed(device, used: int, rows: int) -> Packing:
    """A table of `rows` rows, of which the first `used` are chunks."""
    table = torch.full((rows, 2), -1, dtype=torch.int32, device=device)
    table[:used] = 0
    return Packing(torch.zeros(2, dtype=torch.int32, device=device), table, 1, rows * 64, rows, 0, 64, capture=True)


def dense(chunks: int) -> Packing:
    return Packing(None, None, 1, chunks * 64, chunks, chunks, 64, capture=False)


def draw(device, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(device)


@pytest.mark.parametrize(("chunks", "X"), [(1, 1), (31, 7), (32, 64), (33, 600), (95, 5), (1000, 3)])
def test_sums_are_right(device, chunks, X):
    partials = draw(device, chunks, X)
    actual = reduce_partials(partials, dense(chunks))
    assert actual.dtype == torch.float32 and actual.shape == (X,)
    torch.testing.assert_close(actual.double(), partials.double().sum(0), rtol=0, atol=2e-6 * chunks ** 0.5)


@pytest.mark.parametrize("used", [0, 1, 31, 32, 40, 257])
def test_no_bit_depends_on_unused_rows(device, used):
    """A longer table, and whatever its unused rows hold, change nothing."""
    partials = draw(device, used, 70)
    expected = reduce_partials(partials, dense(used))
    for unused in (0, 1, 40, 300):
        rest = partials.new_full((unused, 70), float("nan"))
        actual = reduce_partials(torch.cat([partials, rest]), packed(device, used, used + unused))
        assert torch.equal(actual, expected), f"with {unused} unused rows"
    assert used or torch.count_nonzero(expected) == 0


def test_two_results_of_any_strides_and_dtypes(device):
    partials = draw(device, 40, 5, 70)
    weight = torch.empty(70, 4, dtype=torch.bfloat16, device=device)
    bias = torch.empty(70, dtype=torch.float16, device=device)
    reduce_partials_into(partials, dense(40), weight.t(), bias)
    sums = reduce_partials(partials.view(40, -1), dense(40)).view(5, 70)
    assert torch.equal(weight.t(), sums[:4].bfloat16())
    assert torch.equal(bias, sums[4].half())
    reduce_partials_into(partials[:, :4].contiguous(), dense(40), weight.fill_(7).t())
    assert torch.equal(weight.t(), sums[:4].bfloat16())
