"""The host's recorder: what it repeats, and what it refuses as a device capture would."""

import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch

from graphlin.backends import LaunchRecord, get_backend
from graphlin.errors import CaptureError, ColdKernel, HostSync
from graphlin.kernels.launch import launch
from tests.backends.kernel import add_one

CPU = torch.device("cpu")


@pytest.fixture
def host(request):
    if request.config.option.device != "host":
        pytest.skip("the host backend runs where Triton interprets")
    return get_backend(CPU)


def record(host, body):
    with host.capture(pool=host.new_pool(), stream=host.side_stream(CPU)) as graph:
        out = body()
    return graph, out


def test_replay_computes_from_the_new_contents_of_the_same_storage(host):
    x, w = torch.randn(3, 4), torch.randn(4, 5)
    graph, out = record(host, lambda: torch.softmax((x @ w).T.contiguous().tanh(), -1)[1:])
    address = out.data_ptr()
    for _ in range(2):
        x.copy_(torch.randn(3, 4))
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, torch.softmax((x @ w).T.contiguous().tanh(), -1)[1:])
        assert out.data_ptr() == address


def test_in_place_ops_views_and_factories_repeat(host):
    x = torch.randn(4, 4)

    def body():
        total = torch.zeros(4)
        for row in x.unbind(0):
            total += row
        view = total.view(2, 2)
        view[0].mul_(2)
        a, b = torch.split(total, 2)
        return total, torch.cat([a, b.neg()]), torch.topk(x, 2).values

    graph, outs = record(host, body)
    x.copy_(torch.randn(4, 4))
    graph.replay()
    for found, expected in zip(outs, body(), strict=True):
        assert torch.equal(found, expected)


def test_uninitialised_memory_is_not_filled_again(host):
    kept = []

    def body():
        kept.append(torch.empty_strided((3,), (1,)))
        return kept[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty_strided", torch._C._VariableFunctions.empty_strided)    # without the tests' poison
        graph, out = record(host, body)
    out.fill_(7.0)
    graph.replay()
    assert out.tolist() == [7.0] * 3


def test_random_ops_draw_anew_and_follow_the_seed(host):
    graph, mask = record(host, lambda: torch.nn.functional.dropout(torch.ones(200), 0.5))
    torch.manual_seed(3)
    graph.replay()
    first = mask.clone()
    graph.replay()
    assert not torch.equal(first, mask)
    torch.manual_seed(3)
    assert torch.equal(first, torch.nn.functional.dropout(torch.ones(200), 0.5))


def test_backward_is_recorded_and_no_history_is_kept(host):
    w, x = torch.randn(3, requires_grad=True), torch.randn(3)
    graph, grad = record(host, lambda: torch.autograd.grad((w * x).sin().sum(), w)[0])
    x.copy_(torch.randn(3))
    graph.replay()
    assert torch.equal(grad, torch.cos(w.detach() * x) * x)
    assert not grad.requires_grad


def test_autocast_of_the_replay_changes_nothing(host):
    x = torch.randn(8, 8)
    graph, out = record(host, lambda: x @ x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        graph.replay()
    assert torch.equal(out, x @ x)


@torch.library.custom_op("graphlin_tests::scale_rows", mutates_args=())
def scale_rows(x: torch.Tensor, python_runs: int) -> torch.Tensor:
    RUNS.append(python_runs)
    return x * 2


RUNS: list[int] = []


def test_a_custom_op_is_recorded_by_what_it_does(host):
    x = torch.randn(3)
    graph, out = record(host, lambda: scale_rows(x, 1))
    RUNS.clear()
    x.copy_(torch.randn(3))
    graph.replay()
    assert torch.equal(out, x * 2)
    assert not RUNS                      # its Python did not run again


def add(x, block=16):
    y = torch.zeros_like(x)
    launch(add_one, 1, x, y, x.numel(), record=LaunchRecord(), BLOCK=block)
    return y


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_triton_launches_repeat(host, dtype):
    x = torch.randn(5).to(dtype)
    add(x)
    graph, out = record(host, lambda: add(x) * 2)
    x.copy_(torch.randn(5))
    graph.replay()
    assert torch.equal(out, add(x) * 2)
    assert len(graph.steps) < 6, "the interpreter's own ops were recorded"


def test_threads_may_launch_at_once(host, request):
    request.addfinalizer(partial(sys.setswitchinterval, sys.getswitchinterval()))
    sys.setswitchinterval(1e-5)
    inputs = [torch.randn(5) for _ in range(24)]
    add(inputs[0])
    with ThreadPoolExecutor(4) as threads:
        for x, y in zip(inputs, threads.map(add, inputs), strict=True):
            assert torch.equal(y, x + 1)


def test_a_kernel_variant_first_run_inside_is_refused(host):
    x = torch.randn(5)
    add(x)
    for cold in (lambda: add(x, block=2048), lambda: add(x.double())):
        with pytest.raises(ColdKernel, match=r"kernel add_one would be compiled inside a capture, launched from "
                                             r".*test_host_graph.py:\d+ in add.*num_warmup_iters"):
            record(host, cold)
    record(host, lambda: add(x))


@pytest.mark.parametrize("read", [
    lambda x: x.sum().item(), lambda x: x.tolist(), lambda x: x.numpy(), lambda x: bool(x.any()),
    lambda x: int(x.sum()), lambda x: float(x[0]), lambda x: x.nonzero(), lambda x: x[x > 0], lambda x: torch.unique(x),
    lambda x: torch.equal(x, x), lambda x: torch.masked_select(x, x > 0),
    lambda x: x.repeat_interleave(x.long().abs()), lambda x: [1, 2, 3][x.long()[0]],
])
def test_host_reads_are_refused_with_their_line(host, read):
    x = torch.randn(3)
    with pytest.raises(HostSync, match=r"reads a tensor's value on the host at .*test_host_graph.py:\d+ in <lambda>"):
        record(host, lambda: read(x))
    read(x)                              # nothing stays patched
    record(host, lambda: x + 1)


def test_host_reads_in_backward_are_refused(host):
    class Reads(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad * grad.tolist()[0]
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(HostSync, match=r"Tensor.tolist .*test_host_graph.py:\d+ in backward"):
        record(host, lambda: torch.autograd.grad(Reads.apply(x).sum(), x))


@pytest.mark.parametrize("index", [lambda x: x[torch.tensor([1, 0])], lambda x: x.index_select(0, torch.tensor([1])),
                                   lambda x: x.repeat_interleave(torch.tensor([1, 2]), output_size=3)])
def test_indices_that_fix_the_shape_are_recorded(host, index):
    x = torch.randn(2)
    graph, out = record(host, lambda: index(x))
    x.copy_(torch.randn(2))
    graph.replay()
    assert torch.equal(out, index(x))


def test_captures_do_not_nest_and_replays_stay_outside(host):
    graph, _ = record(host, lambda: torch.ones(2) + 1)
    with pytest.raises(CaptureError, match="captures do not nest"):
        record(host, lambda: record(host, lambda: None))
    with pytest.raises(CaptureError, match="cannot be replayed inside a host capture"):
        record(host, graph.replay)
    assert not host.is_capturing()


def test_a_failed_capture_leaves_nothing(host):
    pool = host.new_pool()
    with pytest.raises(ZeroDivisionError), host.capture(pool=pool, stream=None):
        torch.ones(100) * 2
        1 / 0  # noqa: B018
    assert host.pool_bytes(pool, CPU) == 0
    assert not host.is_capturing()


def test_pool_counts_what_its_graphs_keep(host):
    pool = host.new_pool()
    with host.capture(pool=pool, stream=None) as graph:
        y = torch.ones(100) * 2
        y.view(10, 10).add_(1)
    assert host.pool_bytes(pool, CPU) == 2 * 400
    graph.reset()
    assert host.pool_bytes(pool, CPU) == 0
