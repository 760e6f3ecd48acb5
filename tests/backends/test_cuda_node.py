"""Launches of a captured graph that are given other arguments."""

import pytest
import torch

from graphlin.backends import get_backend
from graphlin.backends.cuda.node import NodeLaunch, can_update
from graphlin.errors import CaptureError
from graphlin.kernels.copy_rows import RowCopy

TOKENS, WIDTH = 24, 8


@pytest.fixture
def cuda(request):
    if request.config.option.device != "cuda":
        pytest.skip("needs a CUDA device")
    if not can_update():
        pytest.skip("this driver or PyTorch can't change a captured launch")
    return torch.device("cuda", torch.cuda.current_device())


def capturing(cuda):
    backend = get_backend(cuda)
    stream = backend.side_stream(cuda)
    backend.synchronize(cuda)
    return backend.capture(pool=backend.new_pool(), stream=stream)


@pytest.fixture
def copy(cuda):
    """A graph that copies rows in and out again: what copies, the static cu_seqlens, the graph, its entry, and the output."""
    static, static_cu = torch.zeros(1, TOKENS, WIDTH, device=cuda), torch.zeros(3, dtype=torch.int32, device=cuda)
    copy, out = RowCopy(static, 1), torch.zeros_like(static)
    copy.warm_up(static_cu)
    with capturing(cuda) as graph:
        entry = copy.record(graph, static_cu)
        out.copy_(static)
    return copy, static_cu, graph, entry, out


def call(cuda, lengths=(5, 3), dtype=torch.int32, offset=0):
    x = torch.randn(sum(lengths) * WIDTH + offset, device=cuda)[offset:].view(1, sum(lengths), WIDTH)
    return x, torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=dtype, device=cuda)


def test_what_is_set_holds_for_later_replays_and_not_for_those_that_wait(cuda, copy):
    copy, static_cu, graph, entry, out = copy
    assert isinstance(entry, NodeLaunch)
    calls, outs = [call(cuda, lengths) for lengths in [(5, 3), (7, 17), (0, 2), (1, 1)] * 5], []
    torch.cuda.synchronize()
    torch.cuda._sleep(100_000_000)                             # all of them wait
    for x, cu in calls:
        copy(x, cu, static_cu, 0, entry)
        graph.replay()
        outs.append((out.clone(), static_cu.clone()))
    for (x, cu), (y, ends) in zip(calls, outs, strict=True):
        assert torch.equal(y[:, :x.shape[1]], x) and not y[:, x.shape[1]:].any() and torch.equal(ends, cu)


def test_other_forms_are_launched_and_the_graph_leaves_the_copy_out(cuda, copy):
    copy, static_cu, graph, entry, out = copy
    forms = [{}, {"offset": 1}, {}, {"dtype": torch.int64}, {"dtype": torch.int64, "offset": 3}, {}]
    for form in forms:
        x, cu = call(cuda, **form)
        assert entry.set((x, cu), (2, 8, 0, 0, 0, 0)) == (not form)
        for given in (x, x.mT.contiguous().mT):                # the copy of a strided tensor is gone before the replay
            copy(given, cu, static_cu, 0, entry)
            torch.full((1, 8, WIDTH), 7.0, device=cuda)        # in its memory
            graph.replay()
            assert torch.equal(out[:, :8], x) and not out[:, 8:].any() and static_cu.tolist() == [0, 5, 8]


def test_a_graph_that_is_reset_is_not_touched(cuda, copy):
    copy, static_cu, graph, entry, out = copy
    x, cu = call(cuda)
    copy(x, cu, static_cu, 0, entry)
    graph.reset()
    assert entry.set((x, cu), (2, 8, 0, 0, 0, 0))
    entry.enable(False)
    get_backend(cuda).synchronize(cuda)


def test_an_entry_is_of_one_launch(cuda):
    static_cu = torch.zeros(3, dtype=torch.int32, device=cuda)
    with pytest.raises(CaptureError, match="expected one launch at the end of the captured stream, found 0"):
        with capturing(cuda) as graph:
            NodeLaunch(graph, cuda.index, (static_cu,), 1)
