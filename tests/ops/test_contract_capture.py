"""The contract of every packed op under capture: no host sync, and a replay that equals eager to the bit."""

import warnings
from contextlib import contextmanager

import pytest
import torch

from graphlin.backends import get_backend
from graphlin.errors import HostSync
from tests.inputs import cu_of
from tests.ops.op_cases import assert_bitwise, each_op

TOKENS, SEQS = 48, 4
PACKS = [(16, 16, 16), (5, 19, 2, 22), (0, 10, 0, 17), (48,), (1, 0, 0, 3), ()]
SYNCS = ("item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__", "__array__", "nonzero")


def padded_cu(lengths, device):
    """cu_seqlens of SEQS sequences, the last ones of length 0."""
    return cu_of((*lengths, *[0] * (SEQS - len(lengths))), device)


@contextmanager
def no_host_sync(device, monkeypatch):
    """Raises where the host reads a device value, other than inside the interpreter that stands for a kernel."""
    if device.type != "cpu":
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")     # the mode is a prototype, says PyTorch
                torch.cuda.set_sync_debug_mode("error")
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return
    with monkeypatch.context() as patch:
        launching = _count_launches(patch, get_backend(device))
        for name in SYNCS:
            patch.setattr(torch.Tensor, name, _refusing(name, getattr(torch.Tensor, name), launching))
        yield


def _count_launches(patch, backend):
    depth, launch = [0], backend.launch

    def counted(*args, **kwargs):
        depth[0] += 1
        try:
            return launch(*args, **kwargs)
        finally:
            depth[0] -= 1

    patch.setattr(backend, "launch", counted)
    return depth


def _refusing(name, original, launching):
    def method(self, *args, **kwargs):
        if not launching[0]:
            raise AssertionError(f"host sync: Tensor.{name}")
        return original(self, *args, **kwargs)
    return method


def test_the_sync_check_itself_catches_a_sync(device, monkeypatch):
    x = torch.ones(2, device=device)
    for read in (lambda: x.tolist(), lambda: x[0].item(), lambda: bool(x[0] > 0), lambda: x.cpu()):
        with pytest.raises((AssertionError, RuntimeError)), no_host_sync(device, monkeypatch):
            read()
    assert x.tolist() == [1, 1]


@each_op
def test_the_packed_path_never_waits_for_the_device(case, device, monkeypatch):
    drawn, cu = case.draw(TOKENS, SEQS, device), padded_cu(PACKS[1], device)
    case.run(drawn, cu)                                   # compiles
    with no_host_sync(device, monkeypatch):
        results = case.run(drawn, cu)
    assert results["o"].isfinite().all()


@each_op
def test_the_exact_path_does_wait(case, device, monkeypatch):
    """So that the test above can fail: `graph_capture=False` reads cu_seqlens on the host."""
    drawn, cu = case.draw(TOKENS, SEQS, device), padded_cu(PACKS[1], device)
    with pytest.raises((AssertionError, RuntimeError), match="sync"), no_host_sync(device, monkeypatch):
        case.run(drawn, cu, graph_capture=False)


@each_op
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.device_only)],
                         ids=lambda d: str(d)[6:])
def test_a_replay_equals_eager_for_every_pack_in_the_same_buffers(case, device, dtype):
    """Lengths replayed in turn in one graph of forward and backward; inactive rows come out 0."""
    backend = get_backend(device)
    static, cu = case.draw(TOKENS, SEQS, device, dtype), padded_cu(PACKS[0], device)
    stream = backend.side_stream(device)
    with backend.stream(stream):
        case.run(static, cu)                              # compiles
    backend.synchronize(device)
    with backend.capture(pool=backend.new_pool(), stream=stream, error_mode="thread_local") as graph:
        captured = case.run(static, cu)
    for seed, lengths in enumerate(PACKS):
        fresh = case.draw(TOKENS, SEQS, device, dtype, seed=seed)
        for name, x in static.items():
            x.copy_(fresh[name])
            if case.by_token(name):
                x[:, sum(lengths):] = float("nan")
        cu.copy_(padded_cu(lengths, device))
        for x in captured.values():
            x.fill_(float("nan"))
        graph.replay()
        backend.synchronize(device)
        replayed = {name: x.clone() for name, x in captured.items()}
        assert_bitwise(replayed, case.run(static, cu), f"between replay and eager at lengths {lengths}")
        for name, x in replayed.items():
            assert x.isfinite().all(), name
            if case.by_token(name):
                assert torch.count_nonzero(x[:, sum(lengths):]) == 0, f"inactive rows of {name} are not 0"
    graph.reset()


@each_op
def test_the_exact_path_is_refused_inside_a_capture(case, device):
    backend = get_backend(device)
    drawn, cu = case.draw(TOKENS, SEQS, device), padded_cu(PACKS[0], device)
    expected = case.run(drawn, cu)
    for options in ({"graph_capture": False}, {"validate": True}):
        with pytest.raises(HostSync, match="cu_seqlens"), \
                backend.capture(pool=backend.new_pool(), stream=backend.side_stream(device), error_mode="thread_local"):
            case.run(drawn, cu, **options)
    assert_bitwise(case.run(drawn, cu), expected, "after a refused capture")
