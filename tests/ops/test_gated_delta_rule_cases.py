"""Inputs that broke other kernels, each reduced to a small one and named after its fault."""

from dataclasses import replace

import pytest
import torch

from graphlin.capture import capture
from graphlin.tier import Tier
from tests.blocks import captured
from tests.inputs import GDN, KDA, each_rule, gdn_inputs, gdn_upstream, guarded, in_float64, run
from tests.ops.standard_check import standard_check
from tests.tolerances import assert_close_rms


@each_rule
@pytest.mark.parametrize("chunk_size", [32, 64])
@pytest.mark.parametrize("lengths", [(1, 127), (65, 63), (64, 0)], ids=str)
def test_uneven_pairs_with_slack(device, rule, lengths, chunk_size):
    """`[0,1,128]`, `[0,65,128]`, `[0,64,64]` with T=128 and slack that is not zero."""
    standard_check(rule(lengths=lengths, slack=128 - sum(lengths), HV=1, chunk_size=chunk_size), device)


class Op(torch.nn.Module):
    """The op of a problem as a block; its arguments are the block's, parameters of the gate among them."""

    def __init__(self, problem):
        super().__init__()
        self.problem = problem

    def forward(self, q, k, v, g, beta, initial_state, cu_seqlens, chunk_indices=None):
        return self.problem.op(q, k, v, g, beta, initial_state=initial_state, cu_seqlens=cu_seqlens, chunk_indices=chunk_indices,
                               **self.problem.op_options)


@each_rule
@pytest.mark.parametrize("chunk_size", [32, 64])
def test_uneven_pairs_with_slack_in_one_graph(device, rule, chunk_size):
    """Those of the test above, replayed in turn in a tier of 128 tokens and 2 sequences."""
    graphed = capture(Op(rule(HV=1, chunk_size=chunk_size)), Tier(128, 2, chunk_size), num_warmup_iters=1)
    for lengths in ((1, 127), (65, 63), (64, 0)):
        problem = rule(lengths=lengths, slack=128 - sum(lengths), HV=1, chunk_size=chunk_size)
        results = standard_check(problem, device, op=graphed)
        for name in ("o", "dq", "dk", "dv", "dg", "dbeta"):
            assert results[name].shape[1] == 128 and not results[name][:, sum(lengths):].any(), name
    captured(graphed, 3, backwards=3)


@each_rule
def test_empty_sequences_with_a_random_state(device, rule):
    """`cu=[0,0,64,64,129,129]`."""
    problem = rule(lengths=(0, 64, 0, 65, 0), HV=1, chunk_size=64)
    inputs = gdn_inputs(problem, device)
    results = standard_check(problem, device, inputs)
    for i in (0, 2, 4):
        assert torch.equal(results["ht"][i], inputs["initial_state"][i])
        assert torch.equal(results["dh0"][i], gdn_upstream(problem, inputs)["ht"][i])


@each_rule
def test_gate_parameters_of_any_strides(device, rule):
    """A column of a table, and one learned number expanded over the heads."""
    problem = rule(lengths=(20,), gate="raw_bias")
    inputs = gdn_inputs(problem, device)
    expected = standard_check(problem, device, inputs)
    strided = {name: torch.stack([inputs[name], inputs[name].flip(0)], 1)[:, 0] for name in ("A_log", "dt_bias")}
    actual = standard_check(problem, device, inputs | strided)
    for name, x in expected.items():
        assert torch.equal(actual[name], x), name
    standard_check(problem, device, inputs | {"A_log": inputs["A_log"][:1].expand(problem.HV)})


@each_rule
def test_one_row_of_slack(device, rule):
    """T=65, `cu=[0,64]`: row 64 of o and of every gradient is exactly 0."""
    results = standard_check(rule(lengths=(64,), slack=1, chunk_size=64, gate="raw_bias"), device)
    for name in ("o", "dq", "dk", "dv", "dg", "dbeta"):
        assert torch.count_nonzero(results[name][:, 64:]) == 0, name


@each_rule
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gates_that_forget_everything(device, rule, dtype):
    """g=-20 at every token, and g=-1000 (masks) among mild ones."""
    standard_check(rule(lengths=(70,), decay=-20., dtype=dtype, chunk_size=64), device)
    results = standard_check(rule(lengths=(70,), decay="masked", dtype=dtype, chunk_size=64), device)
    assert all(x.isfinite().all() for x in results.values())


@each_rule
@pytest.mark.parametrize("decay", ["tiny", "strong", "weak", 0.0], ids=str)
def test_gates_of_every_size(device, rule, decay):
    """`g=-1e-8…-1e-30` with a single -100; up to -20; down to -0.02; none at all."""
    results = standard_check(rule(lengths=(40,), decay=decay, chunk_size=32), device)
    assert all(x.isfinite().all() for x in results.values())


@each_rule
def test_saturated_gates_and_slack(device, rule):
    """Raw gates of ±90 and of ±30 in the slack, beta logits saturated."""
    problem = rule(lengths=(40,), slack=9, gate="raw_bias", beta="sigmoid")
    inputs = gdn_inputs(problem, device)
    inputs["g"][:, ::3], inputs["g"][:, 1::3] = 90., -90.
    inputs["beta"][:, ::5], inputs["beta"][:, 1::5] = 60., -60.
    inputs["g"][:, 40:] = 30.
    results = standard_check(problem, device, inputs)
    assert all(x.isfinite().all() for x in results.values())


@each_rule
@pytest.mark.parametrize("chunk_size", [16, 64])
def test_keys_that_are_nearly_one_key(device, rule, chunk_size):
    """Similar keys with beta up to 2: a product form of the triangular inverse fails here."""
    standard_check(rule(lengths=(64,), HV=1, keys="alike", decay="weak", chunk_size=chunk_size), device)


@each_rule
def test_beta_of_zero(device, rule):
    """dbeta where beta is 0: forms that divide by beta fail."""
    problem = rule(lengths=(37,))
    inputs = gdn_inputs(problem, device)
    inputs["beta"][:, ::3] = 0.
    assert standard_check(problem, device, inputs)["dbeta"][:, ::3].abs().min() > 0


@each_rule
@pytest.mark.filterwarnings("ignore:.*overflow:RuntimeWarning", "ignore:.*invalid value:RuntimeWarning")
def test_a_growing_gate_is_confined(device, rule):
    """g=+176 at one token: an error under validate; without, no NaN outside its own sequence and head."""
    problem = rule(lengths=(9, 20, 9))
    inputs = gdn_inputs(problem, device)
    expected = run(rule.op, inputs, gdn_upstream(problem, inputs), **problem.op_options)
    inputs["g"][0, 14, 1] = 176.
    with pytest.raises(ValueError, match="^g: .*positive"):
        rule.op(**inputs, validate=True)
    results = run(rule.op, inputs, gdn_upstream(problem, inputs), **problem.op_options)
    for name in ("o", "dv", "dg", "dbeta"):
        for confined in ((0, slice(0, 9)), (0, slice(29, 38)), (0, slice(9, 29), 0)):
            assert torch.equal(results[name][confined], expected[name][confined]), f"{name} changed at {confined}"


@each_rule
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_state_in_half_precision(device, rule, dtype):
    """h0 in bf16 or fp16 is accepted and rounded no further; its gradient has its dtype."""
    problem = rule(lengths=(21, 0, 5), dtype=dtype)
    inputs = gdn_inputs(problem, device)
    inputs["initial_state"] = inputs["initial_state"].to(dtype)
    results = standard_check(problem, device, inputs)
    assert torch.equal(results["ht"][1], inputs["initial_state"][1].float())


@each_rule
def test_gate_and_strength_in_half_precision(device, rule):
    """g and beta in the dtype of a model under autocast."""
    problem = rule(lengths=(21, 5), dtype=torch.bfloat16, gate="raw", beta="sigmoid")
    inputs = gdn_inputs(problem, device)
    inputs["g"] = inputs["g"].bfloat16()
    standard_check(problem, device, inputs)


@each_rule
def test_every_head_reads_its_own_key_head(device, rule):
    """H=2, HV=4, every head another constant: value head i reads key head i // 2."""
    problem = rule(lengths=(5,), H=2, HV=4, l2norm=False, states="none")
    inputs = gdn_inputs(problem, device)
    for name in ("q", "k", "v"):
        heads = inputs[name].shape[2]
        inputs[name] = (0.1 * (1 + torch.arange(heads, device=device)))[:, None].expand(inputs[name].shape).contiguous()
    inputs["beta"], inputs["g"] = torch.ones_like(inputs["beta"]), torch.zeros_like(inputs["g"])
    o = standard_check(problem, device, inputs)["o"]
    first = [16 ** -0.5 * 16 * (0.1 * (i // 2 + 1)) ** 2 * 0.1 * (i + 1) for i in range(4)]
    torch.testing.assert_close(o[0, 0, :, 0].cpu(), torch.tensor(first))


@each_rule
@pytest.mark.parametrize(("K", "V"), [(60, 24), (20, 100)])
@pytest.mark.parametrize("fill", [1e30, float("nan")], ids=str)
def test_memory_behind_a_tensor_is_never_read(device, rule, K, V, fill):
    """K=60, 100: tiles overhang the tensors; what lies there is 1e30 or NaN."""
    problem = rule(lengths=(21, 5), H=1, HV=1, K=K, V=V, gate="raw_bias")
    inputs = gdn_inputs(problem, device)
    upstream = gdn_upstream(problem, inputs)
    expected = run(rule.op, inputs, upstream, **problem.op_options)
    fenced = {name: guarded(x, fill) if x.is_floating_point() else x for name, x in inputs.items()}
    upstream = {name: guarded(x, fill) for name, x in upstream.items()}
    actual = run(rule.op, fenced, upstream, **problem.op_options)
    for name, x in expected.items():
        assert torch.equal(actual[name], x), name


@each_rule
def test_one_token(device, rule):
    """T=1: `o = scale (S0^T q + beta (q.k) (v - S0^T k))` with decayed S0."""
    standard_check(rule(lengths=(1,)), device)
    standard_check(rule(lengths=(1, 1, 1), gate="raw"), device)


@each_rule
def test_many_short_dense_sequences(device, rule):
    """A reduced twin of B·HV = 65,536: sequences are spread over grid axis 0."""
    standard_check(rule(lengths=(2,) * 24, dense=True, HV=1, states="none"), device)


@each_rule
def test_a_scale_of_ones_own(device, rule):
    problem = rule(lengths=(21,), scale=0.37)
    inputs = gdn_inputs(problem, device)
    o, _ = rule.op(**inputs, **problem.op_options)
    expected, _ = rule.reference(**in_float64(inputs), **problem.options)
    assert_close_rms("o", o, expected, torch.float32)


# ------------------------------------------------------------------------------------------- one decay for each channel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("decay", [-2.5, -3., -5., -5.9, -6.])
def test_channel_gates_all_alike(device, decay, dtype):
    """All g=-2.5, -3, -5, -5.9, -6 at T=64: an anchor in the middle of a chunk would overflow."""
    problem = KDA(lengths=(64,), HV=1, decay=decay, dtype=dtype, chunk_size=64)
    standard_check(problem, device)
    if decay >= -5:
        standard_check(replace(problem, safe_gate=True), device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("decay", [-5.9, -6., -20., -1000.])
def test_strong_channel_gates_mixed_with_none(device, decay, dtype):
    """g = -5.9, -6, -20, -1000 in some channels of some tokens, 0 elsewhere."""
    problem = KDA(lengths=(70, 9), HV=1, dtype=dtype, chunk_size=64)
    inputs = gdn_inputs(problem, device)
    inputs["g"] = torch.where(inputs["g"] > -0.2, decay, 0.)
    standard_check(problem, device, inputs)


@pytest.mark.parametrize("safe_gate", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_saturated_bounded_gate(device, safe_gate, dtype):
    """A_log=90 with raw gates of ±50 under lower_bound -5, in the slack too: exp(A_log) times 0 must not appear."""
    problem = KDA(lengths=(70,), slack=7, gate="raw_bias", beta="sigmoid", lower_bound=-5., safe_gate=safe_gate, dtype=dtype,
                  chunk_size=64)
    inputs = gdn_inputs(problem, device)
    inputs["g"] = 50 * inputs["g"].sign()
    inputs["A_log"].fill_(90.)
    results = standard_check(problem, device, inputs)
    assert all(x.isfinite().all() for x in results.values())
    assert torch.count_nonzero(results["dA_log"]) == 0


@each_rule
def test_a_rate_above_its_bound_acts_as_the_bound(device, rule):
    """A_log=90 acts as 80, also where softplus underflows to 0; its gradient is 0."""
    problem = rule(lengths=(21,), gate="raw")
    inputs = gdn_inputs(problem, device)
    inputs["g"] -= 90.
    inputs["g"][:, 3] = -200.
    inputs["A_log"].fill_(90.)
    results = standard_check(problem, device, inputs)
    assert torch.count_nonzero(results["dA_log"]) == 0
    inputs["A_log"].fill_(80.)
    assert torch.equal(rule.op(**inputs, **problem.op_options)[0], results["o"])


@pytest.mark.parametrize("tokens", [16, 37, 64])
@pytest.mark.parametrize(("rule", "branches"), [(GDN, {}), (KDA, {}), (KDA, {"safe_gate": True})], ids=["gdn", "kda", "kda-safe"])
def test_a_gate_never_reaches_earlier_tokens(device, rule, tokens, branches):
    """The last token's gate changes no bit of earlier outputs, nor of the gradients of a loss over them."""
    problem = rule(lengths=(tokens,), HV=1, states="initial", chunk_size=64, decay="mild", **branches)
    inputs = gdn_inputs(problem, device)
    upstream = gdn_upstream(problem, inputs)
    upstream["o"][:, -1] = 0
    expected = run(rule.op, inputs, upstream, **problem.op_options)
    for last in (-5., -1e-3, 0.):
        inputs["g"][:, -1] = last
        actual = run(rule.op, inputs, upstream, **problem.op_options)
        assert torch.equal(actual["o"][:, :-1], expected["o"][:, :-1])
        assert not torch.equal(actual["o"][:, -1], expected["o"][:, -1])
        for name in ("dq", "dk", "dv", "dg", "dbeta"):
            assert torch.equal(actual[name][:, :-1], expected[name][:, :-1]), name
        assert torch.equal(actual["dh0"], expected["dh0"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("chunk_size", [16, 32, 64])
def test_a_promise_about_the_gate_changes_nothing_but_the_way(device, chunk_size, dtype):
    """safe_gate: within the tolerance of the same recurrence, at the lowest log decay that may be promised."""
    for branches in ({"gate": "raw_bias", "lower_bound": -5.}, {"gate": "external", "decay": -5.}):
        standard_check(KDA(lengths=(70,), chunk_size=chunk_size, dtype=dtype, safe_gate=True, **branches), device)


def test_a_broken_promise_is_found_by_validation(device):
    problem = KDA(lengths=(9,), slack=2, safe_gate=True)
    inputs = gdn_inputs(problem, device)
    inputs["g"][:, 9:] = -9.
    problem.op(**inputs, **problem.op_options, validate=True)
    inputs["g"][:, 4] = -5.1
    with pytest.raises(ValueError, match="^g: .*-5.*safe_gate"):
        problem.op(**inputs, **problem.op_options, validate=True)
