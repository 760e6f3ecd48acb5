"""Entries: a call's rows are copied in by the forward graph itself, from the tensors that it is told of before a replay."""

import weakref

import pytest
import torch
from torch import nn

from graphlin.capture import capture
from graphlin.kernels import copy_rows
from graphlin.tier import Tier
from graphlin.verify import verify
from tests.blocks import Mixer, assert_equal, captured, gradients, pack

TIERS = [Tier(tokens=24, seqs=4), Tier(tokens=8, seqs=2)]


class Entry:
    """What a device's entry does, for any backend: before each replay it launches by what it was told last."""

    def __init__(self, graph, launch):
        self.launch, self.told, self.enabled, self.replay = launch, None, True, graph.replay
        graph.replay = self.launch_and_replay

    def set(self, tensors, integers):
        self.enabled = tensors[0].data_ptr() % 16 == 0 and tensors[1].dtype == torch.int32
        if self.enabled:
            self.told = [weakref.ref(t) for t in tensors], integers  # it keeps no memory
        return self.enabled

    def enable(self, enabled):
        self.enabled = enabled

    def launch_and_replay(self):
        if self.enabled:
            tensors, integers = self.told
            self.launch(tuple(t() for t in tensors), integers)
        self.replay()


class Recordable:
    """A prepared launch that graphs can record, for backends without such."""

    def __init__(self, launch):
        self.launch, self.entries = launch, []

    def __call__(self, tensors, integers):
        self.launch(tensors, integers)

    def record(self, graph, tensors, integers):
        return Entry(graph, self.launch)


@pytest.fixture(autouse=True)
def entries(device, monkeypatch):
    """Every graph has an entry: the device's own, or ours."""
    prepare = copy_rows.prepare
    if device.type != "cuda":
        monkeypatch.setattr(copy_rows, "prepare", lambda *args, **options: Recordable(prepare(*args, **options)))


def pairs_of(graphed):
    return [pair for mode in graphed._modes.values() for pairs in mode.pairs.values() for pair in pairs]


def forms(lengths, device):
    """A call whose tensors lie in several ways: aligned and not, strided, with lengths of either integer and strided ones."""
    x, cu = pack(lengths, device)
    loose = torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)
    yield x, cu
    yield loose, cu
    yield x, cu.long()
    yield x.mT.contiguous().mT, cu
    yield x, torch.stack([cu, cu], 1)[:, 0]
    yield loose, torch.cat([cu.new_zeros(1), cu])[1:]


@torch.no_grad()
def test_tensors_in_every_form_are_read_in_turns(device):
    graphed = capture(Mixer().to(device), TIERS, num_warmup_iters=1, slots=2)
    calls = [call for lengths in ((5, 3), (24,), (1, 1, 9), (0, 2)) for call in forms(lengths, device)]
    for i, (x, cu) in enumerate([*calls, *calls[::-1], *calls[::5]]):
        assert_equal([graphed(x, cu)], [graphed.block(x, cu.contiguous())])
        captured(graphed, i + 1)
    assert len(pairs_of(graphed)) == 8 and all(pair.entry is not None for pair in pairs_of(graphed))


@torch.no_grad()
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_replay_that_fails_leaves_nothing_to_the_next(device, monkeypatch, error):
    class Total(nn.Module):
        def forward(self, x, cu_seqlens):
            return x + x.sum(1, keepdim=True)

    def fail():
        raise error("no replay")
    graphed = capture(Total(), TIERS[:1], num_warmup_iters=1)
    ones = torch.ones(1, 24, 8, device=device)

    def total(rows):
        return graphed(ones[:, :rows], torch.tensor([0, rows], dtype=torch.int32, device=device))
    total(20)
    pair, = pairs_of(graphed)
    with monkeypatch.context() as patch:
        patch.setattr(pair.forward, "replay", fail)
        with pytest.raises(error, match="no replay"):
            total(3)
    for rows in (4, 11, 2):
        assert torch.equal(total(rows), torch.full((1, rows, 8), 1.0 + rows, device=device))


def test_forwards_that_wait_and_their_backwards_in_any_order(device):
    graphed = capture(Mixer().to(device), TIERS, slots=3, num_warmup_iters=1, fallback="raise")
    for order in ((0, 1, 2), (2, 0, 1)):
        calls = [pack(lengths, device, requires_grad=True) for lengths in ((5, 3), (20,), (1, 1))]
        outs = [graphed(x, cu) for x, cu in calls]
        for i in order:
            x, cu = calls[i]
            weight = torch.randn_like(outs[i])
            found = torch.autograd.grad((outs[i] * weight).sum(), [x, *graphed.block.parameters()])
            assert_equal([outs[i].detach(), *found], gradients(graphed.block, x, cu, weight))
    captured(graphed, 6, backwards=6)


@torch.no_grad()
def test_static_inputs_written_in_place_are_read(device):
    graphed = capture(Mixer().to(device), TIERS, num_warmup_iters=1)
    buffers = graphed.static_inputs(*pack((3,), device))
    for lengths in ((24,), (5, 3), (2,), (0,)):
        x, cu = pack(lengths, device)
        rows, ends = buffers["x"][:, :x.shape[1]], buffers["cu_seqlens"][:cu.shape[0]]
        rows.copy_(x)
        ends.copy_(cu)
        assert_equal([graphed(rows, ends)], [graphed.block(x, cu)])
        z, other = pack((4, 1), device)
        assert_equal([graphed(z, other)], [graphed.block(z, other)])
    captured(graphed, 8)


@torch.no_grad()
def test_verify_copies_in_by_itself_between_calls(device):
    """It looks at the static inputs before it replays."""
    graphed = capture(Mixer().to(device), TIERS, slots=2, num_warmup_iters=1)
    for lengths in ((5, 3), (20,)):
        x, cu = pack(lengths, device)
        assert_equal([graphed(x, cu)], [graphed.block(x, cu)])
        report = verify(graphed, x, cu)
        assert report.ok, report
    captured(graphed, 2)


@torch.no_grad()
def test_reset_and_refresh_end_entries(device):
    graphed = capture(Mixer().to(device), TIERS, num_warmup_iters=1)
    x, cu = pack((5, 3), device)
    for end in (graphed.reset, graphed.refresh, graphed.reset):
        assert_equal([graphed(x, cu)], [graphed.block(x, cu)])
        end()
    captured(graphed, 3)
