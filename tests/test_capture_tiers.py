"""A ladder of tiers: each call in the smallest one that it fits, in memory that all of them share."""

import random

import pytest
import torch
from torch import nn

from graphlin.capture import capture
from graphlin.errors import TierOverflow, TierUnderflow
from graphlin.tier import Tier
from graphlin.verify import verify
from tests.blocks import Mixer, StateMixer, assert_equal, captured, gradients, pack

TIERS = [Tier(tokens=8, seqs=2), Tier(tokens=24, seqs=4), Tier(tokens=16, seqs=3)]
PACKS = [(5, 3), (24,), (1, 0, 7), (16,), (0,), (6, 6, 6, 6), (2,), (2, 14), (1, 1, 1, 1), (8,)]


class Sees(nn.Module):
    """Tells the number of rows that it was captured with."""

    def forward(self, x, cu_seqlens):
        return torch.where(torch.arange(x.shape[1], device=x.device)[:, None] < cu_seqlens[-1], x, 0.0) + x.shape[1]


@torch.no_grad()
def test_the_smallest_tier_that_fits_is_replayed(device):
    graphed = capture(Sees(), TIERS, num_warmup_iters=1)
    assert graphed.tiers == (Tier(24, 4), Tier(16, 3), Tier(8, 2))
    for lengths in PACKS:
        x, cu = pack(lengths, device)
        tokens, seqs = sum(lengths), len(lengths)
        rows = 8 if tokens <= 8 and seqs <= 2 else 16 if tokens <= 16 and seqs <= 3 else 24
        assert torch.equal(graphed(x, cu), x + rows), lengths
        assert graphed.select(tokens, seqs).tokens == rows
    captured(graphed, len(PACKS))
    assert graphed.stats.captures == 3
    assert graphed.select(25, 1) is None and graphed.select(1, 5) is None


@pytest.mark.parametrize("first", [(6, 6, 6, 6), (1,)], ids=["the largest first", "the smallest first"])
@pytest.mark.parametrize("slots", [1, 2])
def test_tiers_in_any_order_have_the_eager_results(device, first, slots):
    graphed = capture(Mixer().to(device), TIERS, slots=slots, num_warmup_iters=1)
    order = PACKS * 2
    random.shuffle(order)
    for lengths in [first, *order]:
        x, cu = pack(lengths, device, requires_grad=True)
        weight = torch.randn(x.shape, device=device)
        assert_equal(gradients(graphed, x, cu, weight), gradients(graphed.block, x, cu, weight))
    captured(graphed, len(order) + 1, backwards=len(order) + 1)
    assert graphed.stats.captures == 3 * slots


def test_nan_in_slack_and_rows_that_a_larger_tier_left_change_nothing(device):
    graphed = capture(Mixer().to(device), TIERS, num_warmup_iters=1)
    for rows, lengths in ((24, (24,)), (8, (3, 1)), (24, (9,)), (16, (2, 2)), (7, (1,)), (20, (4, 4))):
        x, cu = pack(lengths, device, slack=rows - sum(lengths))
        weight = torch.full(x.shape, float("nan"), device=device)
        weight[:, :sum(lengths)] = torch.randn(sum(lengths), 8)
        exact = gradients(graphed.block, x[:, :sum(lengths)].clone().requires_grad_(), cu, weight[:, :sum(lengths)])
        x.requires_grad_()
        y = graphed(x, cu)
        found = [y.detach(), *torch.autograd.grad(y, [x, *graphed.parameters()], weight)]
        assert not found[0][:, sum(lengths):].any() and not found[1][:, sum(lengths):].any()
        assert_equal([found[0][:, :sum(lengths)], found[1][:, :sum(lengths)], *found[2:]], exact)
    captured(graphed, 6, backwards=6)


class Totals(nn.Module):
    """Reads all rows and states that there are."""

    def forward(self, x, cu_seqlens, initial_state):
        return x + x.sum(1, keepdim=True) + initial_state.sum(0)


def test_a_tier_zeroes_what_a_larger_one_left_two_calls_before(device):
    graphed = capture(Totals().to(device), TIERS, num_warmup_iters=1)
    for lengths in ((24,), (3,), (17, 2), (6, 6, 6, 6), (2,), (9, 0, 1), (20,), (5, 5, 5, 5)):
        x, cu = pack(lengths, device, requires_grad=True)
        state = torch.randn(len(lengths), 8, device=device, requires_grad=True)
        found, expected = graphed(x, cu, state), graphed.block(x, cu, state)
        weight = torch.randn_like(expected)
        assert_equal([found, *torch.autograd.grad(found, [x, state], weight)],
                     [expected, *torch.autograd.grad(expected, [x, state], weight)])
    captured(graphed, 8, backwards=8)


def test_states_and_lengths_of_either_integer_share_the_tiers(device):
    graphed = capture(StateMixer().to(device), TIERS, num_warmup_iters=1)
    for i, lengths in enumerate(PACKS):
        x, cu = pack(lengths, device)
        cu = cu.to(torch.int64 if i % 2 else torch.int32)
        state = {"sum": torch.randn(len(lengths), 8, device=device)}
        (y, states), (y0, states0) = (block(x, cu, initial_state=state, output_final_state=True)
                                      for block in (graphed, graphed.block))
        assert_equal([y, states["sum"], states["parts"][0]], [y0, states0["sum"], states0["parts"][0]])
        del y, states
    captured(graphed, len(PACKS))
    assert graphed.stats.captures == 3


@torch.no_grad()
def test_lengths_that_the_block_returns_keep_their_dtype(device):
    class Ends(nn.Module):
        def forward(self, x, cu_seqlens):
            return x * 2, cu_seqlens.diff()
    graphed = capture(Ends(), TIERS, num_warmup_iters=1)
    x, cu = pack((5, 3), device)
    for dtype in (torch.int32, torch.int64, torch.int32):
        _, lengths = graphed(x, cu.to(dtype))
        assert lengths.dtype == dtype and lengths.tolist() == [5, 3]
    captured(graphed, 3)
    assert graphed.stats.captures == 6


@torch.no_grad()
def test_tokens_behind_other_dims_are_strided_and_right(device):
    class Doubles(nn.Module):
        def forward(self, x):
            return 2 * x
    graphed = capture(Doubles(), TIERS, dims={"x": {2: "tokens"}}, num_warmup_iters=1)
    for tokens in (24, 5, 16, 9, 8, 20, 1):
        x = torch.randn(2, 3, tokens, 4, device=device)
        assert torch.equal(graphed(x), 2 * x)
    captured(graphed, 7)


@torch.no_grad()
def test_a_block_of_constant_shape_is_captured_once(device):
    graphed = capture(nn.Linear(8, 3).to(device), TIERS, num_warmup_iters=1)
    x = torch.randn(30, 8, device=device)
    assert_equal([graphed(x)], [graphed.block(x)])
    captured(graphed, 1)
    assert graphed.stats.captures == 1


def test_forwards_in_different_tiers_wait_together(device):
    graphed = capture(Mixer().to(device), TIERS, slots=2, num_warmup_iters=1)
    calls = [pack(lengths, device, requires_grad=True) for lengths in ((2, 3), (20,), (1, 1, 9))]

    def grads(block):
        for tensor in [*block.parameters(), *(x for x, _ in calls)]:
            tensor.grad = None
        first, second = (block(*call).square().sum() for call in calls[:2])
        second.backward()
        third = block(*calls[2]).square().sum()
        (first + third).backward()
        return [t.grad.clone() for t in [*block.parameters(), *(x for x, _ in calls)]]
    assert_equal(grads(graphed), grads(graphed.block))
    captured(graphed, 3, backwards=3)


def test_one_slot_serves_one_forward_whatever_the_tier(device):
    graphed = capture(Mixer().to(device), TIERS, num_warmup_iters=1)
    (x, cu), (z, ends) = pack((2, 3), device, requires_grad=True), pack((20,), device, requires_grad=True)
    (graphed(x, cu).square().sum() + graphed(z, ends).square().sum()).backward()
    found = [x.grad, z.grad]
    x.grad = z.grad = None
    (graphed.block(x, cu).square().sum() + graphed.block(z, ends).square().sum()).backward()
    assert_equal(found, [x.grad, z.grad])
    captured(graphed, 1, backwards=1, SlotInUse=1)


@torch.no_grad()
def test_badly_fitting_inputs_are_eager_or_refused(device):
    block = Sees()
    graphed = capture(block, TIERS, max_padding=0.5, num_warmup_iters=1)
    for lengths, rows in (((4,), 8), ((3,), 3), ((9,), 16), ((1, 1, 1), 3), ((12, 0, 0, 0), 24), ((11, 0, 0, 0), 11)):
        x, cu = pack(lengths, device)
        assert torch.equal(graphed(x, cu), x + rows), lengths
    captured(graphed, 3, TierUnderflow=3)
    strict = capture(block, TIERS, max_padding=0.5, fallback="raise", num_warmup_iters=1)
    with pytest.raises(TierUnderflow, match="3 tokens, the smallest tier that it fits 8: more than max_padding=0.5.*ladder"):
        strict(*pack((3,), device))
    with pytest.raises(TierOverflow, match="25 tokens in 1 sequences, the tiers hold 24 in 4 or 16 in 3 or 8 in 2; capture a"):
        strict(*pack((25,), device))
    whole = capture(block, TIERS, max_padding=0, num_warmup_iters=1)
    for lengths in ((8,), (16,), (7,)):
        whole(*pack(lengths, device))
    captured(whole, 2, TierUnderflow=1)


def test_verify_names_the_tier_of_the_call(device):
    graphed = capture(Mixer().to(device), TIERS, num_warmup_iters=1)
    for lengths, tier in (((5, 3), Tier(8, 2)), ((5, 4), Tier(16, 3)), ((17,), Tier(24, 4))):
        report = verify(graphed, *pack(lengths, device, requires_grad=True))
        assert report.ok and report.tier == tier, str(report)


def test_memory_is_told_by_tier_and_slot_and_smaller_tiers_have_no_inputs_of_their_own(device):
    graphed = capture(Mixer().to(device), TIERS, slots=2, num_warmup_iters=1)
    assert graphed.memory() == []
    graphed(*pack((5, 3), device, requires_grad=True)).sum().backward()
    with torch.no_grad():
        graphed(*pack((5, 3), device))
    held = graphed.memory()
    assert [(h.slot, h.trains, h.tier.tokens) for h in held] == [
        (slot, trains, tokens) for slot in (0, 1) for trains in (True, False) for tokens in (24, 16, 8)]
    assert sum(h.pool_bytes + h.static_bytes for h in held) == graphed.held_bytes()
    x, cu, mailbox, gradient = 24 * 8 * 4, 5 * 4, 2 * 8, 24 * 8 * 4
    assert [h.static_bytes for h in held[:6]] == [x + cu + mailbox + gradient, 0, 0, 0, 0, 0]
    captured(graphed, 2, backwards=1)


class Wide(nn.Module):
    """Much more between its input and output than in them, and a weight whose gradient is large."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1024, 4096) / 64)

    def forward(self, x, cu_seqlens):
        return ((x @ self.weight).tanh() @ self.weight.T).sin()


@pytest.mark.device_only
@pytest.mark.raw_memory
def test_smaller_tiers_and_other_modes_use_the_memory_of_the_largest(device):
    graphed = capture(Wide().to(device), [Tier(8192, 8), Tier(2048, 8), Tier(512, 4)])
    x, cu = pack((300, 200), device, width=1024, requires_grad=True)
    graphed(x, cu).sum().backward()
    with torch.no_grad():
        graphed(x, cu)
    largest, *others = [held.pool_bytes for held in graphed.memory()]
    assert largest >= 8192 * 4096 * 4
    assert sum(others) <= 0.1 * largest, others
    captured(graphed, 2, backwards=1)


@torch.no_grad()
def test_views_of_outputs_are_right_in_every_tier_until_the_next_replay(device):
    graphed = capture(Sees(), TIERS, copy_outputs=False, num_warmup_iters=1)
    for lengths, rows in 2 * [((5, 3), 8), ((12,), 16), ((20, 3), 24)]:
        x, cu = pack(lengths, device)
        assert torch.equal(graphed(x, cu), x + rows)
    captured(graphed, 6)
