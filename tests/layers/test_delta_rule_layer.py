import pytest
import torch

import graphlin
from tests.layers.layer_cases import LAYER_CASES, each_layer, each_variant
from tests.tolerances import assert_close_rms, relative_rms


def make_hidden(layer, tokens, batch=1):
    return torch.randn(batch, tokens, layer.hidden_size).to(layer.A_log)


def make_states(layer, seqs):
    widths = [conv.weight.shape for conv in convolutions(layer)]
    shapes = [(layer.num_v_heads, layer.head_k_dim, layer.head_v_dim), *((d, w) for d, _, w in widths)]
    return tuple(0.5 * torch.randn(seqs, *shape, device=layer.A_log.device) for shape in shapes)


def convolutions(layer):
    return (layer.q_conv1d, layer.k_conv1d, layer.v_conv1d) if layer.use_short_conv else ()


def cumulative(device, *values):
    return torch.tensor(values, dtype=torch.int32, device=device)


def weights_for(outputs):
    """Fixed random weights that turn a list of outputs into one scalar."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(x.shape, generator=generator).to(x.device) for x in outputs]


def backward_through(outputs, weights):
    sum((x * w.to(x.dtype)).sum() for x, w in zip(outputs, weights, strict=True)).backward()


def gradients(layer):
    return {name: p.grad.clone() for name, p in layer.named_parameters()}


def tolerance_name(parameter):
    names = {"A_log": "dA_log", "dt_bias": "ddt_bias", "a_proj": "dg", "f_proj": "dg", "b_proj": "dbeta"}
    return names.get(parameter.split(".")[0], "dweight")


def run(layer, hidden, cu, call=None):
    """Output and gradients of one packed call; the loss weighs row i the same whatever rows follow it."""
    layer.zero_grad()
    y = (call or layer)(hidden, cu)
    rows, columns = (torch.arange(n, device=y.device) for n in y.shape[1:])
    backward_through([y], [torch.sin(1 + rows[:, None] * 1.7 + columns * 2.3)])
    return y.detach(), gradients(layer)


def assert_equals_the_float64_layer(case, layer, call, cu):
    """Outputs, final states and all gradients of call(hidden, cu, ...), of as many tokens as `cu` tells."""
    tokens, seqs = cu[-1].item(), len(cu) - 1
    hidden = make_hidden(layer, tokens).requires_grad_()
    states = tuple(s.requires_grad_() for s in make_states(layer, seqs))
    y, final = call(hidden, cu, initial_state=states, output_final_state=True)
    weights = weights_for([y, *final])
    backward_through([y, *final], weights)

    p = {name: x.detach().double().requires_grad_() for name, x in layer.named_parameters()}
    hidden64, *states64 = (x.detach().double().requires_grad_() for x in (hidden, *states))
    y64, final64 = case.reference(layer, p, hidden64, cu, states64)
    backward_through([y64, *final64], weights)

    assert_close_rms("o", y, y64, torch.float32)
    assert_close_rms("dx", hidden.grad, hidden64.grad, torch.float32)
    for name, (ours, theirs) in zip(("ht", "final", "final", "final"), zip(final, final64, strict=True), strict=False):
        assert_close_rms(name, ours, theirs, torch.float32)
    for ours, theirs in zip(states, states64, strict=True):
        assert_close_rms("dh0", ours.grad, theirs.grad, torch.float32)
    for name, parameter in layer.named_parameters():
        assert_close_rms(tolerance_name(name), parameter.grad, p[name].grad, torch.float32)


@each_variant
def test_equals_the_float64_layer(device, case, options):
    layer = case.make(device, **options)
    assert_equals_the_float64_layer(case, layer, layer, cumulative(device, 0, 2, 2, 23))


@each_layer
def test_dense_batch_equals_the_packed_one(device, case):
    layer = case.make(device)
    hidden = make_hidden(layer, 9, batch=2)
    dense = layer(hidden)
    packed = layer(hidden.reshape(1, 18, -1), cumulative(device, 0, 9, 18))
    assert torch.equal(dense.reshape(1, 18, -1), packed)


@each_layer
def test_slack_rows_reach_nothing(device, case):
    layer = case.make(device)
    cu = cumulative(device, 0, 5, 19)
    hidden = make_hidden(layer, 19)
    expected, expected_gradients = run(layer, hidden, cu)
    slack = torch.full((1, 7, layer.hidden_size), float("nan"), device=device)
    y, found = run(layer, torch.cat([hidden, slack], 1), cu)
    assert torch.equal(y[:, 19:], torch.zeros_like(slack))
    assert_close_rms("o", y[:, :19], expected, torch.float32)
    for name, gradient in found.items():
        assert_close_rms(tolerance_name(name), gradient, expected_gradients[name], torch.float32)


@each_layer
def test_states_continue_the_sequences(device, case):
    layer = case.make(device)
    first, second = make_hidden(layer, 12), make_hidden(layer, 9)
    # The first call ends inside the window of the second sequence's convolution.
    whole = torch.cat([first[:, :10], second[:, :2], first[:, 10:], second[:, 2:]], 1)
    expected = layer(whole, cumulative(device, 0, 12, 21))
    y1, states = layer(first, cumulative(device, 0, 10, 12), output_final_state=True)
    y2 = layer(second, cumulative(device, 0, 2, 9), initial_state=states)
    continued = torch.cat([y1[:, :10], y2[:, :2], y1[:, 10:], y2[:, 2:]], 1)
    assert_close_rms("o", continued, expected, torch.float32)
    backward_through([continued], weights_for([continued]))
    found = gradients(layer)
    layer.zero_grad()
    backward_through([expected], weights_for([expected]))
    for name, gradient in gradients(layer).items():
        assert_close_rms(tolerance_name(name), found[name], gradient, torch.float32)


@each_layer
def test_cu_seqlens_is_read_at_each_call_and_never_changed(device, case):
    layer = case.make(device)
    hidden = make_hidden(layer, 20)
    cu = cumulative(device, 0, 11, 20)
    first = layer(hidden, cu)
    assert cu.tolist() == [0, 11, 20]
    cu[1] = 3
    second = layer(hidden, cu)
    assert torch.equal(second, layer(hidden, cumulative(device, 0, 3, 20)))
    assert not torch.equal(first, second)


@each_layer
def test_given_chunk_table_is_used(device, case):
    layer = case.make(device)
    hidden, cu = make_hidden(layer, 20), cumulative(device, 0, 11, 20)
    table = graphlin.prepare_chunk_indices(cu, 32, layer.chunk_size)
    assert torch.equal(layer(hidden, cu, chunk_indices=table), layer(hidden, cu))
    with pytest.raises(ValueError, match="chunk_indices"):
        layer(hidden, cu, chunk_indices=table[:1])


@each_layer
def test_no_tokens_at_all(device, case):
    layer = case.make(device)
    hidden = make_hidden(layer, 0).requires_grad_()
    states = make_states(layer, 1)
    y, final = layer(hidden, cumulative(device, 0, 0), initial_state=states, output_final_state=True)
    assert y.shape == (1, 0, layer.hidden_size)
    for state, initial in zip(final, states, strict=True):
        assert torch.equal(state, initial)
    y.sum().backward()
    assert hidden.grad.shape == hidden.shape
    assert all(p.grad is None or not p.grad.any() for p in layer.parameters())


@each_layer
def test_dtype_follows_the_module(device, case):
    layer = case.make(device).bfloat16()
    hidden, cu = make_hidden(layer, 20), cumulative(device, 0, 11, 20)
    y, found = run(layer, hidden, cu)
    assert y.dtype == torch.bfloat16
    expected, expected_gradients = run(layer.float(), hidden.float(), cu)
    # Every projection rounds to bfloat16 too, so the tolerances of a single op don't bind.
    assert relative_rms(y, expected) < 0.015
    for name, gradient in found.items():
        assert gradient.dtype == torch.bfloat16
        assert relative_rms(gradient, expected_gradients[name]) < 0.02, name


@each_layer
@pytest.mark.parametrize(("tokens", "sizes"), [
    (40, {"hidden_size": 48, "num_heads": 2, "num_v_heads": 4}),
    pytest.param(256, {"hidden_size": 1536, "head_dim": 128, "num_heads": 16, "num_v_heads": 32, "chunk_size": 64},
                 marks=pytest.mark.device_only),
], ids=["reduced", "hidden 1536"])
def test_bfloat16_layer_is_right(device, case, tokens, sizes):
    """hidden 1536, H=16, HV=32, D=128, T=256, dense; and its twin for the interpreter."""
    layer = case.make(device, torch.bfloat16, **sizes)
    hidden = make_hidden(layer, tokens).requires_grad_()
    y = layer(hidden)
    weights = weights_for([y])
    backward_through([y], weights)
    p = {name: x.detach().double().requires_grad_() for name, x in layer.named_parameters()}
    hidden64 = hidden.detach().double().requires_grad_()
    y64, _ = case.reference(layer, p, hidden64, None, (None,) * 4)
    backward_through([y64], weights)
    pairs = {"o": (y, y64), "dx": (hidden.grad, hidden64.grad)}
    pairs |= {name: (x.grad, p[name].grad) for name, x in layer.named_parameters()}
    for name, (ours, theirs) in pairs.items():
        assert ours.dtype == torch.bfloat16 and ours.isfinite().all(), name
        # Every projection rounds to bfloat16 too, so the tolerances of a single op don't bind.
        assert relative_rms(ours, theirs) < (0.015 if name == "o" else 0.02), name


@each_layer
def test_autocast_keeps_parameters_and_their_gradients_in_float32(device, case):
    layer = case.make(device)
    hidden, cu = make_hidden(layer, 20), cumulative(device, 0, 11, 20)
    with torch.autocast(device.type, torch.bfloat16):
        y, found = run(layer, hidden, cu)
    assert y.dtype == torch.bfloat16
    assert {gradient.dtype for gradient in found.values()} == {torch.float32}
    assert relative_rms(y, layer(hidden, cu)) < 0.015


@each_layer
def test_captured_layer_equals_eager_bit_for_bit_while_cu_seqlens_changes(device, case):
    layer = case.make(device)
    graphed = graphlin.capture(layer, graphlin.Tier(tokens=32, seqs=3, chunk_size=16), num_warmup_iters=1)
    hidden, cu = make_hidden(layer, 32).requires_grad_(), cumulative(device, 0, 0, 0, 0)
    for values in ([0, 7, 32, 32], [0, 12, 12, 21], [0, 31, 31, 31]):
        cu.copy_(torch.tensor(values))
        hidden.grad = None
        y, found = run(layer, hidden, cu, call=graphed)
        dx, hidden.grad = hidden.grad, None
        expected, expected_gradients = run(layer, hidden, cu)
        assert torch.equal(y, expected), values
        assert torch.equal(dx, hidden.grad), values
        assert not dx[:, values[-1]:].any() and not y[:, values[-1]:].any()
        for name, gradient in found.items():
            assert torch.equal(gradient, expected_gradients[name]), (name, values)
    assert (graphed.stats.replays, graphed.stats.backward_replays, graphed.stats.eager) == (3, 3, {})


@each_layer
def test_replays_of_a_captured_layer_equal_the_float64_layer(device, case):
    """Three packs in one graph, forward and backward, with states. With a single head its ddt_bias would be one number, of which
    little is left of the sum over tokens, and its error would be judged by that."""
    layer = case.make(device)
    graphed = graphlin.capture(layer, graphlin.Tier(tokens=32, seqs=3, chunk_size=16), num_warmup_iters=1)
    for ends in ((0, 2, 2, 23), (0, 12, 31), (0, 32)):
        layer.zero_grad()
        assert_equals_the_float64_layer(case, layer, graphed, cumulative(device, *ends))
    assert (graphed.stats.replays, graphed.stats.backward_replays, graphed.stats.eager) == (3, 3, {})


@each_layer
def test_captured_layer_passes_states_on_at_its_own_sizes(device, case):
    layer = case.make(device)
    graphed = graphlin.capture(layer, graphlin.Tier(tokens=32, seqs=3, chunk_size=16), num_warmup_iters=1)
    with torch.no_grad():
        states, eager_states = (make_states(layer, 2),) * 2
        for tokens, cu in ((20, (0, 3, 20)), (9, (0, 9, 9))):
            hidden = make_hidden(layer, tokens)
            y, states = graphed(hidden, cumulative(device, *cu), initial_state=states, output_final_state=True)
            expected, eager_states = layer(hidden, cumulative(device, *cu), initial_state=eager_states,
                                           output_final_state=True)
            for name, ours, theirs in zip(("o", "ht", "final", "final", "final"), (y, *states), (expected, *eager_states),
                                          strict=True):
                assert_close_rms(name, ours, theirs, torch.float32)
    assert (graphed.stats.replays, graphed.stats.eager) == (2, {})


class Stack(torch.nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)
        self.tables = []

    def forward(self, hidden, cu_seqlens, chunk_indices=None):
        self.tables.append(chunk_indices)
        for layer in self.layers:
            hidden = hidden + layer(hidden, cu_seqlens, chunk_indices)
        return hidden


def test_four_layers_share_one_table_and_never_wait_for_the_device(device):
    """A capture refuses every host sync, forward and backward, so that being captured is the proof."""
    stack = Stack(case.make(device, num_v_heads=1) for case in 2 * LAYER_CASES)
    graphed = graphlin.capture(stack, graphlin.Tier(tokens=16, seqs=1, chunk_size=16), num_warmup_iters=1)
    _, found = run(stack, make_hidden(stack.layers[0], 9), cumulative(device, 0, 9), call=graphed)
    assert stack.tables and all(isinstance(table, torch.Tensor) for table in stack.tables)
    assert all(gradient.any() for gradient in found.values())
    assert (graphed.stats.replays, graphed.stats.backward_replays, graphed.stats.eager) == (1, 1, {})


@each_layer
def test_wrong_arguments_are_named_and_the_layer_still_works(device, case):
    layer = case.make(device)
    hidden, cu = make_hidden(layer, 8), cumulative(device, 0, 8)
    expected = layer(hidden, cu)
    with pytest.raises(ValueError, match=r"hidden_states: expected shape \[B, T, 24\], found \[1, 8, 23\]"):
        layer(hidden[..., :23], cu)
    with pytest.raises(ValueError, match="hidden_states: expected a batch of 1 with cu_seqlens, found 2"):
        layer(hidden.expand(2, -1, -1), cu)
    with pytest.raises(ValueError, match="hidden_states: expected dtype float32 as that of q_proj, found bfloat16; cast"):
        layer(torch.zeros(1, 8, 24, device=device, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="initial_state: expected the 4 states that this layer returns, found 1"):
        layer(hidden, cu, initial_state=make_states(layer, 1)[:1])
    with pytest.raises(ValueError, match="cu_seqlens"):
        layer(hidden, cu.float())
    with pytest.raises(TypeError, match="cu_seqlen"):
        layer(hidden, cu_seqlen=cu)
    assert torch.equal(layer(hidden, cu), expected)


@each_layer
def test_projections_of_other_dtypes_are_named_and_autocast_takes_them(device, case):
    layer = case.make(device, torch.bfloat16)
    layer.o_proj.float()
    x, cu = torch.randn(1, 8, 24, device=device, dtype=torch.bfloat16), torch.tensor([0, 3, 8], device=device)
    with pytest.raises(ValueError, match="expected dtype float32 as that of o_proj, found bfloat16"):
        layer(x, cu)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        mixed = layer(x, cu)
    layer.o_proj.bfloat16()
    layer.o_norm.float()
    layer.A_log.data, layer.dt_bias.data = layer.A_log.data.float(), layer.dt_bias.data.float()
    assert mixed.dtype == layer(x, cu).dtype == torch.bfloat16
    assert_close_rms("o", mixed, layer(x, cu), torch.bfloat16)
