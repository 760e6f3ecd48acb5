"""What a graph can't hold is refused by name, with what to do instead, and the block works afterwards."""

import os
import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from graphlin.capture import capture
from graphlin.errors import CaptureError, UnsupportedModule
from graphlin.tier import Tier
from graphlin.verify import verify
from tests.blocks import Mixer, assert_equal, captured, gradients, pack

TIER = Tier(tokens=24, seqs=4)


class Checkpointed(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.inner, self.how = Mixer(), how

    def forward(self, x, cu_seqlens):
        if self.how == "a function":
            return checkpoint(lambda y: self.inner(y, cu_seqlens), x, use_reentrant=True)
        return checkpoint(self.inner, x, cu_seqlens, use_reentrant=self.how == "reentrant")


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # in the runs without gradients
@pytest.mark.parametrize("how", ["reentrant", "not reentrant", "a function"])
@pytest.mark.parametrize("warm_ups", [0, 1])
def test_activation_checkpointing_inside_is_refused(device, how, warm_ups):
    block = Checkpointed(how).to(device)
    graphed = capture(block, TIER, num_warmup_iters=warm_ups)
    x, cu = pack((5, 3), device, requires_grad=True)
    with pytest.raises(UnsupportedModule, match=r"(inner|part of the block) is computed anew in the backward \(activation check"):
        graphed(x, cu)
    assert graphed.held_bytes() == 0 and not block.inner._forward_pre_hooks
    block(x, cu).sum().backward()
    assert x.grad.any()
    with torch.no_grad():
        assert_equal([graphed(x, cu)], [block(x, cu)])                   # there is no backward
    captured(graphed, 1)


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_capture_returns_may_be_checkpointed(device, reentrant):
    graphed = capture(Mixer().to(device), TIER, num_warmup_iters=1)
    scale = torch.ones((), device=device)

    def run(block, x, cu):
        for tensor in (x, *block.parameters()):
            tensor.grad = None
        checkpoint(block, x, cu, use_reentrant=reentrant).square().sum().backward()
        return [t.grad for t in (x, *block.parameters())]
    for lengths in ((5, 3), (24,)):
        x, cu = pack(lengths, device, requires_grad=True)
        assert_equal(run(graphed, x, cu), run(graphed.block, x, cu))
    captured(graphed, 4 if reentrant else 2, backwards=2)
    x, cu = pack((5, 3), device, requires_grad=True)
    assert_equal(gradients(graphed, x, cu, scale), gradients(graphed.block, x, cu, scale))


@pytest.mark.parametrize("work", ["captures", "verifies"])
def test_a_call_in_a_backward_does_not_wait_for_a_backward_in_another_threads_turn(device, work):
    """On a device that other backward, of a capture or of `verify`, would wait for the thread that runs this one."""
    class Waits(Mixer):
        def forward(self, x, cu_seqlens=None):
            if threading.current_thread() is thread:
                inside.set()
                assert refused.wait(20)
            return super().forward(x, cu_seqlens)
    inside, refused, errors = threading.Event(), threading.Event(), []
    graphed = capture(Waits().to(device), TIER, num_warmup_iters=1)
    x, cu = pack((5, 3), device, requires_grad=True)
    thread = threading.Thread(target=lambda: verify(graphed, x.detach(), cu) if work == "verifies" else graphed(x.detach(), cu))
    if work == "verifies":
        graphed(x.detach(), cu)

    class CallsInBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            return y.clone()

        @staticmethod
        def backward(ctx, grad):
            thread.start()
            assert inside.wait(20)
            try:
                graphed(x, cu)
            except CaptureError as error:
                errors.append(error)
            refused.set()
            return grad
    CallsInBackward.apply(x).sum().backward()
    thread.join()
    assert "called in a backward" in str(errors[0]) and "Capture it before threads share it" in str(errors[0])
    assert_equal([graphed(x, cu)], [graphed.block(x, cu)])
    captured(graphed, 2)


@pytest.fixture
def one_process(tmp_path):
    """A process group of this process alone."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.raw_memory                                                  # FSDP frees memory by itself
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_wrappers_for_many_processes_are_refused_inside(device, one_process):
    from torch.distributed.fsdp import fully_shard
    block = nn.Sequential(Mixer(), nn.parallel.DistributedDataParallel(nn.Linear(8, 8).to(device)))
    with pytest.raises(UnsupportedModule, match=r"1 is wrapped in Distributed.*DistributedDataParallel\(graphlin.capture"):
        capture(block, TIER)
    mesh = torch.distributed.device_mesh.init_device_mesh(device.type, (1,))
    sharded = nn.Sequential(Mixer().to(device), fully_shard(nn.Linear(8, 8).to(device), mesh=mesh))
    with pytest.raises(UnsupportedModule, match="1 is wrapped in FSDP.*gathers its parameters.*Capture what holds whole"):
        capture(sharded, TIER)
    later = capture(nn.Linear(8, 8).to(device), TIER)
    x = torch.randn(3, 8, device=device)
    later(x)
    fully_shard(later.block, mesh=mesh)
    with pytest.raises(UnsupportedModule, match="the block is wrapped in FSDP"):
        later.refresh()
        later(x)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("make", [torch.jit.script, lambda module: torch.jit.trace(module, torch.randn(2, 8))],
                         ids=["script", "trace"])
def test_a_module_of_torch_jit_is_refused(make):
    with pytest.raises(UnsupportedModule, match="1 is compiled by torch.jit.*Capture the module that it was made from"):
        capture(nn.Sequential(nn.Linear(8, 8), make(nn.Linear(8, 8))), TIER)


def test_parts_on_another_device_are_named(device):
    block = Mixer().to(device)
    block.register_buffer("scale", torch.ones((), device="meta"))
    graphed = capture(block, TIER)
    with pytest.raises(UnsupportedModule, match=f"scale lies on meta, the block on {device.type}.*: a graph reads one device"):
        graphed(*pack((5, 3), device))


class Config:
    def __init__(self):
        self.scale = 2


class Slots:
    __slots__ = ("scale",)


@torch.no_grad()
def test_an_argument_that_may_change_unnoticed_is_refused(device):
    class Scales(nn.Module):
        def forward(self, x, cu_seqlens, config):
            return x * getattr(config, "scale", 1)
    graphed = capture(Scales(), TIER)
    x, cu = pack((5, 3), device)
    for argument in (Config(), Slots(), nn.Linear(2, 2), {1, 2}, [Config()]):
        with pytest.raises(TypeError, match="an argument of type .* is neither a tensor.*frozen dataclass, or keep it"):
            graphed(x, cu, argument)
    captured(graphed, 0)


@torch.no_grad()
def test_constants_differ_by_their_bits(device):
    class Divides(nn.Module):
        def forward(self, x, cu_seqlens, by):
            return x * 0 + (1 / torch.full_like(x, by))
    graphed = capture(Divides(), TIER, num_warmup_iters=1)
    x, cu = pack((5, 3), device)
    for by in (0.0, -0.0, float("nan"), float("nan"), 0.0, 0.5):
        torch.testing.assert_close(graphed(x, cu, by), graphed.block(x, cu, by), equal_nan=True, rtol=0, atol=0)
    captured(graphed, 6)
    assert graphed.stats.captures == 4


def test_nothing_of_a_failed_ladder_is_left(device):
    """The smallest tier fails, after the larger ones were captured."""
    class Small(Mixer):
        def forward(self, x, cu_seqlens=None):
            return super().forward(x, cu_seqlens) * (x.sum().item() if x.shape[1] == 8 else 1)
    block = Small().to(device)
    graphed = capture(block, [Tier(24, 4), Tier(8, 4)], num_warmup_iters=1)
    x, cu = pack((12,), device)
    for _ in range(2):
        with pytest.raises(CaptureError, match=os.path.basename(__file__)):
            graphed(x, cu)
        assert graphed.held_bytes() == 0 and graphed.memory() == []
    block(x, cu).sum().backward()


BACKWARD_HOOKS = {
    "backward hook": lambda module: module.register_full_backward_hook(lambda module, grads, outs: (2 * grads[0],)),
    "backward pre-hook": lambda module: module.register_full_backward_pre_hook(lambda module, outs: (2 * outs[0],)),
}


@pytest.mark.parametrize("register", BACKWARD_HOOKS.values(), ids=BACKWARD_HOOKS)
def test_a_backward_hook_inside_is_noticed_and_refused(device, register):
    graphed = capture(Mixer().to(device), TIER, num_warmup_iters=1)
    x, cu = pack((5, 3), device, requires_grad=True)
    scale = torch.ones((), device=device)
    plain = gradients(graphed, x, cu, scale)
    handle = register(graphed.block.leave)
    found = gradients(graphed, x, cu, scale)
    assert_equal(found, gradients(graphed.block, x, cu, scale))
    torch.testing.assert_close(found[1], 2 * plain[1])                   # so the hook ran
    captured(graphed, 1, backwards=1, StaleAddress=1)
    with pytest.raises(UnsupportedModule, match="leave has a hook, .*never at a replay. Remove it, or register it on what"):
        capture(graphed.block, TIER)
    handle.remove()
    assert_equal(gradients(graphed, x, cu, scale), plain)
    captured(graphed, 2, backwards=2, StaleAddress=1)
