"""What is refused, in which words, and that the block works afterwards."""

import gc

import pytest
import torch
from torch import nn

from graphlin.backends import LaunchRecord, get_backend
from graphlin.capture import capture
from graphlin.errors import CaptureError, ColdKernel, GraphlinError, HostSync, Resource, UnsupportedModule
from graphlin.kernels.launch import launch
from graphlin.tier import Tier
from tests.backends.kernel import add_one
from tests.blocks import Mixer, assert_equal, captured, pack

TIER = Tier(tokens=24, seqs=4)


class Fails(nn.Module):
    """Does `body` on the way, in the forward or in the backward."""

    def __init__(self, body, in_backward=False):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.body = body
        self.in_backward = in_backward

    def forward(self, x, cu_seqlens):
        return InBackward.apply(self.linear(x), self.body) if self.in_backward else self.linear(x) + self.body(x)


class InBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, body):
        ctx.body = body
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad + ctx.body(grad), None


def assert_usable(block, x, cu):
    """Nothing is open, and eager calls and captures of other blocks work, with gradients."""
    assert not get_backend(x.device).is_capturing()
    block(x, cu).sum().backward()
    other = capture(Mixer().to(x.device), TIER)
    other(x, cu).sum().backward()
    captured(other, 1, backwards=1)


READS = {"item": lambda x: x.sum().item(), "tolist": lambda x: x.sum(1).tolist()[0][0],
         "bool": lambda x: 1.0 if x.any() else 0.0, "nonzero": lambda x: x.nonzero().sum(),
         "mask": lambda x: x[x > 0].sum()}


@pytest.mark.parametrize("in_backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("read", READS)
def test_a_host_sync_names_its_line_and_the_remedy(device, read, in_backward):
    block = Fails(READS[read], in_backward).to(device)
    graphed = capture(block, TIER)
    x, cu = pack((5, 3), device)
    random = torch.get_rng_state()
    for _ in range(2):
        with pytest.raises(HostSync, match=r"test_errors.py:\d+ in <lambda>: a graph cannot repeat that. Keep"):
            graphed(x, cu)
    assert torch.equal(random, torch.get_rng_state())
    captured(graphed, 0)
    assert graphed.held_bytes() == 0
    assert_usable(block, x, cu)


def test_a_kernel_first_run_in_a_capture_is_named(device):
    class Late(nn.Module):
        """Reaches another kernel variant at each of its calls, so warm-up never meets the captured one."""
        calls = 4

        def forward(self, x, cu_seqlens):
            Late.calls += 1
            y = torch.zeros_like(x)
            launch(add_one, 1, x, y, x.numel(), record=LaunchRecord(), BLOCK=1 << Late.calls)
            return y
    graphed = capture(Late(), TIER, num_warmup_iters=1)
    x, cu = pack((5, 3), device)
    with pytest.raises(ColdKernel, match=r"kernel \S*add_one would be compiled inside a capture, launched from "
                                         r".*test_errors.py.*num_warmup_iters"), torch.no_grad():
        graphed(x, cu)
    assert_usable(Mixer().to(device), x, cu)


def test_no_warm_up_is_enough_where_the_kernels_are_warm(device):
    graphed = capture(Mixer().to(device), TIER, num_warmup_iters=0)
    x, cu = pack((5, 3), device)
    assert_equal([graphed(x, cu)], [graphed.block(x, cu)])
    captured(graphed, 1)


def test_no_warm_up_with_cold_kernels_is_a_clear_error(device):
    class Cold(nn.Module):
        def forward(self, x):
            y = torch.zeros_like(x)
            launch(add_one, 1, x, y, x.numel(), record=LaunchRecord(), BLOCK=4096)
            return y
    graphed = capture(Cold(), TIER, num_warmup_iters=0)
    x = torch.randn(3, device=device)
    with pytest.raises(ColdKernel, match="add_one"):
        graphed(x)
    graphed.block(x)
    assert torch.equal(graphed(x), x + 1)
    captured(graphed, 1)


def test_an_exception_of_the_block_passes_unchanged(device):
    class Trips(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.left = nn.Linear(8, 8), 4

        def forward(self, x, cu_seqlens):
            self.left -= 1
            if self.left == 0:
                raise KeyError("trip")
            return self.linear(x)
    graphed = capture(Trips().to(device), TIER, num_warmup_iters=2)      # the fourth run is the capture
    x, cu = pack((5, 3), device)
    with pytest.raises(KeyError, match="trip"):
        graphed(x, cu)
    assert_equal([graphed(x, cu)], [graphed.block(x, cu)])
    captured(graphed, 1)
    assert_usable(graphed.block, x, cu)


def test_a_failed_capture_leaves_other_modes_and_later_captures(device):
    class Trains(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.fails = nn.Linear(8, 8), True

        def forward(self, x, cu_seqlens):
            y = self.linear(x)
            if self.training and self.fails:                             # on a device only the capture itself finds out
                y.sum().item() if device.type == "cpu" else get_backend(device).synchronize(device)
            return y
    graphed = capture(Trains().to(device).eval(), TIER)
    x, cu = pack((5, 3), device)
    expected = graphed(x, cu).detach()
    for _ in range(2):
        graphed.train()
        with pytest.raises(CaptureError):
            graphed(x, cu)
        assert graphed.held_bytes() == 0                                 # the pool that it shared with the other mode
        assert torch.equal(graphed.eval()(x, cu).detach(), expected)
    graphed.block.fails = False
    graphed.train()(x, cu).sum().backward()
    captured(graphed, 4, backwards=1)
    assert graphed.stats.captures == 4


def test_a_capture_that_fails_in_a_second_slot_gives_the_first_ones_back(device):
    class Trips(nn.Linear):
        left = 0

        def forward(self, x, cu_seqlens):
            self.left -= 1
            if self.left == 0:
                raise KeyError("trip")
            return super().forward(x)
    graphed = capture(Trips(8, 8).to(device), TIER, slots=3, num_warmup_iters=1)
    x, cu = pack((5, 3), device)
    with torch.no_grad():
        expected = graphed(x, cu)
    waiting, graphed.block.left = graphed(x, cu), 0
    graphed.eval().block.left = 4                                        # two runs before the first slot's capture, none after
    with pytest.raises(KeyError, match="trip"), torch.no_grad():
        graphed(x, cu)
    waiting.sum().backward()                                             # its slot was not touched
    graphed.train()
    with torch.no_grad():
        assert torch.equal(graphed(x, cu), expected)
    captured(graphed, 3, backwards=1)


@pytest.mark.parametrize("run", [0, 1, 2, 3], ids=["static buffers", "shapes", "warm-up", "capture"])
def test_too_little_memory_is_a_typed_error_that_gives_all_back(device, monkeypatch, run):
    class Large(nn.Linear):
        runs, fits = 0, False

        def forward(self, x, cu_seqlens):
            self.runs += 1
            if self.runs >= run > 0 and not self.fits:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
            return super().forward(x)

    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
    graphed = capture(Large(8, 8).to(device), TIER, num_warmup_iters=1)
    x, cu = pack((5, 3), device)
    with monkeypatch.context() as patch:
        if run == 0:
            patch.setattr(torch, "zeros", full)
        with pytest.raises(Resource, match="out of device memory in a capture.*smaller tier or fewer slots.*20.00 GiB"):
            graphed(x, cu)
    assert graphed.held_bytes() == 0
    graphed.block.fits = True
    assert_usable(graphed.block, x, cu)
    assert_equal([graphed(x, cu)], [graphed.block(x, cu)])
    captured(graphed, 1)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # of what Inductor imports
@pytest.mark.parametrize("options", [dict(mode="reduce-overhead"), dict(mode="max-autotune"),
                                     dict(options={"triton.cudagraphs": True})], ids=str)
@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "wrapped"])
def test_torch_compile_with_graphs_of_its_own_is_refused(options, in_place):
    block = Mixer()
    if in_place:
        block.leave.compile(**options)
    else:
        block.leave = torch.compile(block.leave, **options)
    with pytest.raises(UnsupportedModule, match="leave is compiled by torch.compile with CUDA graphs of its own.*no-cudagraphs"):
        capture(block, TIER)
    with pytest.raises(UnsupportedModule, match="the block is compiled"):
        capture(torch.compile(Mixer(), **options), TIER)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # of what Inductor imports
def test_torch_compile_without_graphs_is_taken(device):
    block = Mixer().to(device)
    block.enter, block.leave = torch.compile(block.enter), torch.compile(block.leave, mode="max-autotune-no-cudagraphs")
    block.dropout.compile(backend="eager")
    assert capture(block, TIER).block is block


def test_an_argument_written_in_place_is_refused(device):
    class Counts(nn.Module):
        def forward(self, x, cu_seqlens, cache_state):
            cache_state.add_(1)
            return x * 2
    x, cu = pack((5, 3), device)
    state = torch.zeros(2, 4, device=device)
    with torch.no_grad(), pytest.raises(UnsupportedModule, match="writes into its argument cache_state in place"):
        capture(Counts(), TIER)(x, cu, state)


def test_outputs_that_no_call_can_be_cut_from_are_refused(device):
    class Pairs(nn.Module):
        def forward(self, x, cu_seqlens):
            return x @ x.transpose(1, 2), torch.cat([x, x], 1)
    x, cu = pack((5, 3), device)
    with pytest.raises(UnsupportedModule, match=r"output 1 has shape \[1, 48, 8\] at 24 tokens in 4 sequences"):
        capture(Pairs(), TIER)(x, cu)


@pytest.mark.parametrize("least", [24, 12], ids=["at the other sizes", "in the smaller tier"])
def test_as_many_tensors_must_come_back_for_any_number_of_rows(device, least):
    class Longer(nn.Module):
        def forward(self, x, cu_seqlens):
            return (x * 2, x * 3) if x.shape[1] >= least else (x * 2,)
    graphed = capture(Longer(), [TIER, Tier(8, 4)])
    x, cu = pack((5, 3), device)
    with pytest.raises(UnsupportedModule, match="the block returns [12] tensors in one run, at (24|8) rows, and [12] in another"):
        graphed(x, cu)
    assert len(graphed.block(x, cu)) == 1 and graphed.held_bytes() == 0


def test_a_gradient_for_two_varying_dims_is_refused(device):
    class Scores(nn.Module):
        def forward(self, x, cu_seqlens):
            return x @ x.transpose(1, 2)
    x, cu = pack((5, 3), device, requires_grad=True)
    with pytest.raises(UnsupportedModule, match="output 0 needs a gradient and has 2 varying dims"):
        capture(Scores(), TIER)(x, cu)
    with torch.no_grad():
        graphed = capture(Scores(), TIER)
        assert_equal([graphed(x, cu)], [graphed.block(x, cu)])
    captured(graphed, 1)


@pytest.mark.parametrize("arguments, error, message", [
    (dict(block=lambda x: x), TypeError, "block: expected a torch.nn.Module, found function"),
    (dict(tier=(4096, 32)), TypeError, r"tier: expected a graphlin.Tier or a sequence of them, found \(4096, 32\)"),
    (dict(tier=[]), TypeError, "tier: expected a graphlin.Tier"),
    (dict(tier=[Tier(8, 2), Tier(16, 2, 32)]), ValueError, r"tier: expected one chunk_size for all tiers, found \[32, 64\]"),
    (dict(max_padding=1.0), ValueError, r"max_padding: expected a part of the tier's rows in \[0, 1\), or None, found 1.0"),
    (dict(max_padding="half"), ValueError, "max_padding: expected .* found 'half'"),
    (dict(sample_args=torch.zeros(1, 4, 2)), TypeError, r"sample_args: expected a tuple .* found Tensor; write \(x,\)"),
    (dict(sample_kwargs=[1]), TypeError, "sample_kwargs: expected a mapping of argument names to values, found list"),
    (dict(slots=0), ValueError, "slots: expected an int of at least 1, found 0"),
    (dict(num_warmup_iters=-1), ValueError, "num_warmup_iters: expected an int of at least 0"),
    (dict(fallback="ignore"), ValueError, "fallback: expected 'eager' or 'raise', found 'ignore'"),
    (dict(dims={"y": {0: "tokens"}}), ValueError, "dims: the block's forward has no argument 'y'"),
])
def test_wrong_arguments_of_capture_are_named(arguments, error, message):
    with pytest.raises(error, match=message):
        capture(**(dict(block=nn.Linear(2, 2), tier=TIER) | arguments))


def test_an_unknown_option_is_named():
    with pytest.raises(TypeError, match="budgets"):
        capture(nn.Linear(2, 2), TIER, budgets=3)


def test_a_chunk_size_that_is_not_the_blocks_is_named():
    block = Mixer()
    block.enter.chunk_size = 32
    with pytest.raises(ValueError, match=r"tier: chunk_size 64 differs from chunk_size 32 of enter.*Tier\(..., chunk_size=32\)"):
        capture(block, TIER)


@pytest.mark.parametrize("call, error, message", [
    (lambda f, x, cu: f(x, cu, y=1), TypeError, "unexpected keyword argument 'y'"),
    (lambda f, x, cu: f(cu_seqlens=cu), TypeError, "missing a required argument: 'x'"),
    (lambda f, x, cu: f(x.expand(2, -1, -1), cu), ValueError, "no argument holds tokens: expected the first tensor to"),
])
def test_wrong_calls_are_named_and_nothing_is_lost(device, call, error, message):
    graphed = capture(Mixer().to(device), TIER)
    x, cu = pack((5, 3), device)
    with pytest.raises(error, match=message):
        call(graphed, x, cu)
    assert_equal([graphed(x, cu)], [graphed.block(x, cu)])
    captured(graphed, 1)


def test_a_tensor_elsewhere_is_named(device):
    graphed = capture(Mixer().to(device), TIER)
    x, cu = pack((5, 3), device)
    with pytest.raises(ValueError, match=f"cu_seqlens: expected a tensor on {device.type}.*, found one on meta"):
        graphed(x, cu.to("meta"))
    graphed(x, cu)
    captured(graphed, 1)


def test_a_sparse_tensor_is_named(device):
    graphed = capture(Mixer().to(device), TIER)
    x, cu = pack((5, 3), device)
    with pytest.raises(ValueError, match=r"x: expected a dense tensor, found one of layout torch.sparse_coo; call .to_dense\(\)"):
        graphed(x.to_sparse(), cu)
    graphed(x, cu)
    captured(graphed, 1)


def test_every_error_is_a_graphlin_error():
    assert issubclass(HostSync, CaptureError) and issubclass(CaptureError, GraphlinError)
    assert issubclass(GraphlinError, RuntimeError)


@pytest.mark.parametrize("grad", [True, False])
def test_garbage_collection_and_the_cast_cache_stay_off_where_they_were(device, grad):
    """As the caller left them, after a capture and after one that fails."""
    x, cu = pack((5, 3), device)
    graphed, failing = capture(Mixer().to(device), TIER), capture(Fails(READS["item"]).to(device), TIER)
    collects, caches = gc.isenabled(), torch.is_autocast_cache_enabled()
    gc.disable()
    torch.set_autocast_cache_enabled(False)
    try:
        with torch.set_grad_enabled(grad):
            assert_equal([graphed(x, cu)], [graphed.block(x, cu)])
            with pytest.raises(HostSync):
                failing(x, cu)
        assert not gc.isenabled() and not torch.is_autocast_cache_enabled()
    finally:
        torch.set_autocast_cache_enabled(caches)
        if collects:
            gc.enable()
    captured(graphed, 1)
