"""The convolution against its float64 reference, and inputs that broke others (the contract: test_contract.py)."""

import pytest
import torch

from graphlin.ops.causal_conv1d import causal_conv1d
from graphlin.ops.reference import causal_conv1d_reference
from tests.inputs import cu_of, in_float64, run
from tests.ops.conv_check import ALL, Conv, conv_inputs, conv_upstream, run_conv, standard_conv_check
from tests.ops.op_cases import assert_bitwise
from tests.tolerances import assert_close_rms

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


# ------------------------------------------------------------------------------------------- against the reference
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("W", [1, 2, 3, 4, 5, 6, 7, 8])
def test_widths(device, W, activation):
    """Sequences of more than a chunk, and of fewer rows than taps."""
    standard_conv_check(Conv(lengths=(0, 1, 3, 70, 19), W=W, D=40, activation=activation, slack=3, chunk_size=64), device)


@pytest.mark.parametrize("extras", [(), ("bias",), ("residual",), ("initial_state",), ("final_state",),
                                    ("initial_state", "final_state")], ids="+".join)
def test_optional_arguments(device, extras):
    standard_conv_check(Conv(lengths=(0, 2, 21, 4), extras=extras, slack=1), device)


@pytest.mark.parametrize(("chunk_size", "D", "dtype"), [
    (16, 24, BF16), (16, 24, FP16), (16, 24, FP32), (32, 100, BF16), (64, 160, FP16), (64, 160, FP32)], ids=str)
def test_dtypes_chunk_sizes_and_channels(device, chunk_size, D, dtype):
    standard_conv_check(Conv(lengths=(70, 0, 3, 64), D=D, dtype=dtype, chunk_size=chunk_size, slack=5), device)


@pytest.mark.parametrize(("tokens", "extras"), [(1, ()), (1, ALL), (3, ALL), (20, ()), (20, ALL)], ids=str)
def test_dense_batch(device, tokens, extras):
    standard_conv_check(Conv(lengths=(tokens,) * 3, dense=True, extras=extras), device)


@pytest.mark.parametrize(("dtype", "parameters"), [(FP16, BF16), (FP16, FP32), (BF16, FP32), (FP32, BF16)], ids=str)
def test_parameters_and_states_of_another_dtype(device, dtype, parameters):
    """x in float16 with a bfloat16 or float32 initial state. Each result has its argument's dtype."""
    coarse = max(dtype, parameters, key=lambda d: torch.finfo(d).eps)
    problem = Conv(lengths=(0, 2, 21), D=16, dtype=dtype, parameters=parameters)
    inputs = conv_inputs(problem, device)
    actual, upstream = run_conv(problem, inputs), conv_upstream(problem, inputs)
    expected = run(causal_conv1d_reference, in_float64(inputs), upstream, **problem.options)
    for name, x in expected.items():
        own = parameters if name in ("ht", "dh0", "dweight", "dbias") else dtype
        assert actual[name].dtype == own, name
        assert_close_rms(name, actual[name], x, own if name != "ht" else coarse)


def test_swish_is_silu(device):
    problem = Conv(lengths=(21,))
    inputs = conv_inputs(problem, device)
    assert_bitwise(run_conv(problem, inputs, activation="swish"), run_conv(problem, inputs), "between swish and silu")


@pytest.mark.parametrize(("n", "W"), [(1, 4), (2, 4), (3, 4), (1, 2), (2, 6)])
def test_sequences_shorter_than_the_window_use_every_state_slot(device, n, W):
    """W=4, T=1, 2, 3 with initial state and its final-state gradient. A unit gradient for one slot of the
    final state reaches exactly one row of x, or one slot of the initial state."""
    problem = Conv(lengths=(n,), W=W, D=3)
    standard_conv_check(problem, device)
    inputs = conv_inputs(problem, device)
    for slot in range(W):
        upstream = conv_upstream(problem, inputs)
        upstream["o"].zero_()
        upstream["ht"].zero_()[..., slot] = 1
        grads = run(causal_conv1d, inputs, upstream, chunk_size=16, **problem.options)
        reached = torch.cat([grads["dh0"][0].T, grads["dx"][0]])
        assert torch.equal(reached.nonzero()[:, 0].unique(), torch.tensor([slot + n], device=device))
        assert torch.equal(reached[slot + n], torch.ones_like(reached[0]))


def test_a_state_is_the_last_rows_to_the_bit(device):
    inputs = conv_inputs(Conv(lengths=(9, 2, 0)), device)
    _, state = causal_conv1d(**inputs, output_final_state=True, chunk_size=16)
    x, initial = inputs["x"][0], inputs["initial_state"]
    assert torch.equal(state[0], x[5:9].T)
    assert torch.equal(state[1], torch.cat([initial[1][:, 2:], x[9:11].T], 1))
    assert torch.equal(state[2], initial[2])


@pytest.mark.parametrize("cut", [1, 2, 40])
def test_a_sequence_in_two_calls_equals_one(device, cut):
    """Local pieces [1, 255] and [2, 254] of a sequence that two ranks share."""
    problem = Conv(lengths=(64,), D=6)
    inputs = conv_inputs(problem, device)
    rows = {name: inputs.pop(name) for name in ("x", "residual")}
    del inputs["cu_seqlens"]

    def in_two(x, residual, initial_state, **kwargs):
        first, state = causal_conv1d(x[:, :cut], residual=residual[:, :cut], initial_state=initial_state, **kwargs)
        last, state = causal_conv1d(x[:, cut:], residual=residual[:, cut:], initial_state=state, **kwargs)
        return torch.cat([first, last], 1), state

    upstream = conv_upstream(problem, rows | inputs)
    expected = run(causal_conv1d, rows | inputs, upstream, chunk_size=16, **problem.options)
    actual = run(in_two, rows | inputs, upstream, chunk_size=16, **problem.options)
    for name in ("o", "ht", "dresidual"):
        assert torch.equal(actual[name], expected[name]), name
    for name in ("dx", "dweight", "dbias", "dh0"):
        assert_close_rms(name, actual[name], expected[name], FP32)


# ------------------------------------------------------------------------------------------- bit for bit
def test_the_second_sequence_knows_nothing_of_the_first(device):
    """W=4, `cu=[0,5,9]`."""
    problem = Conv(lengths=(5, 4))
    one, other = conv_inputs(problem, device), conv_inputs(problem, device)
    other["x"][:, :5] += 1
    other["initial_state"][0] -= 1
    expected, actual = run_conv(problem, one), run_conv(problem, other)
    for name in ("o", "dx", "dresidual"):
        assert torch.equal(actual[name][:, 5:], expected[name][:, 5:]), name
    assert not torch.equal(actual["o"][:, :5], expected["o"][:, :5])
    for name in ("ht", "dh0"):
        assert torch.equal(actual[name][1], expected[name][1]), name


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=lambda d: str(d)[6:])
def test_results_of_a_sequence_are_independent_of_the_chunk_size(device, dtype):
    problem = Conv(lengths=(66, 3), D=24, dtype=dtype)
    inputs = conv_inputs(problem, device)
    expected = run_conv(problem, inputs)
    for chunk_size in (32, 64):
        actual = run_conv(problem, inputs, chunk_size=chunk_size)
        for name in ("o", "ht", "dx", "dresidual", "dh0"):
            assert torch.equal(actual[name], expected[name]), f"{name} at chunk_size {chunk_size}"
        assert_close_rms("dweight", actual["dweight"], expected["dweight"], dtype)


@pytest.mark.parametrize("activation", [None, "silu"])
def test_bf16_equals_the_fp32_convolution_rounded_once(device, activation):
    """W=4, D=16."""
    problem = Conv(lengths=(20, 0, 4), D=16, dtype=BF16, activation=activation)
    inputs = conv_inputs(problem, device)
    wide, upstream = ({name: x.float() if x.is_floating_point() else x for name, x in tensors.items()}
                      for tensors in (inputs, conv_upstream(problem, inputs)))
    expected, actual = run(causal_conv1d, wide, upstream, chunk_size=16, **problem.options), run_conv(problem, inputs)
    assert_bitwise(actual, {name: x.to(BF16) for name, x in expected.items()}, "from float32 rounded once")


def test_no_bit_depends_on_which_gradients_are_wanted(device):
    problem = Conv(lengths=(5, 2), slack=2)
    inputs = conv_inputs(problem, device)
    expected, upstream = run_conv(problem, inputs), conv_upstream(problem, inputs)
    for wanted in (["x"], ["weight", "bias"], ["residual"], ["initial_state"]):
        leaves = {name: inputs[name].clone().requires_grad_() for name in wanted}
        outputs = causal_conv1d(**{**inputs, **leaves}, chunk_size=16, **problem.options)
        grads = torch.autograd.grad(outputs, list(leaves.values()), list(upstream.values()))
        for name, grad in zip(wanted, grads, strict=True):
            assert torch.equal(grad, expected["dh0" if name == "initial_state" else "d" + name]), name


def test_a_loss_on_one_output_only(device):
    """The gradient of the other output is zero, not what its memory held."""
    problem = Conv(lengths=(2, 5))
    inputs = conv_inputs(problem, device)
    for name, other in (("o", "ht"), ("ht", "o")):
        upstream = conv_upstream(problem, inputs)
        alone = run(causal_conv1d, inputs, {name: upstream[name]}, chunk_size=16, **problem.options)
        upstream[other].zero_()
        assert_bitwise(alone, run(causal_conv1d, inputs, upstream, chunk_size=16, **problem.options), f"without d{other}")


def test_strided_arguments_equal_contiguous_ones(device):
    problem = Conv(lengths=(21, 2), D=6)
    inputs = conv_inputs(problem, device)
    strided = {name: x if x.dim() < 2 else x.transpose(-1, -2).contiguous().transpose(-1, -2)
               for name, x in inputs.items()}
    assert not any(x.is_contiguous() for x in strided.values() if x.dim() > 1)
    assert_bitwise(run_conv(problem, strided), run_conv(problem, inputs), "with strides")


# ------------------------------------------------------------------------------------------- edges
def test_saturated_silu_is_finite(device):
    """exp(-z) would overflow below -88, where the sigmoid is 0; nothing is inf or NaN on the way."""
    x = torch.tensor([-1e30, -1e4, -90., -20., 20., 90., 1e4, 1e30], device=device)[None, :, None]
    inputs = {"x": x, "weight": torch.ones(1, 1, device=device)}
    actual = run(causal_conv1d, inputs, {"o": torch.ones_like(x)}, activation="silu", chunk_size=16)
    assert actual["o"][0, :3].abs().max() < 1e-7 and actual["dx"][0, :3].abs().max() < 1e-7
    assert torch.equal(actual["o"][0, 4:], x[0, 4:])
    assert torch.equal(actual["dx"][0, 5:, 0], torch.ones(3, device=device))


@pytest.mark.parametrize("shape", [(2, 0, 6), (0, 5, 6), (1, 5, 0)], ids=str)
def test_empty_dense_input(device, shape):
    """Nothing to compute; states still pass through."""
    B, T, D = shape
    inputs = {"x": torch.zeros(shape, device=device), "weight": torch.randn(D, 4, device=device),
              "initial_state": torch.randn(B, D, 4, device=device)}
    upstream = {"o": torch.zeros(shape, device=device), "ht": torch.randn(B, D, 4, device=device)}
    actual = run(causal_conv1d, inputs, upstream, output_final_state=True)
    assert actual["o"].shape == actual["dx"].shape == shape
    assert torch.count_nonzero(actual["dweight"]) == 0
    if T == 0:
        assert torch.equal(actual["ht"], inputs["initial_state"]) and torch.equal(actual["dh0"], upstream["ht"])


@pytest.mark.parametrize("D", [512, 768])
@pytest.mark.parametrize("tokens", [48, pytest.param(512, marks=pytest.mark.device_only)])
def test_channels_of_a_model(device, tokens, D):
    """bf16, W=4, silu, (B, T, D) = (1, 512, 512) and (1, 512, 768)."""
    standard_conv_check(Conv(lengths=(tokens,), dense=True, D=D, dtype=BF16, extras=(), chunk_size=64), device)


@pytest.mark.device_only
def test_grid_of_65536_tasks(device):
    """D=8192, T=8192, chunks of 64, B=32. The host's twin: any test whose tasks outnumber its programs."""
    x = torch.randn(32, 8192, 8192, dtype=BF16, device=device)
    weight = torch.randn(8192, 4, dtype=BF16, device=device)
    y, _ = causal_conv1d(x, weight, activation="silu")
    for i in (0, 31):
        alone, _ = causal_conv1d(x[i:i + 1, -100:], weight, activation="silu")
        assert torch.equal(y[i, -90:], alone[0, -90:])


@pytest.mark.device_only
def test_more_than_two_to_the_31_elements(device):
    """The last sequence of a pack of 4.5 GB equals the same sequence alone, forward and backward."""
    problem, D, tail = Conv(lengths=(300_000, 37), D=8192, dtype=BF16, extras=()), 8192, 37
    x = torch.randn(1, 300_037, D, dtype=BF16, device=device)
    dy = torch.randn_like(x)
    weight = torch.randn(D, 4, dtype=BF16, device=device)
    packed = run(causal_conv1d, {"x": x, "weight": weight, "cu_seqlens": cu_of(problem.lengths, device)}, {"o": dy})
    alone = run(causal_conv1d, {"x": x[:, -tail:], "weight": weight}, {"o": dy[:, -tail:]})
    for name in ("o", "dx"):
        assert torch.equal(packed[name][:, -tail:], alone[name]), name
    middle = run(causal_conv1d, {"x": x[:, 280_000:300_000], "weight": weight}, {"o": dy[:, 280_000:300_000]})
    for name in ("o", "dx"):
        assert torch.equal(packed[name][:, 280_003:300_000], middle[name][:, 3:]), name
