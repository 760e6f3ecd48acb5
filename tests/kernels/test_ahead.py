"""Kernels that are compiled before they are launched: those that the launches then want, and no others."""

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch

from graphlin.backends import get_backend
from graphlin.capture import capture
from graphlin.errors import HostSync
from graphlin.kernels import ahead
from graphlin.kernels.ahead import compiling_ahead
from graphlin.layers import GatedDeltaNet
from graphlin.ops.causal_conv1d import causal_conv1d
from graphlin.ops.chunks import prepare_chunk_indices
from graphlin.ops.gated_rms_norm import gated_rms_norm
from graphlin.tier import Tier
from tests.blocks import captured, pack
from tests.inputs import cu_of
from tests.ops.op_cases import assert_bitwise, each_op

LENGTHS = (3, 0, 16, 20)
TOKENS = sum(LENGTHS) + 5


def form(kernel, args, constexprs, record):
    """What Triton compiles for itself: it tells pointers that are aligned to 16 bytes, and absent ones, from others."""
    kinds = tuple((a.dtype, a.data_ptr() % 16 == 0) if isinstance(a, torch.Tensor) else type(a) for a in args)
    return (kernel.fn.__name__, kinds, *(tuple(sorted(x.items())) for x in (constexprs, record.tiles)), record.num_warps,
            record.num_stages)


@pytest.fixture
def compiler():
    """A backend that compiles ahead: `forms` has what it was given, `open` whether it is asked to."""
    made = SimpleNamespace(forms=[], open=False)

    @contextmanager
    def compiling():
        made.open = True
        try:
            yield lambda *launch: made.forms.append(form(*launch))
        finally:
            made.open = False

    made.compiling = compiling
    return made


@pytest.fixture
def launched(device, monkeypatch):
    """The forms of all launches, with whether the compiler knew each when it came."""
    forms, backend = [], get_backend(device)
    launch = backend.launch

    def noting(kernel, grid, args, constexprs, record):
        forms.append(form(kernel, args, constexprs, record))
        launch(kernel, grid, args, constexprs, record)

    monkeypatch.setattr(backend, "launch", noting)
    return forms


def arguments(case, device):
    cu = cu_of(LENGTHS, device)
    drawn, size = case.draw(TOKENS, len(LENGTHS), device), case.options["chunk_size"]
    return drawn, cu, {"chunk_indices": prepare_chunk_indices(cu, TOKENS, size)}


@each_op
def test_what_forward_and_backward_launch_is_compiled_before_and_changes_no_bit(case, device, compiler, launched):
    drawn, cu, table = arguments(case, device)
    expected = case.run(drawn, cu, **table)
    launched.clear()
    with compiling_ahead(compiler):
        results = case.run(drawn, cu, **table)
    assert len(launched) >= 3 and compiler.forms == launched
    assert_bitwise(results, expected, "after its kernels were compiled ahead")


@each_op
def test_without_gradients_only_the_forward_is_compiled(case, device, compiler, launched):
    drawn, cu, table = arguments(case, device)
    inputs = {name: x for name, x in drawn.items() if name not in ("do", "dht")}
    launched.clear()
    with compiling_ahead(compiler), torch.no_grad():
        case.op(**{name: x.requires_grad_() for name, x in inputs.items()}, cu_seqlens=cu, **table, **case.options)
    assert launched and compiler.forms == launched


@each_op
def test_for_shapes_alone_an_op_runs_nothing_and_returns_zeros(case, device, compiler, launched):
    drawn, cu, table = arguments(case, device)
    inputs = {name: x.requires_grad_() for name, x in drawn.items() if name not in ("do", "dht")}
    expected = case.op(**inputs, cu_seqlens=cu, **table, output_final_state=True, **case.options)
    launched.clear()
    with compiling_ahead(compiler, runs=False):
        outs = case.op(**inputs, cu_seqlens=cu, **table, output_final_state=True, **case.options)
    assert not launched and len(compiler.forms) >= 3
    for out, like in zip(outs, expected, strict=True):
        assert (out.shape, out.dtype, out.requires_grad, out.is_leaf) == (like.shape, like.dtype, True, False)
        assert not out.any()


def test_nothing_is_compiled_ahead_outside_nor_where_a_backend_does_not(device, compiler, launched):
    x, weight = torch.randn(1, 20, 8, device=device), torch.randn(8, 4, device=device)
    with compiling_ahead(compiler):
        pass
    causal_conv1d(x, weight)
    with compiling_ahead(SimpleNamespace(compiling=nullcontext)):
        causal_conv1d(x, weight)
    assert launched and not compiler.forms and not compiler.open


def test_an_error_inside_leaves_nothing_open(device, compiler):
    x = torch.randn(1, 20, 8, device=device, requires_grad=True)

    class Broken(torch.autograd.Function):
        forward = staticmethod(lambda ctx, x: (x.clone(),))

        @staticmethod
        def backward(ctx, dx):
            raise HostSync("here")

    with pytest.raises(HostSync, match="here"), compiling_ahead(compiler):
        ahead.apply(Broken, x)
    assert ahead.played.get() is None and ahead._ahead.get() is None


class NoZeros(torch.nn.Module):
    """Takes no zeros of an op, which its values never are; `runs` counts how often it was called."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.eye(4))
        self.runs = 0

    def forward(self, x, cu_seqlens):
        self.runs += 1
        scale = gated_rms_norm(self.weight, self.weight[0] + 1)
        if not get_backend(x.device).is_capturing() and not scale.any():
            raise ZeroDivisionError("a scale of zeros")
        return x @ scale


def captured_without_zeros(device, compiler, monkeypatch, compiles):
    if compiles:
        monkeypatch.setattr(get_backend(device), "compiling", compiler.compiling)
    block = NoZeros().to(device)
    return block, capture(block, Tier(16, 3), num_warmup_iters=1), *pack([3, 6], device, width=4)


@pytest.mark.parametrize("compiles", [True, False])
def test_a_block_that_takes_no_zeros_is_captured(device, compiler, monkeypatch, compiles):
    if device.type != "cpu":
        return  # a capture reads no value of a device, which the block does
    block, graphed, x, cu = captured_without_zeros(device, compiler, monkeypatch, compiles)
    y = graphed(x, cu)
    captured(graphed, 1)
    assert block.runs == (4 if compiles else 3)
    torch.testing.assert_close(y, block(x, cu))


@pytest.mark.parametrize("compiles", [True, False])
def test_an_error_in_the_first_run_is_the_blocks_own(device, compiler, monkeypatch, compiles):
    if device.type != "cpu":
        return  # a capture reads no value of a device, which the block does
    block, graphed, x, cu = captured_without_zeros(device, compiler, monkeypatch, compiles)
    with torch.no_grad():
        block.weight.zero_()
    with pytest.raises(ZeroDivisionError, match="a scale of zeros"):
        graphed(x, cu)
    assert ahead.played.get() is None and ahead._ahead.get() is None and not compiler.open
    with torch.no_grad():
        block.weight.copy_(torch.eye(4))
    torch.testing.assert_close(graphed(x, cu), block(x, cu))
    captured(graphed, 1)


def test_a_capture_compiles_ahead_in_its_first_runs_alone(device, compiler, launched, monkeypatch):
    layer = GatedDeltaNet(32, head_dim=16, num_heads=2, expand_v=1, chunk_size=16).to(device)
    x, cu = pack([3, 6], device, width=32)
    monkeypatch.setattr(get_backend(device), "compiling", compiler.compiling)
    graphed = capture(layer, Tier(16, 3, chunk_size=16), num_warmup_iters=1)
    launched_open = []
    launch = get_backend(device).launch
    monkeypatch.setattr(get_backend(device), "launch", lambda *given: (launched_open.append(compiler.open), launch(*given)))
    graphed(x, cu_seqlens=cu).sum().backward()
    captured(graphed, 1, backwards=1)
    assert any(launched_open) and not compiler.open
    assert set(compiler.forms) <= set(launched)                      # nothing is compiled that nobody launches
    layers_own = {f for f in launched if f[0].startswith(("conv", "gdn", "delta", "norm", "sum"))}
    assert layers_own == set(compiler.forms)
