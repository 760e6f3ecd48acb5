"""The specification itself: what is known about the delta rule without running it."""

import pytest
import torch

from graphlin.ops.reference import gated_delta_rule_reference
from tests.inputs import GDN, gdn_inputs, gdn_upstream, in_float64, run


def test_orthogonal_keys_store_and_recall_their_values():
    keys = torch.eye(4, dtype=torch.float64)[None, :, None]
    values = torch.randn(1, 4, 1, 3, dtype=torch.float64)
    off = torch.zeros(1, 4, 1, dtype=torch.float64)
    _, state = gated_delta_rule_reference(keys, keys, values, off, off + 1, output_final_state=True)
    torch.testing.assert_close(state[0, 0], values[0, :, 0])
    again = gated_delta_rule_reference(keys.flip(1), keys, values, off, off, 1., state)[0]
    torch.testing.assert_close(again, values.flip(1))


def test_a_second_write_of_a_key_replaces_its_value():
    key = torch.tensor([0.6, 0.8], dtype=torch.float64).expand(1, 2, 1, 2)
    values = torch.tensor([[5.], [7.]], dtype=torch.float64)[None, :, None]
    gates = torch.zeros(1, 2, 1, dtype=torch.float64)
    o, _ = gated_delta_rule_reference(key, key, values, gates, gates + 1, 1.)
    torch.testing.assert_close(o, values)


def test_one_token_in_closed_form():
    """`o = scale (S^T q + beta (k.q) (v - S^T k))` with S the decayed initial state."""
    q, k, v, S = (torch.randn(*shape, dtype=torch.float64) for shape in ((3,), (3,), (2,), (3, 2)))
    g, beta = torch.tensor([[[-0.7]]], dtype=torch.float64), torch.tensor([[[1.3]]], dtype=torch.float64)
    o, state = gated_delta_rule_reference(q[None, None, None], k[None, None, None], v[None, None, None], g, beta, 0.5,
                                          S[None, None], True)
    decayed = g.exp().squeeze() * S
    error = v - k @ decayed
    torch.testing.assert_close(o.squeeze(), 0.5 * (q @ decayed + 1.3 * (k @ q) * error))
    torch.testing.assert_close(state.squeeze(), decayed + 1.3 * torch.outer(k, error))


@pytest.mark.parametrize("state_v_first", [False, True])
def test_packed_sequences_equal_each_alone(state_v_first):
    """Lengths over two segments of the recurrence; inactive rows are 0 and NaN in them reaches nothing."""
    lengths = (70, 0, 3)
    problem = GDN(lengths=lengths, slack=2, H=2, HV=4, K=5, V=3, gate="raw_bias", beta="twice_sigmoid",
                  state_v_first=state_v_first)
    inputs = in_float64(gdn_inputs(problem, torch.device("cpu")))
    upstream = gdn_upstream(problem, inputs)
    for name in ("q", "k", "v", "g", "beta"):
        inputs[name][:, 73:] = float("nan")
    packed = run(gated_delta_rule_reference, inputs, upstream, **problem.options)
    assert all(x.isfinite().all() for x in packed.values())
    assert torch.count_nonzero(packed["o"][:, 73:]) == 0
    torch.testing.assert_close(packed["ht"][1], inputs["initial_state"][1])
    torch.testing.assert_close(packed["dh0"][1], upstream["ht"][1].double())
    for i, first, last in ((0, 0, 70), (2, 70, 73)):
        alone = {name: x[:, first:last] if name in ("q", "k", "v", "g", "beta") else x for name, x in inputs.items()}
        alone["initial_state"] = inputs["initial_state"][i:i + 1]
        del alone["cu_seqlens"]
        its_upstream = {"o": upstream["o"][:, first:last], "ht": upstream["ht"][i:i + 1]}
        expected = run(gated_delta_rule_reference, alone, its_upstream, **problem.options)
        for name in ("o", "dq", "dk", "dv", "dg", "dbeta"):
            torch.testing.assert_close(packed[name][:, first:last], expected[name])
        torch.testing.assert_close(packed["ht"][i], expected["ht"][0])
        torch.testing.assert_close(packed["dh0"][i], expected["dh0"][0])


def test_gradients_equal_finite_differences():
    problem = GDN(lengths=(3, 2), dense=False, H=1, HV=2, K=2, V=2, gate="raw_bias", beta="sigmoid")
    inputs = in_float64(gdn_inputs(problem, torch.device("cpu")))
    cu, names = inputs.pop("cu_seqlens"), list(inputs)

    def function(*leaves):
        return gated_delta_rule_reference(**dict(zip(names, leaves, strict=True)), cu_seqlens=cu, **problem.options)

    assert torch.autograd.gradcheck(function, [inputs[name].requires_grad_() for name in names])
