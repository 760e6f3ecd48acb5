"""The gated norm against its float64 reference, and what the contract asks of it bit for bit."""

import pytest
import torch

from graphlin.backends import get_backend
from graphlin.ops.gated_rms_norm import gated_rms_norm
from graphlin.verify import count_launches
from tests.ops.norm_check import Norm, norm_inputs, run_norm, standard_norm_check
from tests.ops.op_cases import assert_bitwise

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
each_gate = pytest.mark.parametrize("options", [{}, {"activation": "sigmoid"}, {"gate": "none"}], ids=["silu", "sigmoid", "none"])


# ------------------------------------------------------------------------------------------- against the reference
@each_gate
@pytest.mark.parametrize("dtype", [FP32, FP16, BF16], ids=lambda d: str(d)[6:])
def test_dtypes_and_gates(device, dtype, options):
    standard_norm_check(Norm(dtype=dtype, **options), device)


@pytest.mark.parametrize("D", [1, 2, 16, 60, 100, 128, 256, 1000, 4096])
def test_sizes(device, D):
    """With one channel and a small eps dx is what 1 - x²/(x² + eps) leaves, which float32 doesn't hold."""
    standard_norm_check(Norm(rows=(35,), D=D, eps=0.1 if D == 1 else 1e-5), device)


@pytest.mark.parametrize("rows", [(), (1,), (3,), (2, 1, 5), (1, 20, 3)], ids=str)
def test_leading_dimensions(device, rows):
    standard_norm_check(Norm(rows=rows), device)


@pytest.mark.parametrize("dtypes", [(BF16, FP32, BF16), (FP16, FP32, BF16), (BF16, BF16, FP32), (FP32, BF16, FP16)], ids=str)
def test_a_weight_and_a_gate_of_another_dtype(device, dtypes):
    """Each gradient has its argument's dtype."""
    x, weight, gate = dtypes
    standard_norm_check(Norm(dtype=x, weight=weight, gate=gate), device)


@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_eps_counts_where_rows_are_small(device, eps):
    problem = Norm(eps=eps)
    inputs = norm_inputs(problem, device)
    inputs["x"] *= 1e-3
    y = gated_rms_norm(inputs["x"], inputs["weight"], eps=eps)
    x = inputs["x"].double()
    expected = x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * inputs["weight"].double()
    torch.testing.assert_close(y.double(), expected, rtol=1e-6, atol=0)
    standard_norm_check(problem, device)


def test_swish_is_silu(device):
    inputs = norm_inputs(Norm(), device)
    assert_bitwise(run_norm(inputs, activation="swish"), run_norm(inputs), "between swish and silu")


@each_gate
def test_bf16_equals_fp32_rounded_once(device, options):
    problem = Norm(dtype=BF16, **options)
    inputs = norm_inputs(problem, device)
    expected = run_norm({name: x.float() for name, x in inputs.items()}, **problem.options)
    assert_bitwise(run_norm(inputs, **problem.options), {name: x.to(BF16) for name, x in expected.items()}, "from float32")


def test_autocast_changes_nothing(device):
    """Float32 inside whatever the autocast dtype; the result has x's."""
    inputs = norm_inputs(Norm(dtype=BF16, weight=FP32), device)
    with torch.autocast(device.type, FP16 if device.type == "cuda" else BF16):
        actual = run_norm(inputs)
    assert actual["y"].dtype == BF16 and actual["dweight"].dtype == FP32
    assert_bitwise(actual, run_norm(inputs), "under autocast")


# ------------------------------------------------------------------------------------------- bit for bit
@each_gate
def test_a_row_knows_nothing_of_the_others(device, options):
    """Alone, at another place, and among rows of NaN."""
    problem = Norm(rows=(75,), **options)
    inputs = norm_inputs(problem, device)
    expected = run_norm(inputs, **problem.options)
    for first, last in ((0, 1), (0, 33), (17, 18), (40, 75)):
        rows = {name: x if name == "weight" else x[first:last] for name, x in inputs.items()}
        spoilt = {name: x if name == "weight" else x.clone() for name, x in inputs.items()}
        for name in spoilt.keys() - {"weight"}:
            spoilt[name][:first] = spoilt[name][last:] = float("nan")
        alone, among = run_norm(rows, **problem.options), run_norm(spoilt, **problem.options)
        for name in expected.keys() - {"dweight"}:
            assert torch.equal(alone[name], expected[name][first:last]), f"{name} of rows {first} to {last} alone"
            assert torch.equal(among[name][first:last], expected[name][first:last]), f"{name} of rows {first} to {last}"
            assert among[name][:first].isnan().all() and among[name][last:].isnan().all(), name


@pytest.mark.parametrize(("rows", "added"), [(0, 5), (1, 40), (32, 1), (33, 100), (64, 700)])
def test_rows_of_zeros_after_the_last_change_no_bit(device, rows, added):
    inputs = norm_inputs(Norm(rows=(rows,)), device)
    longer = {name: x if name == "weight" else torch.cat([x, x.new_zeros(added, x.shape[1])]) for name, x in inputs.items()}
    expected, actual = run_norm(inputs), run_norm(longer)
    for name, x in expected.items():
        assert torch.equal(actual[name] if name == "dweight" else actual[name][:rows], x), name
        assert name == "dweight" or torch.count_nonzero(actual[name][rows:]) == 0, f"{name} of the rows of zeros is not 0"


@each_gate
def test_no_bit_depends_on_which_gradients_are_wanted(device, options):
    problem = Norm(**options)
    inputs = norm_inputs(problem, device)
    expected = run_norm(inputs, **problem.options)
    for wanted in (("x",), ("weight",), ("gate",), ("x", "gate"), ("weight", "gate")):
        present = tuple(name for name in wanted if name in inputs)
        for name, x in run_norm(inputs, wanted=present, **problem.options).items() if present else ():
            assert torch.equal(x, expected[name]), f"{name}, {wanted} wanted"


def test_the_number_of_programs_changes_no_bit(device, monkeypatch):
    inputs = norm_inputs(Norm(rows=(200,)), device)
    expected = run_norm(inputs)
    for cores in (1, 3):
        monkeypatch.setattr(get_backend(device), "num_cores", lambda device, cores=cores: cores)
        assert_bitwise(run_norm(inputs), expected, f"on {cores} cores")


def test_strided_arguments_equal_contiguous_ones(device):
    inputs = norm_inputs(Norm(rows=(4, 6)), device)
    expected = run_norm(inputs)
    strided = {name: x.mT.contiguous().mT if x.dim() > 1 else x.repeat_interleave(2)[::2] for name, x in inputs.items()}
    assert not any(x.is_contiguous() for x in strided.values())
    assert_bitwise(run_norm(strided), expected, "with strides")
    inputs["dy"] = inputs["dy"].new_tensor(0.5).expand_as(inputs["dy"])
    assert_bitwise(run_norm(inputs), run_norm({**inputs, "dy": inputs["dy"].contiguous()}), "with an expanded dy")


def test_negative_views_are_read_as_what_they_stand_for(device):
    inputs = norm_inputs(Norm(rows=(4, 6)), device)
    negative = {name: torch._neg_view(-x) for name, x in inputs.items()}
    assert_bitwise(run_norm(negative), run_norm(inputs), "with negative views")


# ------------------------------------------------------------------------------------------- autograd and launches
def test_two_calls_add_their_gradients(device):
    inputs = norm_inputs(Norm(), device)
    once = run_norm(inputs)
    leaves = {name: inputs[name].clone().requires_grad_() for name in ("x", "weight", "gate")}
    (gated_rms_norm(**leaves) + gated_rms_norm(**leaves)).backward(inputs["dy"])
    for name, leaf in leaves.items():
        assert torch.equal(leaf.grad, 2 * once[f"d{name}"]), name


def test_a_tensor_may_be_x_and_gate(device):
    inputs = norm_inputs(Norm(), device)
    apart = run_norm({**inputs, "gate": inputs["x"].clone()})
    x = inputs["x"].clone().requires_grad_()
    gated_rms_norm(x, inputs["weight"], x).backward(inputs["dy"])
    assert torch.equal(x.grad, apart["dx"] + apart["dgate"])


@pytest.mark.raw_memory
def test_launches_are_as_few_as_documented(device):
    """One forward; two backward, one where the weight's gradient is not wanted."""
    inputs = norm_inputs(Norm(), device)
    dy, outputs = inputs.pop("dy"), []
    for wanted, backward in ((("x", "weight", "gate"), 2), (("x", "gate"), 1)):
        leaves = {name: inputs[name].detach().requires_grad_(name in wanted) for name in inputs}
        run_norm({**leaves, "dy": dy}, wanted=wanted)         # compiles
        assert count_launches(lambda leaves=leaves: outputs.append(gated_rms_norm(**leaves)), device) == 1
        grads = [leaves[name] for name in wanted]
        assert count_launches(lambda grads=grads: torch.autograd.grad(outputs.pop(), grads, dy), device) == backward


# ------------------------------------------------------------------------------------------- edges
@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
def test_saturated_gates_are_finite(device, activation):
    """exp(-gate) would overflow below -88, where the sigmoid is 0; nothing is inf or NaN on the way."""
    gate = torch.tensor([-1e30, -1e4, -90., 90., 1e4, 1e30], device=device)[:, None]
    ones = torch.ones_like(gate)
    actual = run_norm({"x": ones, "weight": ones[0], "gate": gate, "dy": ones}, activation=activation, eps=1.)
    scale = 0.5 ** 0.5
    for name, limit in (("y", gate if activation == "silu" else ones), ("dgate", ones if activation == "silu" else 0 * ones)):
        assert actual[name][:3].abs().max() < 1e-7, name
        torch.testing.assert_close(actual[name][3:], limit[3:] * scale, rtol=1e-6, atol=1e-30)
    assert actual["dx"].isfinite().all()


@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
@pytest.mark.parametrize("argument", ["x", "gate"])
def test_nan_stays_in_its_row(device, argument, activation):
    """And is seen there: a sigmoid that bounds its exponent must not bound NaN away."""
    inputs = norm_inputs(Norm(rows=(20,)), device)
    inputs[argument][7, 3] = float("nan")
    actual = run_norm(inputs, activation=activation)
    for name in ("y", "dx", "dgate"):
        rows = actual[name].isnan().any(-1)
        assert rows[7] and rows.sum() == 1, name
    assert actual["y"][7].isnan().all() or argument == "gate"


def test_rows_of_zeros_are_zeros(device):
    inputs = norm_inputs(Norm(), device)
    inputs["x"].zero_()
    actual = run_norm(inputs)
    assert torch.count_nonzero(actual["y"]) == torch.count_nonzero(actual["dweight"]) == torch.count_nonzero(actual["dgate"]) == 0
    assert actual["dx"].isfinite().all()


def test_no_row_at_all(device):
    actual = run_norm(norm_inputs(Norm(rows=(2, 0)), device))
    assert actual["y"].shape == actual["dx"].shape == actual["dgate"].shape == (2, 0, 24)
    assert actual["dweight"].shape == (24,) and torch.count_nonzero(actual["dweight"]) == 0


@pytest.mark.device_only
def test_more_than_two_to_the_31_elements(device):
    """The last rows of 4.3 GB equal the same rows alone, forward and backward."""
    inputs = {name: torch.randn(16_900_000, 128, dtype=BF16, device=device) for name in ("x", "gate", "dy")}
    weight, tail = torch.ones(128, device=device), 100
    whole = run_norm({**inputs, "weight": weight})
    alone = run_norm({**{name: x[-tail:] for name, x in inputs.items()}, "weight": weight})
    for name in ("y", "dx", "dgate"):
        assert torch.equal(whole[name][-tail:], alone[name]), name
