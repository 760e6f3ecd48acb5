"""Copies of a graphed block capture graphs of their own, and threads that share one take turns."""

import copy
import pickle
import threading

import pytest
import torch

from graphlin.capture import capture
from graphlin.errors import StructureMismatch
from graphlin.tier import Tier
from tests.backends.test_registry import Outsider
from tests.blocks import Mixer, assert_equal, captured, gradients, pack

TIER = Tier(tokens=24, seqs=4)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda graphed: pickle.loads(pickle.dumps(graphed))], ids=["deep", "pickle"])
def test_a_copy_has_the_weights_and_graphs_of_its_own(device, copied):
    graphed = capture(Mixer().to(device), TIER, num_warmup_iters=1)
    x, cu = pack((5, 3), device, requires_grad=True)
    scale = torch.randn(x.shape, device=device)
    before = gradients(graphed, x, cu, scale)
    twin = copied(graphed)
    captured(twin, 0)
    assert twin.held_bytes() == 0
    assert_equal(gradients(twin, x, cu, scale), before)
    with torch.no_grad():
        for p in twin.parameters():
            p.mul_(2)
    assert_equal(gradients(graphed, x, cu, scale), before)
    assert_equal(gradients(twin, x, cu, scale), gradients(twin.block, x, cu, scale))
    captured(graphed, 2, backwards=2)
    captured(twin, 2, backwards=2)


def test_an_average_of_weights_replays(device):
    graphed = capture(Mixer().to(device), TIER, num_warmup_iters=1)
    average = torch.optim.swa_utils.AveragedModel(graphed, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    x, cu = pack((5, 3), device)
    for _ in range(2):
        with torch.no_grad():
            for p in graphed.parameters():
                p.add_(1)
        average.update_parameters(graphed)
        with torch.no_grad():
            assert_equal([average(x, cu)], [average.module.block(x, cu)])
    captured(average.module, 2)
    assert not torch.equal(average.module.block.enter.weight, graphed.block.enter.weight)


@torch.no_grad()
def test_a_copy_keeps_the_options(device):
    from graphlin.backends import get_backend
    backend = Outsider(get_backend(device))
    x, cu = pack((5, 3), device)
    graphed = capture(Mixer().to(device), TIER, (x, cu), slots=2, fallback="raise", backend=backend, num_warmup_iters=1)
    twin = copy.deepcopy(graphed)
    backend.asked.clear()
    assert_equal([twin(x, cu)], [graphed.block(x, cu)])
    assert "capture" in backend.asked and twin.stats.captures == 2
    with pytest.raises(StructureMismatch):
        twin.eval()(x, cu)                                     # the sample's mode is the only one


class Waits(Mixer):
    """Its first forward lets another thread go, and gives it time to meet a capture half done."""

    def __init__(self):
        super().__init__()
        self.inside, self.met = threading.Event(), threading.Event()

    def forward(self, x, cu_seqlens=None):
        if not self.inside.is_set():
            self.inside.set()
            self.met.wait(1.0)
        return super().forward(x, cu_seqlens)


@pytest.mark.parametrize("slots", [1, 2])
def test_two_threads_may_make_the_first_call(device, slots):
    block = Waits().to(device)
    graphed = capture(block, TIER, slots=slots, num_warmup_iters=1)
    calls = [pack(lengths, device, requires_grad=True) for lengths in ((5, 3), (2, 7))]
    scale = torch.ones((), device=device)
    own, found, threads = dict(block.named_parameters()), {}, []

    def run(i):
        if i == 1:
            block.inside.wait()
        try:
            found[i] = gradients(graphed, *calls[i], scale)
        finally:
            block.met.set()
    threads = [threading.Thread(target=run, args=(i,)) for i in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert dict(block.named_parameters()) == own
    for i, call in enumerate(calls):
        assert_equal(found[i], gradients(block, *call, scale))
    stats = graphed.stats
    assert stats.captures == slots and stats.replays == stats.backward_replays == 2 - stats.eager["SlotInUse"] >= slots


def test_threads_that_replay_at_once_have_their_own_results(device):
    """The slots are there already; each thread has one, whichever, and finds its own rows and gradients in it."""
    graphed = capture(Mixer().to(device), TIER, slots=2, num_warmup_iters=1)
    calls = [[pack(lengths, device, requires_grad=True) for lengths in ((5, 3), (2 + i, 7), (24,), (1, 0, i))] for i in (0, 1)]
    scale, found = torch.ones((), device=device), [[], []]
    gradients(graphed, *calls[0][0], scale)
    begins = threading.Barrier(2)

    def run(i):
        begins.wait()
        for _ in range(5):
            found[i] += [gradients(graphed, *call, scale) for call in calls[i]]
    threads = [threading.Thread(target=run, args=(i,)) for i in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in (0, 1):
        expected = [gradients(graphed.block, *call, scale) for call in calls[i]]
        assert len(found[i]) == 20
        for n, results in enumerate(found[i]):
            assert_equal(results, expected[n % 4])
    captured(graphed, 41, backwards=41)
