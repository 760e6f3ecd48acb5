"""The delta rules, forward and every gradient, against the float64 recurrence."""

import pytest
import torch

from tests.inputs import GDN, KDA, each_rule, gdn_inputs, gdn_upstream, in_float64, run
from tests.ops.standard_check import standard_check
from tests.pairwise import pairwise
from tests.tolerances import assert_close_rms

GATES = {
    GDN: [{"gate": "external"}, {"gate": "raw"}, {"gate": "raw_bias"}],
    KDA: [{"gate": "external"}, {"gate": "raw"}, {"gate": "raw_bias"}, {"gate": "external", "safe_gate": True},
          {"gate": "raw_bias", "lower_bound": -5.}, {"gate": "raw", "lower_bound": -5., "safe_gate": True},
          {"gate": "raw_bias", "lower_bound": -2.5, "rate": False, "safe_gate": True},
          {"gate": "raw", "lower_bound": -0.5, "rate": False}],
}
FACTORS = {
    "lengths": [(3, 0, 34), (19, 19)],
    "beta": ["given", "sigmoid", "twice_sigmoid"],
    "heads": [(2, 2), (1, 2), (2, 4)],
    "l2norm": [True, False],
    "states": ["both", "initial", "final", "none"],
    "state_v_first": [False, True],
    "chunk_size": [16, 32, 64],
    "dtype": [torch.float32, torch.float16, torch.bfloat16],
    "sizes": [(16, 16), (33, 20), (5, 40), (16, 64)],
}


def problem_of(rule, lengths, heads, sizes, gates, **branches) -> GDN:
    (H, HV), (K, V), dense = heads, sizes, len(set(lengths)) == 1
    return rule(lengths=lengths, dense=dense, slack=0 if dense else 3, H=H, HV=HV, K=K, V=V, **gates, **branches)


@pytest.mark.parametrize("problem", [problem_of(rule, **row) for rule, gates in GATES.items()
                                     for row in pairwise({**FACTORS, "gates": gates})], ids=str)
def test_outputs_and_gradients_for_every_pair_of_branches(device, problem):
    standard_check(problem, device)


@each_rule
@pytest.mark.parametrize("chunk_size", [16, 32, 64])
def test_a_sequence_of_several_chunks(device, rule, chunk_size):
    """State and gradient are carried over four chunk edges, the last chunk partial."""
    standard_check(rule(lengths=(3 * chunk_size + 5,), chunk_size=chunk_size, gate="raw_bias", beta="sigmoid"), device)


@each_rule
def test_outputs_alone_without_a_backward_pass(device, rule):
    problem = rule(lengths=(21, 5))
    inputs = gdn_inputs(problem, device)
    o, ht = rule.op(**inputs, **problem.op_options)
    expected_o, expected_ht = rule.reference(**in_float64(inputs), **problem.options)
    assert not o.requires_grad and not ht.requires_grad
    assert_close_rms("o", o, expected_o, torch.float32)
    assert_close_rms("ht", ht, expected_ht, torch.float32)


@each_rule
@pytest.mark.parametrize("used", ["o", "ht"])
def test_a_loss_of_one_output_only(device, rule, used):
    """The gradient of the other output is absent, not zero-filled memory that was never written."""
    problem = rule(lengths=(21, 0, 5), gate="raw_bias")
    inputs = gdn_inputs(problem, device)
    upstream = {used: gdn_upstream(problem, inputs)[used]}
    actual = run(rule.op, inputs, upstream, **problem.op_options)
    expected = run(rule.reference, in_float64(inputs), upstream, **problem.options)
    for name, x in expected.items():
        if x is None:
            assert actual[name] is None or torch.count_nonzero(actual[name]) == 0, name
        else:
            assert_close_rms(name, actual[name], x, torch.float32)


@each_rule
@pytest.mark.parametrize("wanted", ["q", "v", "g", "initial_state", "A_log"])
def test_a_gradient_of_one_argument_only(device, rule, wanted):
    """Gradients that nobody asked for may be skipped; the one that is wanted is the same to the bit."""
    problem = rule(lengths=(21, 5), gate="raw_bias")
    inputs = gdn_inputs(problem, device)
    upstream = gdn_upstream(problem, inputs)
    expected = run(rule.op, inputs, upstream, **problem.op_options)
    leaf = inputs[wanted].detach().requires_grad_()
    o, ht = rule.op(**{**inputs, wanted: leaf}, **problem.op_options)
    (grad,) = torch.autograd.grad([o, ht], [leaf], [upstream["o"], upstream["ht"]])
    assert torch.equal(grad, expected["dh0" if wanted == "initial_state" else "d" + wanted])


@each_rule
def test_one_tensor_as_several_arguments(device, rule):
    """The gradient of a tensor that feeds two arguments is the sum of both."""
    problem = rule(lengths=(21, 5), H=2, HV=2)
    inputs = gdn_inputs(problem, device)
    upstream = gdn_upstream(problem, inputs)
    shared = inputs["q"]
    expected = run(rule.op, {**inputs, "k": shared.clone()}, upstream, **problem.op_options)
    leaf = shared.detach().requires_grad_()
    o, ht = rule.op(**{**inputs, "q": leaf, "k": leaf}, **problem.op_options)
    (grad,) = torch.autograd.grad([o, ht], [leaf], [upstream["o"], upstream["ht"]])
    assert torch.equal(grad, expected["dq"] + expected["dk"])


@each_rule
def test_two_calls_before_one_backward(device, rule):
    """Contributions 1 and 10 to one tensor give 11; buffers shared between calls would give 20."""
    problem = rule(lengths=(21, 5))
    inputs = gdn_inputs(problem, device)
    leaf = inputs["v"].detach().requires_grad_()
    first, _ = rule.op(**{**inputs, "v": leaf}, **problem.op_options)
    second, _ = rule.op(**{**inputs, "v": leaf}, **problem.op_options)
    (once,) = torch.autograd.grad(first.sum(), leaf, retain_graph=True)
    (both,) = torch.autograd.grad(first.sum() + 10 * second.sum(), leaf)
    torch.testing.assert_close(both, 11 * once)


@each_rule
def test_strided_arguments_equal_contiguous_ones(device, rule):
    """q, k and v are commonly slices of one projection; beta and g may be too."""
    problem = rule(lengths=(21, 5), H=2, HV=2)
    inputs = gdn_inputs(problem, device)
    upstream = gdn_upstream(problem, inputs)
    expected = run(rule.op, inputs, upstream, **problem.op_options)
    fused = torch.cat([inputs[name] for name in ("q", "k", "v")], -1)
    gates = {name: torch.stack([inputs[name]] * 2, -1)[..., 0] for name in ("g", "beta")}
    strided = {**inputs, **gates, "q": fused[..., :16], "k": fused[..., 16:32], "v": fused[..., 32:],
               "initial_state": inputs["initial_state"].mT.contiguous().mT}
    upstream = {"o": upstream["o"].transpose(1, 2).contiguous().transpose(1, 2),
                "ht": upstream["ht"].mT.contiguous().mT}
    actual = run(rule.op, strided, upstream, **problem.op_options)
    for name, x in expected.items():
        assert torch.equal(actual[name], x), name


@each_rule
def test_expanded_upstream_gradient(device, rule):
    """`o.sum().backward()` hands over a gradient with all strides 0."""
    problem = rule(lengths=(21, 5))
    inputs = gdn_inputs(problem, device)
    upstream = {"o": torch.ones((), device=device).expand(inputs["v"].shape),
                "ht": torch.ones((), device=device).expand(problem.state_shape)}
    actual = run(rule.op, inputs, upstream, **problem.op_options)
    expected = run(rule.reference, in_float64(inputs), upstream, **problem.options)
    for name, x in expected.items():
        assert_close_rms(name, actual[name], x, torch.float32)
