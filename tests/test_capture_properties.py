"""Properties that hold for whatever packs, tiers, slots and modes hypothesis draws."""

from dataclasses import dataclass

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from graphlin.capture import capture
from graphlin.tier import Tier, ladder, largest_first
from tests.blocks import AtTier, Mixer, captured, pack

TOKENS, SEQS = 20, 4
quick = settings(max_examples=25, deadline=None, derandomize=True,
                 suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
tiers = st.lists(st.builds(Tier, st.integers(1, TOKENS), st.integers(1, SEQS)), min_size=1, max_size=3)


@dataclass(frozen=True)
class Step:
    """One call: its pack, the mode that it is made in, and whether its backward runs before the next call's forward."""

    lengths: tuple[int, ...]
    slack: int
    wide: bool                               # int64 lengths
    grad: bool
    input_grad: bool
    train: bool
    waits: bool


steps = st.builds(Step, st.lists(st.integers(0, 9), min_size=1, max_size=SEQS + 1).map(tuple), st.integers(0, 3),
                  *[st.booleans()] * 5)


class Replayed:
    """Runs steps through a graphed block, and notes which of them found a tier and a slot."""

    def __init__(self, graphed, slots):
        self.graphed, self.slots = graphed, slots
        self.waiting, self.replays, self.backwards, self.eager = [], 0, 0, {}

    def call(self, step, device):
        graphed, block = self.graphed, self.graphed.block
        x, cu = pack(step.lengths, device, slack=step.slack)
        x, cu = x.requires_grad_(step.input_grad), cu.to(torch.int64 if step.wide else torch.int32)
        tier = graphed.select(x.shape[1], len(step.lengths))
        held = sum(replayed for _, replayed in self.waiting)
        reason = "TierOverflow" if tier is None else "SlotInUse" if held == self.slots else None
        graphed.train(step.train)
        with torch.set_grad_enabled(step.grad):
            found, expected = graphed(x, cu), AtTier(block, None if reason else tier)(x, cu)
        assert torch.equal(found, expected) and found.requires_grad == step.grad
        assert not found[:, sum(step.lengths):].any()
        self.replays += reason is None
        if reason:
            self.eager[reason] = self.eager.get(reason, 0) + 1
        if step.grad:
            weight = torch.randn(found.shape, device=device)
            wanted = [*([x] if step.input_grad else []), *block.parameters()]
            self.waiting.append((lambda: self.compare(found, expected, weight, wanted), reason is None))
        if not step.waits:
            self.finish()

    def compare(self, found, expected, weight, wanted):
        for f, e in zip(*(torch.autograd.grad((y * weight).sum(), wanted) for y in (found, expected)), strict=True):
            assert torch.equal(f, e)

    def finish(self):
        """The backwards of all that wait, the latest first."""
        while self.waiting:
            compare, replayed = self.waiting.pop()
            compare()
            self.backwards += replayed


@given(tiers=tiers, slots=st.integers(1, 2), calls=st.lists(steps, min_size=1, max_size=6))
@quick
def test_any_woven_calls_have_the_bits_of_eager_at_the_tiers_shapes(device, tiers, slots, calls):
    graphed = capture(Mixer().to(device), tiers, slots=slots, num_warmup_iters=1)
    run = Replayed(graphed, slots)
    for step in calls:
        run.call(step, device)
    run.finish()
    captured(graphed, run.replays, backwards=run.backwards, **run.eager)


@given(tiers=tiers, tokens=st.integers(0, TOKENS + 1), seqs=st.integers(0, SEQS + 1))
def test_the_tier_of_a_call_is_the_smallest_that_it_fits(device, tiers, tokens, seqs):
    order = largest_first(tiers)
    assert set(order) == set(tiers) and len(order) == len(set(tiers))
    fits = [tier for tier in order if tier.fits(tokens, seqs)]
    graphed = capture(Mixer().to(device), tiers)
    found = graphed.select(tokens, seqs)
    assert found == (fits[-1] if fits else None)
    assert all((found.tokens, found.seqs) <= (tier.tokens, tier.seqs) for tier in fits)


@given(tokens=st.integers(1, 10_000), seqs=st.integers(1, 200), smallest=st.integers(1, 5_000), factor=st.integers(2, 5))
def test_a_ladder_halves_down_to_its_smallest(tokens, seqs, smallest, factor):
    tiers = ladder(tokens, seqs, smallest=smallest, factor=factor, chunk_size=32)
    assert tiers[0] == Tier(tokens, seqs, 32) and largest_first(tiers) == tiers
    for larger, smaller in zip(tiers, tiers[1:], strict=False):
        assert smaller == Tier(-(-larger.tokens // factor), -(-larger.seqs // factor), 32) and smaller.tokens >= smallest
    assert tiers[-1].tokens == 1 or -(-tiers[-1].tokens // factor) < smallest
