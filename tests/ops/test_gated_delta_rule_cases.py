"""Inputs that broke other kernels, each reduced to a small one and named after its fault."""

import pytest
import torch

from graphlin.ops.gated_delta_rule import chunk_gated_delta_rule
from graphlin.ops.reference import gated_delta_rule_reference
from tests.inputs import GDN, gdn_inputs, gdn_upstream, guarded, in_float64, run
from tests.ops.standard_check import standard_check
from tests.tolerances import assert_close_rms


@pytest.mark.parametrize("chunk_size", [32, 64])
@pytest.mark.parametrize("lengths", [(1, 127), (65, 63), (64, 0)], ids=str)
def test_uneven_pairs_with_slack(device, lengths, chunk_size):
    """`[0,1,128]`, `[0,65,128]`, `[0,64,64]` with T=128 and slack that is not zero."""
    standard_check(GDN(lengths=lengths, slack=128 - sum(lengths), HV=1, chunk_size=chunk_size), device)


def test_empty_sequences_with_a_random_state(device):
    """`cu=[0,0,64,64,129,129]`."""
    problem = GDN(lengths=(0, 64, 0, 65, 0), HV=1, chunk_size=64)
    inputs = gdn_inputs(problem, device)
    results = standard_check(problem, device, inputs)
    for i in (0, 2, 4):
        assert torch.equal(results["ht"][i], inputs["initial_state"][i])
        assert torch.equal(results["dh0"][i], gdn_upstream(problem, inputs)["ht"][i])


def test_one_row_of_slack(device):
    """T=65, `cu=[0,64]`: row 64 of o and of every gradient is exactly 0."""
    results = standard_check(GDN(lengths=(64,), slack=1, chunk_size=64, gate="raw_bias"), device)
    for name in ("o", "dq", "dk", "dv", "dg", "dbeta"):
        assert torch.count_nonzero(results[name][:, 64:]) == 0, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gates_that_forget_everything(device, dtype):
    """g=-20 at every token, and g=-1000 (masks) among mild ones."""
    standard_check(GDN(lengths=(70,), decay=-20., dtype=dtype, chunk_size=64), device)
    results = standard_check(GDN(lengths=(70,), decay="masked", dtype=dtype, chunk_size=64), device)
    assert all(x.isfinite().all() for x in results.values())


@pytest.mark.parametrize("decay", ["tiny", "strong", "weak", 0.0], ids=str)
def test_gates_of_every_size(device, decay):
    """`g=-1e-8…-1e-30` with a single -100; up to -20; down to -0.02; none at all."""
    results = standard_check(GDN(lengths=(40,), decay=decay, chunk_size=32), device)
    assert all(x.isfinite().all() for x in results.values())


def test_saturated_gates_and_slack(device):
    """Raw gates of ±90 and of ±30 in the slack, beta logits saturated."""
    problem = GDN(lengths=(40,), slack=9, gate="raw_bias", beta="sigmoid")
    inputs = gdn_inputs(problem, device)
    inputs["g"][:, ::3], inputs["g"][:, 1::3] = 90., -90.
    inputs["beta"][:, ::5], inputs["beta"][:, 1::5] = 60., -60.
    inputs["g"][:, 40:] = 30.
    results = standard_check(problem, device, inputs)
    assert all(x.isfinite().all() for x in results.values())


@pytest.mark.parametrize("chunk_size", [16, 64])
def test_keys_that_are_nearly_one_key(device, chunk_size):
    """Similar keys with beta up to 2: a product form of the triangular inverse fails here."""
    standard_check(GDN(lengths=(64,), HV=1, keys="alike", decay="weak", chunk_size=chunk_size), device)


def test_beta_of_zero(device):
    """dbeta where beta is 0: forms that divide by beta fail."""
    problem = GDN(lengths=(37,))
    inputs = gdn_inputs(problem, device)
    inputs["beta"][:, ::3] = 0.
    assert standard_check(problem, device, inputs)["dbeta"][:, ::3].abs().min() > 0


@pytest.mark.filterwarnings("ignore:.*overflow:RuntimeWarning", "ignore:.*invalid value:RuntimeWarning")
def test_a_growing_gate_is_confined(device):
    """g=+176 at one token: an error under validate; without, no NaN outside its own sequence and head."""
    problem = GDN(lengths=(9, 20, 9))
    inputs = gdn_inputs(problem, device)
    expected = run(chunk_gated_delta_rule, inputs, gdn_upstream(problem, inputs), chunk_size=16, **problem.options)
    inputs["g"][0, 14, 1] = 176.
    with pytest.raises(ValueError, match="^g: .*positive"):
        chunk_gated_delta_rule(**inputs, validate=True)
    results = run(chunk_gated_delta_rule, inputs, gdn_upstream(problem, inputs), chunk_size=16, **problem.options)
    for name in ("o", "dv", "dg", "dbeta"):
        for confined in ((0, slice(0, 9)), (0, slice(29, 38)), (0, slice(9, 29), 0)):
            assert torch.equal(results[name][confined], expected[name][confined]), f"{name} changed at {confined}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_state_in_half_precision(device, dtype):
    """h0 in bf16 or fp16 is accepted and rounded no further; its gradient has its dtype."""
    problem = GDN(lengths=(21, 0, 5), dtype=dtype)
    inputs = gdn_inputs(problem, device)
    inputs["initial_state"] = inputs["initial_state"].to(dtype)
    results = standard_check(problem, device, inputs)
    assert torch.equal(results["ht"][1], inputs["initial_state"][1].float())


def test_gate_and_strength_in_half_precision(device):
    """g and beta in the dtype of a model under autocast."""
    problem = GDN(lengths=(21, 5), dtype=torch.bfloat16, gate="raw", beta="sigmoid")
    inputs = gdn_inputs(problem, device)
    inputs["g"] = inputs["g"].bfloat16()
    standard_check(problem, device, inputs)


def test_every_head_reads_its_own_key_head(device):
    """H=2, HV=4, every head another constant: value head i reads key head i // 2."""
    problem = GDN(lengths=(5,), H=2, HV=4, l2norm=False, states="none")
    inputs = gdn_inputs(problem, device)
    for name in ("q", "k", "v"):
        heads = inputs[name].shape[2]
        inputs[name] = (0.1 * (1 + torch.arange(heads, device=device)))[:, None].expand(inputs[name].shape).contiguous()
    inputs["beta"], inputs["g"] = torch.ones_like(inputs["beta"]), torch.zeros_like(inputs["g"])
    o = standard_check(problem, device, inputs)["o"]
    first = [16 ** -0.5 * 16 * (0.1 * (i // 2 + 1)) ** 2 * 0.1 * (i + 1) for i in range(4)]
    torch.testing.assert_close(o[0, 0, :, 0].cpu(), torch.tensor(first))


@pytest.mark.parametrize(("K", "V"), [(60, 24), (20, 100)])
@pytest.mark.parametrize("fill", [1e30, float("nan")], ids=str)
def test_memory_behind_a_tensor_is_never_read(device, K, V, fill):
    """K=60, 100: tiles overhang the tensors; what lies there is 1e30 or NaN."""
    problem = GDN(lengths=(21, 5), H=1, HV=1, K=K, V=V, gate="raw_bias")
    inputs = gdn_inputs(problem, device)
    upstream = gdn_upstream(problem, inputs)
    expected = run(chunk_gated_delta_rule, inputs, upstream, chunk_size=16, **problem.options)
    fenced = {name: guarded(x, fill) if x.is_floating_point() else x for name, x in inputs.items()}
    upstream = {name: guarded(x, fill) for name, x in upstream.items()}
    actual = run(chunk_gated_delta_rule, fenced, upstream, chunk_size=16, **problem.options)
    for name, x in expected.items():
        assert torch.equal(actual[name], x), name


def test_one_token(device):
    """T=1: `o = scale (S0^T q + beta (q.k) (v - S0^T k))` with decayed S0."""
    standard_check(GDN(lengths=(1,)), device)
    standard_check(GDN(lengths=(1, 1, 1), gate="raw"), device)


def test_many_short_dense_sequences(device):
    """A reduced twin of B·HV = 65,536: sequences are spread over grid axis 0."""
    standard_check(GDN(lengths=(2,) * 24, dense=True, HV=1, states="none"), device)


def test_a_scale_of_ones_own(device):
    problem = GDN(lengths=(21,), scale=0.37)
    inputs = gdn_inputs(problem, device)
    o, _ = chunk_gated_delta_rule(**inputs, chunk_size=16, **problem.options)
    expected, _ = gated_delta_rule_reference(**in_float64(inputs), **problem.options)
    assert_close_rms("o", o, expected, torch.float32)
