"""Tensors that do not keep their memory, so that captures in one pool may share it."""

import gc

import pytest
import torch
from torch import nn

from graphlin.backends import get_backend
from graphlin.backends.memory import without_ownership
from graphlin.capture import capture
from graphlin.tier import Tier
from tests.blocks import Mixer, captured, pack


def keeps_memory(tensor):
    """Whether its storage owns memory: one made around an address can't be resized. torch_npu's kind can; there the allocator
    tells whether somebody has the memory."""
    if tensor.device.type != "npu":
        return tensor.untyped_storage().resizable()
    return any(block["state"] == "active_allocated" for segment in torch.npu.memory_snapshot() for block in segment["blocks"]
               if block["address"] <= tensor.data_ptr() < block["address"] + block["size"])


def unowned(tensors, device):
    """As the device's backend makes them; the host's leaves tensors as they are, so that there it is CUDA's way."""
    return without_ownership(tensors) if device.type == "cpu" else get_backend(device).unowned(tensors)


def test_memory_that_nobody_else_holds_is_let_go(device):
    mine, view, other = torch.randn(4, 3, device=device), torch.randn(6, device=device), torch.randn(5, device=device)
    kept, parts = other[1:], (view[:2], view[2:])
    values = [t.clone() for t in (mine.T, *parts, other)]
    found = unowned([mine.T, None, *parts, other], device)
    assert found[1] is None and found[4] is other              # kept is a second owner
    for t, expected in zip([found[0], *found[2:]], values, strict=True):
        assert torch.equal(t, expected) and t.stride() == expected.stride()
    assert kept.data_ptr() == other.data_ptr() + other.element_size()
    aliases = [found[0].data_ptr(), found[2].data_ptr(), found[3].data_ptr()]
    assert aliases == [mine.data_ptr(), view.data_ptr(), view.data_ptr() + 2 * view.element_size()]


def test_a_view_of_what_nobody_else_sees_lets_go_too(device):
    weight, x = torch.randn(8, device=device, requires_grad=True), torch.randn(1, 3, 8, device=device)
    grad, = torch.autograd.grad((weight * x).sum(), weight)      # a view of the sum over rows
    assert grad._base is not None
    found, = unowned([grad], device)
    assert found is not grad and found.data_ptr() == grad.data_ptr() and torch.equal(found, grad)
    outside, inside = grad._base, grad[2:]
    assert outside is grad._base and unowned([inside], device) == [inside]


def test_captured_gradients_and_outputs_leave_their_memory_to_the_graphs(device):
    class Shows(nn.Module):
        """One output of its own, one that is its argument."""

        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8))

        def forward(self, x, cu_seqlens):
            return x * self.weight, cu_seqlens
    for copies in (True, False):
        graphed = capture(Shows().to(device), Tier(24, 4), copy_outputs=copies, num_warmup_iters=1)
        x, cu = pack((5, 3), device, requires_grad=True)
        graphed(x, cu)[0].sum().backward()
        (pair,), = next(iter(graphed._modes.values())).pairs.values()
        own, argument = pair.static_outputs
        shared = [own] if copies else []
        for t in [*shared, pair.input_grads[0][1], pair.param_grads[0]]:
            assert not keeps_memory(t)
        assert copies or keeps_memory(own)
        assert argument.untyped_storage()._cdata == pair.static_cu.untyped_storage()._cdata
        captured(graphed, 1, backwards=1)


def test_results_live_on_after_reset_and_the_pool_is_empty(device):
    graphed = capture(Mixer().to(device), [Tier(24, 4), Tier(8, 2)], num_warmup_iters=1)
    x, cu = pack((5, 3), device, requires_grad=True)
    y = graphed(x, cu)
    grads = torch.autograd.grad(y.sum(), [x, *graphed.parameters()])
    before = [t.clone() for t in (y, *grads)]
    graphed.reset()
    assert graphed.held_bytes() == 0 and graphed.memory() == []
    gc.collect()
    assert all(torch.equal(t, b) for t, b in zip((y, *grads), before, strict=True))
    captured(graphed, 1, backwards=1)


@pytest.mark.device_only
@pytest.mark.raw_memory
def test_a_ladder_that_fails_gives_all_its_memory_back(device):
    class Large(nn.Module):
        """64 MiB an iteration, and a host sync in the smallest tier."""

        def forward(self, x, cu_seqlens):
            y = (x[:, :1].expand(1, 16 << 20, 8)[..., 0] * 2).sum() + x
            return y * (x.sum().item() if x.shape[1] == 8 else 1)

    def reserved():
        gc.collect()
        get_backend(device).synchronize(device)
        torch.get_device_module(device).empty_cache()
        return torch.get_device_module(device).memory_reserved(device)
    graphed = capture(Large(), [Tier(24, 4), Tier(8, 4)], num_warmup_iters=1)
    x, cu = pack((12,), device)
    before = reserved()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="test_unowned.py"), torch.no_grad():
            graphed(x, cu)
        assert reserved() <= before + (4 << 20)


@pytest.mark.device_only
def test_blocks_on_two_devices_replay_each_on_its_own(device):
    if torch.get_device_module(device).device_count() < 2:
        return                                                   # nothing to tell apart
    devices = [torch.device(device.type, i) for i in (0, 1)]
    blocks = [capture(Mixer().to(d), Tier(24, 4), num_warmup_iters=1) for d in devices]
    for lengths in ((5, 3), (24,), (1, 1, 9)):
        for graphed, d in zip(blocks, devices, strict=True):
            x, cu = pack(lengths, d, requires_grad=True)
            found, expected = graphed(x, cu), graphed.block(x, cu)
            torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-6)
            torch.testing.assert_close(torch.autograd.grad(found.sum(), x), torch.autograd.grad(expected.sum(), x))
    for graphed in blocks:
        captured(graphed, 3, backwards=3)
