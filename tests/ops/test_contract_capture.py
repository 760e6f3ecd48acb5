"""The contract of every packed op under capture: no host sync, and a replay that equals eager to the bit."""

import pytest
import torch

from graphlin.backends import get_backend
from graphlin.errors import CaptureError, HostSync
from graphlin.ops.gated_delta_rule import chunk_gated_delta_rule
from tests.host_sync import no_host_sync
from tests.inputs import cu_of
from tests.ops.op_cases import OP_CASES, RAW_GATE, OpCase, assert_bitwise, each_full_op, each_op

TOKENS, SEQS = 48, 4
PACKS = [(16, 16, 16), (5, 19, 2, 22), (0, 10, 0, 17), (48,), (1, 0, 0, 3), ()]


def padded_cu(lengths, device):
    """cu_seqlens of SEQS sequences, the last ones of length 0."""
    return cu_of((*lengths, *[0] * (SEQS - len(lengths))), device)


def model_case(heads, size):
    """The gated delta rule of a small model, in its default chunks of 64."""
    vectors = dict.fromkeys(("q", "k", "v"), (heads, size))
    return OpCase("gdn", chunk_gated_delta_rule, tokens={**vectors, "beta": (heads,), "g": (heads,)}, output=(heads, size),
                  state=(heads, size, size), parameters={"A_log": (heads,), "dt_bias": (heads,)},
                  options={"use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True})


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


@pytest.mark.parametrize("case", [*OP_CASES, RAW_GATE], ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.device_only)],
                         ids=lambda d: str(d)[6:])
def test_a_replay_equals_eager_for_every_pack_in_the_same_buffers(case, device, dtype):
    """Lengths replayed in turn in one graph of forward and backward, for each way to get the gate; inactive rows are 0."""
    replay_in_turn(case, device, dtype, TOKENS, PACKS)


@pytest.mark.device_only
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize(("heads", "size", "ends"), [
    (4, 64, [(300, 600, 900, 1024), (512, 1024, 1024, 1024), (100, 400, 700, 1024), (1024, 1024, 1024, 1024)]),
    (2, 32, [(48, 96, 144, 192), (17, 73, 192, 192), (31, 111, 111, 111)]),
], ids=["T=1024", "T=192"])
def test_replays_of_a_model_equal_eager(device, dtype, heads, size, ends):
    """The test above at sizes that went wrong elsewhere: other sequences, empty tails, slack in the last pack."""
    packs = [tuple(end - first for first, end in zip((0, *last), last, strict=False)) for last in ends]
    replay_in_turn(model_case(heads, size), device, dtype, ends[0][-1], packs)


def replay_in_turn(case, device, dtype, tokens, packs):
    backend = get_backend(device)
    static, cu = case.draw(tokens, SEQS, device, dtype), padded_cu(packs[0], device)
    stream = backend.side_stream(device)
    with backend.stream(stream):
        case.run(static, cu)                              # compiles
    backend.synchronize(device)
    with backend.capture(pool=backend.new_pool(), stream=stream, error_mode="thread_local") as graph:
        captured = case.run(static, cu)
    for seed, lengths in enumerate(packs):
        fresh = case.draw(tokens, SEQS, device, dtype, seed=seed)
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


@each_full_op
def test_a_warm_up_without_state_or_bias_leaves_nothing_broken(case, device):
    """Other kernels are captured than were compiled: that works or is a typed error, and so does the op afterwards."""
    backend, cu = get_backend(device), padded_cu((5, 10), device)
    drawn = case.draw(16, SEQS, device)
    case.run({name: x for name, x in drawn.items() if name not in ("initial_state", "bias", "dt_bias")}, cu)
    try:
        with backend.capture(pool=backend.new_pool(), stream=backend.side_stream(device), error_mode="thread_local"):
            case.run(drawn, cu)
    except CaptureError as error:
        assert "compiled inside a capture" in str(error)
    eager = case.run(drawn, cu)
    with backend.capture(pool=backend.new_pool(), stream=backend.side_stream(device), error_mode="thread_local") as graph:
        captured = case.run(drawn, cu)
    for x in captured.values():
        x.fill_(float("nan"))
    graph.replay()
    backend.synchronize(device)
    assert_bitwise({name: x.clone() for name, x in captured.items()}, eager, "after a warm-up of another kind")
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
