"""Captured blocks whose tensors or modules change around the calls: the eager result, or an error, never the old one."""

import pytest
import torch
from torch import nn

from graphlin.capture import capture
from graphlin.errors import HostSync, ReplayError
from graphlin.price import price
from graphlin.tier import Tier
from graphlin.verify import verify
from tests.blocks import Mixer, assert_equal, captured, gradients, pack, until_slots_are_free

TIER = Tier(24, 4)


class Turned(nn.Module):
    """Reads one buffer in its backward, and writes another in every forward."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8))
        self.register_buffer("cos", torch.rand(8))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x, cu_seqlens):
        self.calls.add_(1)
        return (x * self.weight) ** 2 * self.cos


@pytest.fixture
def turned(device):
    return capture(Turned().to(device), TIER, num_warmup_iters=1)


def test_a_buffer_written_before_the_backward_is_an_error(device, turned):
    x, cu = pack((5, 3), device, requires_grad=True)
    y = turned(x, cu)
    with torch.no_grad():
        turned.block.cos.mul_(3)
    with pytest.raises(ReplayError, match="a parameter, buffer, static input or view of an output was modified in place"):
        y.sum().backward()


def test_a_static_input_written_before_the_backward_is_an_error(device, turned):
    x, cu = pack((5, 3), device)
    buffer = turned.static_inputs(x, cu)["x"]
    buffer[:, :8] = x
    y = turned(buffer[:, :8], cu)
    buffer[:, :8] = 0
    with pytest.raises(ReplayError, match="write the next batch, after the backward"):
        y.sum().backward()
    captured(turned, 1, backwards=0)


def test_static_lengths_written_before_the_backward_are_an_error(device):
    graphed = capture(Mixer().to(device), TIER, num_warmup_iters=1)
    x, cu = pack((2, 3, 2, 1), device, requires_grad=True)
    scale = torch.ones((), device=device)
    ends = graphed.static_inputs(x, cu)["cu_seqlens"].copy_(cu)
    expected = gradients(graphed.block, x, cu, scale)
    assert_equal(gradients(graphed, x, ends, scale), expected)
    y = graphed(x, ends)
    ends.copy_(torch.tensor([0, 1, 2, 2, 2]))
    with pytest.raises(ReplayError, match="write the next batch, after the backward"):
        y.sum().backward()
    del y
    until_slots_are_free(graphed)
    assert_equal(gradients(graphed, x, ends.copy_(cu), scale), expected)
    captured(graphed, 3, backwards=2)


class Doubled(nn.Module):
    """Its backward reads its first output."""

    def forward(self, x, cu_seqlens):
        y = x.tanh()
        return y, 2 * y


@pytest.mark.parametrize("copies", [True, False])
def test_a_view_of_an_output_written_before_the_backward_is_an_error_and_a_copy_is_none(device, copies):
    graphed = capture(Doubled(), TIER, num_warmup_iters=1, copy_outputs=copies)
    x, cu = pack((5, 3), device, requires_grad=True)
    first, second = graphed(x, cu)
    first.detach().zero_()
    if copies:
        assert_equal(torch.autograd.grad(second.sum(), x), torch.autograd.grad(graphed.block(x, cu)[1].sum(), x))
    else:
        with pytest.raises(ReplayError, match="view of an output was modified in place"):
            second.sum().backward()
    captured(graphed, 1, backwards=int(copies))


class Grows(nn.Module):
    """Keeps a table of as many rows as it has met, which a longer input replaces."""

    def __init__(self):
        super().__init__()
        self.tables = [torch.zeros(0)]

    def forward(self, x, cu_seqlens):
        rows = x.shape[1]
        if len(self.tables[0]) < rows:
            self.tables[0] = torch.arange(rows, device=x.device).float()
        return x * self.tables[0][:rows, None]


def test_a_table_that_a_larger_eager_call_replaces_is_kept_for_the_graphs(device):
    graphed = capture(Grows(), TIER, num_warmup_iters=1)
    (x, cu), (large, ends) = (pack(lengths, device, requires_grad=True) for lengths in ((5, 3), (25,)))
    scale, rows = torch.ones((), device=device), torch.arange(8, device=device)[:, None]
    y, dx = gradients(graphed, x, cu, scale)
    read, = graphed.block.tables
    assert torch.equal(gradients(graphed, large, ends, scale)[1], graphed.block.tables[0][:, None].expand(1, 25, 8))
    kept = [t for mode in graphed._modes.values() for pairs in mode.pairs.values() for pair in pairs for t in pair.keeps]
    assert len(read) == 24 and any(t is read for t in kept) and graphed.block.tables[0] is not read
    del read, kept
    others = [torch.full((24,), 7.0, device=device) for _ in range(64)]  # in memory that was freed, if any was
    for found, expected in zip(gradients(graphed, x, cu, scale), (x.detach() * rows, rows.expand(1, 8, 8)), strict=True):
        assert torch.equal(found, expected.to(found.dtype)) and len(others) == 64
    assert torch.equal(y, x.detach() * rows) and torch.equal(dx, rows.expand(1, 8, 8).float())
    captured(graphed, 2, backwards=2, TierOverflow=1)


def test_a_buffer_that_the_forward_writes_itself_is_none(device):
    turned = capture(Turned().to(device), TIER, slots=2, num_warmup_iters=1)
    x, cu = pack((5, 3), device, requires_grad=True)
    first, second = turned(x, cu), turned(x, cu)
    turned.block(x, cu)
    (first + second).sum().backward()
    captured(turned, 2, backwards=2)
    assert turned.block.calls == 3


def test_a_capture_does_not_disturb_a_backward_that_waits(device, turned):
    big, big_cu = pack((25,), device, requires_grad=True)
    x, cu = pack((5, 3), device, requires_grad=True)
    eager = turned(big, big_cu)                                  # over the tier: autograd saves `cos`
    (eager.sum() + turned(x, cu).sum()).backward()
    assert big.grad is not None and x.grad is not None
    captured(turned, 1, backwards=1, TierOverflow=1)


def test_a_block_made_in_inference_mode(device):
    class Scales(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("cos", torch.rand(8))

        def forward(self, x, cu_seqlens):
            return x * self.cos

    with torch.inference_mode():
        graphed = capture(Scales().to(device), TIER, num_warmup_iters=1)
        x, cu = pack((5, 3), device)
        assert torch.equal(graphed(x, cu), graphed.block(x, cu))
    captured(graphed, 1)


def test_a_block_may_be_moved_and_cast_until_its_first_call(device):
    graphed = capture(Mixer(), TIER) if device.type == "cpu" else capture(Mixer().to(device), TIER)
    graphed.to(torch.float64)
    graphed.block.extra = nn.Identity()
    x, cu = pack((5, 3), device, dtype=torch.float64, requires_grad=True)
    graphed(x, cu).sum().backward()
    captured(graphed, 1, backwards=1)


def test_refresh_takes_another_dtype_and_more_modules_after_a_sample(device):
    x, cu = pack((5, 3), device)
    graphed = capture(Mixer().to(device), TIER, (x, cu), num_warmup_iters=1)
    graphed.block.extra = nn.Identity()
    graphed.to(torch.float64)
    graphed.refresh()
    x = x.double()
    torch.testing.assert_close(graphed(x, cu), graphed.block(x, cu))
    captured(graphed, 1)


def test_refresh_takes_another_forward(device):
    graphed = capture(Mixer().to(device), TIER, num_warmup_iters=1)
    x, cu = pack((5, 3), device)
    graphed(x, cu)
    forward = graphed.block.forward
    graphed.block.forward = lambda hidden, cu_seqlens, factor: factor * forward(hidden, cu_seqlens)
    graphed.refresh()
    torch.testing.assert_close(graphed(x, cu, 3.0), graphed.block(x, cu, 3.0))
    captured(graphed, 2)


def test_returned_integers_keep_their_dtype_after_a_failed_capture(device):
    class Returns(nn.Module):
        def forward(self, x, cu_seqlens, fails=False):
            return x * 2 if not fails else x * x.sum().item(), cu_seqlens + 0

    graphed = capture(Returns(), TIER, num_warmup_iters=1)
    x, cu = pack((5, 3), device)
    assert graphed(x, cu)[1].dtype == torch.int32
    with pytest.raises(HostSync, match=r"(reads a tensor's value|waits for the device).*test_capture_changes.py:\d+ in forward"):
        graphed(x, cu, True)
    assert graphed(x, cu.long())[1].dtype == torch.int64
    assert graphed(x, cu)[1].dtype == torch.int32
    captured(graphed, 3)


def test_a_budget_refuses_calls_over_the_tiers_that_it_would_leave(device):
    graphed = capture(Mixer().to(device), [Tier(32, 2), Tier(8, 2)], budget=2000)
    x, cu = pack((20,), device)
    with pytest.raises(RuntimeError, match="over the budget"):
        graphed(x, cu)
    assert graphed.stats.eager == {}


def test_a_price_of_a_call_over_the_tier_and_of_unused_parameters(device):
    block = Mixer().to(device)
    block.unused = nn.Parameter(torch.zeros(4, device=device))
    x, cu = pack((20,), device, requires_grad=True)
    assert price(block, Tier(8, 2), (x, cu)).total > 0
    with pytest.raises(TypeError, match="sample_args: expected a tuple"):
        price(block, TIER, x)


def test_masked_logits_are_no_mismatch(device):
    class Masks(nn.Module):
        def forward(self, x, cu_seqlens):
            return torch.where(x > 0, x, float("-inf"))

    x, cu = pack((5, 3), device)
    report = verify(capture(Masks(), TIER, num_warmup_iters=1), x, cu)
    assert report.ok, report


def test_verify_runs_captured_parts_as_they_are(device):
    class Outer(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x, cu_seqlens):
            return self.inner(x, cu_seqlens) + 1

    inner = capture(Mixer().to(device), Tier(8, 4), num_warmup_iters=1)
    x, cu = pack((5, 3), device)
    report = verify(capture(Outer(inner), TIER, num_warmup_iters=1), x, cu)
    assert report.ok, report
    assert inner.stats.replays == 0 and not inner.stats.eager


class Halves(nn.Module):
    """A parameter and a buffer of 16 bits, whose bits are another number in the other such dtype."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8).half())
        self.register_buffer("cos", torch.rand(8).half())

    def forward(self, x, cu_seqlens):
        return x * self.weight.float() + self.cos.float()


@torch.no_grad()
@pytest.mark.parametrize("name", ["weight", "cos"])
def test_a_tensor_of_another_dtype_at_the_same_address_is_noticed(device, name):
    """As a cast there and back may leave it, where the allocator hands out the first memory again."""
    graphed = capture(Halves().to(device), TIER, num_warmup_iters=1)
    x, cu = pack((5, 3), device)
    before, tensor = graphed(x, cu), getattr(graphed.block, name)
    tensor.data = tensor.data.view(torch.bfloat16)
    found = graphed(x, cu)
    assert torch.equal(found, graphed.block(x, cu)) and not torch.equal(found, before)
    captured(graphed, 1, StaleAddress=1)
    graphed.refresh()
    assert torch.equal(graphed(x, cu), found)
    captured(graphed, 2, StaleAddress=1)


@torch.no_grad()
def test_a_block_cast_after_its_capture_is_noticed(device):
    graphed = capture(Mixer().to(device), TIER, num_warmup_iters=1)
    x, cu = pack((5, 3), device)
    graphed(x, cu)
    graphed.to(torch.float64)
    assert torch.equal(graphed(x.double(), cu), graphed.block(x.double(), cu))
    captured(graphed, 1, StaleAddress=1)


@torch.no_grad()
def test_inputs_of_another_dtype_are_a_mode_of_their_own(device):
    graphed = capture(Halves().to(device), TIER, num_warmup_iters=1)
    x, cu = pack((5, 3), device)
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float64):
        found = graphed(x.to(dtype), cu)
        assert found.dtype == torch.promote_types(dtype, torch.float32)
        assert torch.equal(found, graphed.block(x.to(dtype), cu))
    captured(graphed, 4)
    assert graphed.stats.captures == 3


def test_the_mode_of_one_submodule_counts(device):
    """Dropout in evaluation inside a block in training, as where a part is frozen."""
    graphed = capture(Mixer(dropout=0.5).to(device), TIER, num_warmup_iters=1)
    x, cu = pack((5, 3), device)
    graphed(x, cu).sum().backward()
    graphed.block.dropout.eval()
    assert graphed.training and graphed.block.training
    for _ in range(2):
        torch.testing.assert_close(graphed(x, cu), graphed.block(x, cu))
    captured(graphed, 3, backwards=1)
    assert graphed.stats.captures == 2


@torch.no_grad()
def test_autocast_to_each_dtype_is_a_mode_of_its_own(device):
    graphed = capture(Mixer().to(device), TIER, num_warmup_iters=1)
    x, cu = pack((5, 3), device)
    for dtype in (torch.bfloat16, torch.float16, torch.bfloat16):
        with torch.autocast(device.type, dtype=dtype):
            found, expected = graphed(x, cu), graphed.block(x, cu)
        assert found.dtype == dtype
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
    captured(graphed, 3)
    assert graphed.stats.captures == 2
