"""Captured backwards: exact gradients however the calls are woven together, or an eager call, or an error."""

import gc

import pytest
import torch
from torch import nn

from graphlin.capture import capture
from graphlin.errors import CaptureError, ReplayError, SlotInUse, StructureMismatch
from graphlin.tier import Tier
from graphlin.verify import verify
from tests.blocks import Mixer, assert_equal, captured, gradients, pack, until_slots_are_free

TIER = Tier(tokens=24, seqs=4)
PACKS = [(5, 3), (24,), (1, 0, 7, 2), (6, 6, 6, 6), (2, 21)]


class Square(nn.Module):
    """Elementwise, so that eager and replay agree bit for bit at any shapes; one parameter."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8))

    def forward(self, x, cu_seqlens):
        active = torch.arange(x.shape[1], device=x.device) < cu_seqlens[-1]
        return torch.where(active[:, None], x, 0.0) ** 2 * self.weight


@pytest.fixture
def mixer(device):
    return capture(Mixer().to(device), TIER)


def grads_of(block, calls, weave):
    """Parameter and input gradients accumulated by weave(block), which calls it and runs backward itself."""
    for tensor in [*block.parameters(), *(x for x, _ in calls)]:
        tensor.grad = None
    weave(block)
    return [None if t.grad is None else t.grad.clone() for t in [*block.parameters(), *(x for x, _ in calls)]]


def assert_same_weave(graphed, calls, weave):
    found, expected = grads_of(graphed, calls, weave), grads_of(graphed.block, calls, weave)
    assert any(grad is not None and grad.any() for grad in expected)
    assert_equal(found, expected)


def make_calls(device, count):
    return [pack(PACKS[i % len(PACKS)], device, requires_grad=True) for i in range(count)]


def test_changing_packs_have_the_eager_gradients(device, mixer):
    for lengths in PACKS:
        x, cu = pack(lengths, device, requires_grad=True)
        weight = torch.randn(x.shape, device=device)
        assert_equal(gradients(mixer, x, cu, weight), gradients(mixer.block, x, cu, weight))
    captured(mixer, len(PACKS), backwards=len(PACKS))
    assert mixer.stats.captures == 1


def test_nan_in_slack_reaches_no_gradient(device, mixer):
    mixer(*pack((24,), device, requires_grad=True)).sum().backward()
    x, cu = pack((4, 2), device, slack=9)
    weight = torch.randn(x.shape, device=device)
    exact = gradients(mixer.block, x[:, :6].clone().requires_grad_(), cu, weight[:, :6])
    x.requires_grad_()
    weight[:, 6:] = float("nan")                               # so is the output's gradient
    y = mixer(x, cu)
    found = torch.autograd.grad(y, [x, *mixer.parameters()], weight)
    assert_equal([y[:, :6], found[0][:, :6], *found[1:]], exact)
    assert not found[0][:, 6:].any() and not y[:, 6:].any()
    captured(mixer, 2, backwards=2)


def test_micro_batches_accumulate(device, mixer):
    calls = make_calls(device, 3)

    def weave(block):
        for x, cu in calls:
            block(x, cu).square().sum().backward()
    assert_same_weave(mixer, calls, weave)
    captured(mixer, 3, backwards=3)


def test_accumulated_gradients_are_not_the_static_ones(device):
    """With an elementwise block g1 + g2 + g3 is exact, where an aliased .grad gives g3 + g3."""
    graphed = capture(Square().to(device), TIER)
    calls, total, weight = make_calls(device, 3), 0, graphed.block.weight
    for x, cu in calls:
        graphed(x, cu).sum().backward()
        active = int(cu[-1])
        total = total + (x.detach()[0, :active] ** 2).sum(0)
        torch.testing.assert_close(weight.grad, total)
    captured(graphed, 3, backwards=3)


def test_one_tensor_feeding_two_captured_blocks(device):
    a, b = capture(Square().to(device), TIER), capture(Square().to(device), TIER)
    x, cu = pack((5, 3), device, requires_grad=True)
    (a(x, cu) + 10 * b(x, cu)).sum().backward()
    expected = torch.autograd.grad((a.block(x, cu) + 10 * b.block(x, cu)).sum(), x)[0]
    assert torch.equal(x.grad, expected)
    captured(a, 1, backwards=1)
    captured(b, 1, backwards=1)


def test_a_parameter_shared_by_two_captured_blocks(device):
    first, second = Square().to(device), Square().to(device)
    second.weight = first.weight
    a, b = capture(first, TIER), capture(second, TIER)
    (x, cu), (z, ends) = make_calls(device, 2)
    for _ in range(2):
        (a(x, cu).sum() + 10 * b(z, ends).sum()).backward()
    expected = torch.autograd.grad(first(x, cu).sum() + 10 * first(z, ends).sum(), first.weight)[0]
    torch.testing.assert_close(first.weight.grad, 2 * expected)
    captured(a, 2, backwards=2)
    captured(b, 2, backwards=2)


WEAVES = {
    "f(x) + f(x)": lambda f, calls: (f(*calls[0]) + f(*calls[0])).sum().backward(),
    "one joint backward": lambda f, calls: sum(f(*call).square().sum() for call in calls).backward(),
    "backwards in order": lambda f, calls: [loss.backward() for loss in [f(*call).square().sum() for call in calls]],
    "backwards reversed": lambda f, calls: [loss.backward() for loss in
                                            [f(*call).square().sum() for call in calls][::-1]],
}


@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("weave", WEAVES, ids=str)
def test_forwards_that_wait_together(device, slots, weave):
    graphed = capture(Mixer().to(device), TIER, slots=slots, num_warmup_iters=1)
    calls = make_calls(device, 3)
    forwards = 2 if weave.startswith("f(x)") else 3
    assert_same_weave(graphed, calls, lambda block: WEAVES[weave](block, calls))
    replays = min(forwards, slots)
    eager = {"SlotInUse": forwards - replays} if forwards > replays else {}
    captured(graphed, replays, backwards=replays, **eager)
    assert graphed.stats.captures == slots


def test_a_forward_without_grad_does_not_disturb_one_that_waits(device, mixer):
    (x, cu), (z, ends) = make_calls(device, 2)

    def weave(block):
        loss = block(x, cu).square().sum()
        with torch.no_grad():
            assert_equal([block(z, ends)], [mixer.block(z, ends)])
        loss.backward()
    assert_same_weave(mixer, [(x, cu)], weave)
    captured(mixer, 1, backwards=1, SlotInUse=1)


def test_another_mode_captured_while_a_forward_waits(device):
    graphed = capture(Mixer().to(device), TIER, slots=2)
    (x, cu), (z, ends) = make_calls(device, 2)

    def weave(block):
        loss = block(x, cu).square().sum()
        with torch.no_grad():
            block(z, ends)                                     # a new mode: captured in the free slot
        loss.backward()
    assert_same_weave(graphed, [(x, cu)], weave)
    captured(graphed, 2, backwards=1)
    assert graphed.stats.captures == 3


def test_a_slot_is_freed_when_the_output_is_dropped(device, mixer):
    x, cu = pack((5, 3), device, requires_grad=True)
    for _ in range(3):
        y = mixer(x, cu)
        del y
    captured(mixer, 3, backwards=0)


def test_no_free_slot_raises_if_asked(device):
    graphed = capture(Mixer().to(device), TIER, fallback="raise")
    x, cu = pack((5, 3), device)
    waiting = graphed(x, cu)
    with pytest.raises(SlotInUse, match="all 1 slots hold a forward that waits for its backward.*more slots"):
        graphed(x, cu)
    waiting.sum().backward()
    graphed(x, cu)
    captured(graphed, 2, backwards=1)


def test_a_second_backward_is_refused_not_wrong(device, mixer):
    loss = mixer(*pack((5, 3), device)).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(ReplayError, match=r"asked for twice.*graphed.block"):
        loss.backward()
    captured(mixer, 1, backwards=1)


def test_frozen_weights_changed_before_the_backward_are_noticed(device):
    block = Mixer().to(device)
    block.leave.weight.requires_grad_(False)
    graphed = capture(block, TIER)
    loss = graphed(*pack((5, 3), device)).sum()
    with torch.no_grad():
        block.leave.weight.mul_(2)
    with pytest.raises(ReplayError, match="modified "):
        loss.backward()
    captured(graphed, 1)


def test_weights_changed_before_the_backward_are_noticed_as_in_eager(device, mixer):
    x, cu = pack((5, 3), device)
    for block, error in ((mixer, ReplayError), (mixer.block, RuntimeError)):
        loss = block(x, cu).sum()
        with torch.no_grad():
            mixer.block.leave.weight.mul_(2)
        with pytest.raises(error, match="modified "):
            loss.backward()
    del loss
    until_slots_are_free(mixer)
    mixer(x, cu).sum().backward()
    captured(mixer, 2, backwards=1)


def test_a_backward_after_reset_is_refused(device, mixer):
    loss = mixer(*pack((5, 3), device)).sum()
    mixer.reset()
    with pytest.raises(ReplayError, match=r"after reset\(\)"):
        loss.backward()


def test_a_second_derivative_is_refused_not_left_out(device):
    graphed = capture(Square().to(device), TIER)
    x, cu = pack((5, 3), device, requires_grad=True)
    with pytest.raises(ReplayError, match="create_graph=True can't be replayed.*graphed.block"):
        torch.autograd.grad(graphed(x, cu).sum(), x, create_graph=True)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")    # of what vmap imports
@pytest.mark.parametrize("take", [
    lambda y, x, grads: torch.autograd.grad(y, x, grads, is_grads_batched=True),
    lambda y, x, grads: torch.func.vmap(lambda grad: torch.autograd.grad(y, x, grad)[0])(grads),
    lambda y, x, grads: torch.autograd.grad(y, x, grads[0].to_sparse()),
], ids=["is_grads_batched", "vmap", "sparse"])
def test_gradients_without_rows_are_refused_and_the_slot_is_free_again(device, mixer, take):
    x, cu = pack((5, 3), device, requires_grad=True)
    y = mixer(x, cu)
    with pytest.raises(ReplayError, match="reads one dense gradient of each output.*graphed.block"):
        take(y, x, torch.ones(2, *y.shape, device=device))
    found, = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(found, torch.autograd.grad(mixer.block(x, cu).sum(), x)[0], rtol=2e-5, atol=2e-6)
    mixer(x, cu).sum().backward()
    captured(mixer, 2, backwards=2)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")    # of what forward mode imports
def test_forward_mode_derivatives_are_eager_and_not_left_out(device, grad):
    graphed = capture(Square().to(device), TIER)
    x, cu = pack((5, 3), device)
    with torch.set_grad_enabled(grad), torch.autograd.forward_ad.dual_level():
        y = graphed(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)), cu)
        tangent = torch.autograd.forward_ad.unpack_dual(y).tangent
    assert torch.equal(tangent, 2 * x * graphed.block.weight)
    captured(graphed, 0, StructureMismatch=1)


@pytest.mark.parametrize("first", [True, False])
def test_transforms_of_functions_are_eager_or_refused_by_name(device, first):
    graphed = capture(Square().to(device), TIER)
    x, cu = pack((5, 3), device)
    if not first:
        graphed(x, cu)
    grad = torch.func.grad(lambda x: graphed(x, cu).sum())(x)
    both = torch.vmap(lambda x: graphed(x, cu))(torch.stack([x, 2 * x]))
    assert torch.equal(grad, 2 * x * graphed.block.weight)
    assert torch.equal(both, torch.stack([graphed.block(x, cu), graphed.block(2 * x, cu)]))
    captured(graphed, 0 if first else 1, StructureMismatch=2)
    strict = capture(Square().to(device), TIER, fallback="raise")
    with pytest.raises(StructureMismatch, match=r"transform of torch.func \(vmap, grad, jvp.*graphed.block"):
        torch.vmap(lambda x: strict(x, cu))(torch.stack([x, x]))


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_anomaly_detection_is_for_replays_and_not_for_the_capture(device, mixer):
    x, cu = pack((5, 3), device, requires_grad=True)
    with torch.autograd.detect_anomaly():
        mixer(x, cu).sum().backward()
        assert torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled()
        with pytest.raises(RuntimeError, match="returned nan values"):
            mixer(x, cu).backward(torch.full_like(x, float("nan")))
    captured(mixer, 2, backwards=2)


def test_hooks_on_parameters_run_once(device):
    graphed = capture(Square().to(device), TIER)
    weight = graphed.block.weight
    handle = weight.register_hook(lambda grad: 2 * grad)
    (x, cu), (z, ends) = make_calls(device, 2)
    for call in ((x, cu), (z, ends)):
        weight.grad = None
        graphed(*call).sum().backward()
        found = weight.grad
        weight.grad = None
        graphed.block(*call).sum().backward()
        torch.testing.assert_close(found, weight.grad)
    handle.remove()
    weight.grad = None
    graphed(z, ends).sum().backward()
    torch.testing.assert_close(weight.grad, found / 2)
    captured(graphed, 3, backwards=3)


@pytest.mark.parametrize("hand_out", ["grad", "inputs", "hook"])
def test_gradients_handed_to_the_caller_survive_the_next_replay(device, hand_out):
    graphed = capture(Square().to(device), TIER)
    weight = graphed.block.weight
    (x, cu), (z, ends) = make_calls(device, 2)
    kept = []
    if hand_out == "hook":
        weight.register_hook(kept.append)

    def run(a, b):
        loss = graphed(a, b).sum()
        if hand_out == "grad":
            kept.append(torch.autograd.grad(loss, weight)[0])
        elif hand_out == "inputs":
            weight.grad = None
            loss.backward(inputs=[weight])
            kept.append(weight.grad)
        else:
            loss.backward()
    run(x, cu)
    first = kept[0].detach().clone()
    run(z, ends)
    assert torch.equal(kept[0], first) and not torch.equal(kept[1], first)
    captured(graphed, 2, backwards=2)


def test_gradients_of_lazy_sign_and_of_no_memory_of_their_own_are_read_by_value(device):
    graphed = capture(Square().to(device), TIER, num_warmup_iters=1)
    x, cu = pack((5, 3), device, requires_grad=True)
    for grad in (torch._neg_view(torch.randn(1, 8, 8, device=device)), torch.tensor(3.0, device=device).expand(1, 8, 8)):
        found, = torch.autograd.grad(graphed(x, cu), x, grad)
        assert_equal([found], torch.autograd.grad(graphed.block(x, cu), x, grad))
    captured(graphed, 2, backwards=2)


@pytest.mark.parametrize("copy_outputs", [True, False])
def test_outputs_and_gradients_of_lazy_sign_keep_it(device, copy_outputs):
    class Conjugates(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, dtype=torch.complex64))

        def forward(self, x, cu_seqlens):
            y = x * self.weight
            return y.conj(), y.conj().imag

    graphed = capture(Conjugates().to(device), TIER, num_warmup_iters=1, copy_outputs=copy_outputs)
    x = torch.randn(1, 8, 8, device=device, dtype=torch.complex64, requires_grad=True)
    results = []
    for block in (graphed, graphed.block):
        a, b = block(x.conj(), torch.tensor([0, 5, 8], device=device, dtype=torch.int32))
        results.append([a.detach().clone(), b.detach().clone(),
                        *torch.autograd.grad(a.real.sum() + b.square().sum(), [x, graphed.block.weight])])
    assert_equal(*results)
    captured(graphed, 1, backwards=1)
    report = verify(graphed, x, torch.tensor([0, 5, 8], device=device, dtype=torch.int32))
    assert report.ok, report


def test_input_gradients_survive_the_next_replay(device):
    graphed = capture(Square().to(device), TIER)
    (x, cu), (z, ends) = make_calls(device, 2)
    graphed(x, cu).sum().backward()
    first = x.grad.clone()
    graphed(z, ends).sum().backward()
    assert torch.equal(x.grad, first)
    captured(graphed, 2, backwards=2)


def test_gradients_flow_on_into_what_came_before(device, mixer):
    before = nn.Linear(8, 8).to(device)
    x, cu = pack((5, 3), device)

    def weave(block):
        block(before(x), cu).square().sum().backward()
    assert_same_weave(mixer, [], weave)
    found = [p.grad.clone() for p in before.parameters()]
    before.zero_grad()
    mixer.block(before(x), cu).square().sum().backward()
    before_eager = [p.grad for p in before.parameters()]
    torch.testing.assert_close(found[0], 2 * before_eager[0])  # assert_same_weave ran both ways, accumulating
    captured(mixer, 1, backwards=1)


class TwoOutputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x, cu_seqlens):
        return {"a": self.a(x), "b": self.b(x), "cu": cu_seqlens, "n": 3, "mask": x > 0}


def test_outputs_without_gradient_and_outputs_not_used(device):
    graphed = capture(TwoOutputs().to(device), TIER)
    x, cu = pack((5, 3), device, requires_grad=True)
    for used in ("b", "a", "b"):
        found, expected = graphed(x, cu), graphed.block(x, cu)
        assert found["n"] == 3 and torch.equal(found["cu"], cu) and torch.equal(found["mask"], x > 0)
        assert not found["cu"].requires_grad and not found["mask"].requires_grad
        wanted = [x, *getattr(graphed.block, used).parameters()]
        other = graphed.block.a if used == "b" else graphed.block.b
        assert_equal(torch.autograd.grad(found[used].square().sum(), wanted + list(other.parameters()))[:3],
                     torch.autograd.grad(expected[used].square().sum(), wanted))
    captured(graphed, 3, backwards=3)


def test_a_parameter_without_gradient_is_named_or_allowed(device):
    block = Mixer().to(device)
    block.unused = nn.Linear(2, 2).to(device)
    x, cu = pack((5, 3), device)
    with pytest.raises(CaptureError, match="no output depends on unused.weight, unused.bias.*allow_unused_input=True"):
        capture(block, TIER)(x, cu)
    graphed = capture(block, TIER, allow_unused_input=True)
    graphed(x, cu).sum().backward()
    assert block.unused.weight.grad is None and block.enter.weight.grad.any()
    captured(graphed, 1, backwards=1)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_training_steps_equal_eager_ones(device, optimizer):
    torch.manual_seed(1)
    blocks = [Mixer().to(device), Mixer().to(device)]
    blocks[1].load_state_dict(blocks[0].state_dict())
    graphed = capture(blocks[0], TIER)
    for block in (graphed, blocks[1]):
        torch.manual_seed(2)
        steps = optimizer(block.parameters(), lr=1e-2)
        for lengths in PACKS:
            x, cu = pack(lengths, device)
            block(x, cu).square().sum().backward()
            nn.utils.clip_grad_norm_(block.parameters(), 1.0)
            steps.step()
            steps.zero_grad()
    for found, expected in zip(blocks[0].parameters(), blocks[1].parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
    captured(graphed, len(PACKS), backwards=len(PACKS))


def test_replay_of_the_backward_runs_no_python(device):
    class Doubles(torch.autograd.Function):
        runs = 0

        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            Doubles.runs += 1
            return grad * 2

    class Block(nn.Module):
        def forward(self, x, cu_seqlens):
            return Doubles.apply(x)
    graphed = capture(Block(), TIER)
    x, cu = pack((5, 3), device, requires_grad=True)
    graphed(x, cu).sum().backward()
    runs = Doubles.runs
    graphed(x, cu).sum().backward()
    assert Doubles.runs == runs and torch.equal(x.grad, torch.full_like(x, 4.0))
    captured(graphed, 2, backwards=2)


def test_nothing_keeps_an_autograd_graph_alive(device, mixer):
    def alive():
        gc.collect()
        return sum(type(o) is torch.Tensor and o.grad_fn is not None for o in gc.get_objects())
    before = alive()
    x, cu = pack((5, 3), device, requires_grad=True)
    mixer(x, cu).sum().backward()
    assert alive() == before
    captured(mixer, 1, backwards=1)
