import pytest
import torch

from graphlin.bench.ops import measure
from graphlin.bench.peers import PEERS, Peer, PeerError, check_alike, contender, ours, relative_difference
from graphlin.bench.problems import OUR_OPS
from graphlin.bench.results import BOTH, FORWARD, REPLAY
from graphlin.bench.setting import Setting
from tests.bench.conftest import TINY


def peer(op, name="peer", **ops):
    return Peer(name, (), {"conv": lambda: (op, op), **ops})


def half(**arguments):
    return 0.5 * OUR_OPS["conv"](**arguments)


def failing(**arguments):
    raise RuntimeError("this device\nis not mine")


def test_a_peer_that_computes_the_same_is_measured_beside_ours(device):
    rows = list(measure(Setting(device, TINY, quick=True, peers=(peer(OUR_OPS["conv"]),)), "conv", 20, 2))
    replays = {(row.key.direction, row.who): row.sample.median for row in rows if row.measure == REPLAY}
    assert replays.keys() == {(d, who) for d in (FORWARD, BOTH) for who in ("graphlin", "peer")}
    assert all(time > 0 for time in replays.values())
    assert all(row.error is None for row in rows)
    assert {row.measure for row in rows} == {REPLAY, "eager, host"}


@pytest.mark.parametrize(("op", "message"), [
    (half, "computes something else: output differs by 5.0e-01 (relative RMS), expected at most 3e-02"),
    (failing, "RuntimeError: this device is not mine"),
])
def test_a_peer_that_fails_is_reported_and_ours_is_measured(device, op, message):
    rows = list(measure(Setting(device, TINY, quick=True, peers=(peer(op),)), "conv", 20, 2))
    assert [row.error for row in rows if row.who == "peer"] == [message, message]
    assert [row.key.direction for row in rows if row.who != "peer" and row.measure == REPLAY] == [FORWARD, BOTH]


def test_a_wrong_gradient_is_found_too(setting):
    class Halved(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad / 2

    problem = setting.problem("conv", 20, 2)
    own = ours(problem, BOTH)
    wrong = peer(lambda **arguments: Halved.apply(OUR_OPS["conv"](**arguments)))
    with pytest.raises(PeerError, match="gradient of x differs by 5.0e-01"):
        contender(wrong, problem, BOTH, own.eager())
    assert contender(wrong, problem, FORWARD, own.eager()[:1]).name == "peer"


def test_both_forms_of_a_peer_are_checked(setting):
    problem = setting.problem("conv", 20, 2)
    two_forms = Peer("peer", (), {"conv": lambda: (OUR_OPS["conv"], half)})
    with pytest.raises(PeerError, match="computes something else"):
        contender(two_forms, problem, FORWARD, ours(problem, FORWARD).eager())


def test_rows_of_no_sequence_are_not_compared(setting):
    def undefined_tail(**arguments):
        output = OUR_OPS["conv"](**arguments).clone()
        output[:, 15:] = float("nan")
        return output

    problem = setting.problem("conv", 20, 2)
    expected = ours(problem, FORWARD).eager()
    assert contender(peer(undefined_tail), problem, FORWARD, expected, active=15).name == "peer"
    with pytest.raises(PeerError, match="differs by nan"):
        contender(peer(undefined_tail), problem, FORWARD, expected, active=16)


@pytest.mark.parametrize(("name", "op", "message"), [
    ("flash_qla", "conv", "flash_qla has no such op"), ("flash_qla", "kda", "flash_qla has no such op"),
])
def test_a_peer_without_the_op_says_so(name, op, message):
    with pytest.raises(PeerError, match=message):
        PEERS[name].load(op)


@pytest.mark.parametrize(("name", "op"), [(name, op) for name in PEERS for op in PEERS[name].ops])
def test_an_absent_peer_says_which_module_is_missing(monkeypatch, name, op):
    monkeypatch.setitem(__import__("sys").modules, "fla", None)
    monkeypatch.setitem(__import__("sys").modules, "flash_qla", None)
    with pytest.raises(PeerError, match=r"cannot be imported: ModuleNotFoundError: .*(fla|flash_qla)"):
        PEERS[name].load(op)


def test_differences_are_relative_and_held_to_each_name():
    a = torch.tensor([3.0, 4.0])
    assert relative_difference(1.1 * a, a) == pytest.approx(0.1)
    check_alike(["gradient of A_log"], [1.1 * a], [a])
    with pytest.raises(PeerError, match="gradient of q differs by 1.0e-01"):
        check_alike(["gradient of q"], [1.1 * a], [a])
