"""The delta rules at sizes of real models, against the float64 recurrence on the same device."""

import pytest
import torch

from tests.inputs import KDA, each_rule, gdn_inputs
from tests.ops.standard_check import standard_check

pytestmark = pytest.mark.device_only

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
LENGTHS = (300, 0, 129, 64, 18)
MODEL = {"slack": 1, "chunk_size": 64, "gate": "raw_bias", "beta": "sigmoid"}


@each_rule
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("K", "V"), [(64, 64), (100, 100), (128, 128), (256, 256), (128, 64), (64, 256), (256, 100),
                                      (16, 16)])
def test_head_sizes(device, rule, K, V, dtype):
    standard_check(rule(lengths=LENGTHS, H=2, HV=4, K=K, V=V, dtype=dtype, **MODEL), device)


@each_rule
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("chunk_size", [16, 32])
def test_chunk_sizes(device, rule, chunk_size, dtype):
    model = {**MODEL, "chunk_size": chunk_size}
    standard_check(rule(lengths=LENGTHS, H=2, HV=4, K=128, V=128, dtype=dtype, **model), device)


@each_rule
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("branches", [
    {"gate": "external", "beta": "given", "decay": "weak"}, {"gate": "external", "beta": "given", "decay": "strong"},
    {"gate": "external", "beta": "given", "decay": -20.}, {"gate": "external", "beta": "given", "decay": "masked"},
    {"gate": "external", "beta": "given", "keys": "alike", "decay": "weak"}, {"gate": "raw", "beta": "twice_sigmoid"},
    {"gate": "raw_bias", "l2norm": False, "states": "none"}, {"state_v_first": True, "states": "initial"},
], ids=lambda b: "-".join(map(str, b.values())))
def test_branches(device, rule, branches, dtype):
    standard_check(rule(lengths=LENGTHS, H=2, HV=4, K=128, V=128, dtype=dtype, **{**MODEL, **branches}), device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("branches", [
    {"lower_bound": -5.}, {"lower_bound": -5., "safe_gate": True}, {"lower_bound": -5., "rate": False, "gate": "raw"},
    {"lower_bound": -2.5, "safe_gate": True, "beta": "twice_sigmoid", "states": "none"},
    {"gate": "external", "safe_gate": True, "beta": "given"}, *({"gate": "external", "decay": g} for g in (-2.5, -5., -5.9, -6.)),
], ids=lambda b: "-".join(map(str, b.values())))
def test_branches_of_channel_gates(device, branches, dtype):
    standard_check(KDA(lengths=LENGTHS, H=2, HV=4, K=128, V=128, dtype=dtype, **{**MODEL, **branches}), device)


@pytest.mark.parametrize("branches", [{}, {"safe_gate": True}, {"safe_gate": True, "lower_bound": -5.}], ids=str)
def test_channel_gates_of_long_sequences(device, branches):
    """T=8192; H=2, T=1024 with saturated gates under lower_bound -5, and slack that is saturated too."""
    standard_check(KDA(lengths=(8192,), H=4, HV=8, K=128, V=128, dtype=torch.bfloat16,
                       **{**MODEL, "lower_bound": -5., **branches}), device)
    problem = KDA(lengths=(1024,), slack=64, H=2, HV=2, K=128, V=128, dtype=torch.bfloat16, chunk_size=64, gate="raw_bias",
                  **{"lower_bound": -5., **branches})
    inputs = gdn_inputs(problem, device)
    inputs["g"] = 50 * inputs["g"].sign()
    standard_check(problem, device, inputs)


def test_a_small_model_of_channel_gates(device):
    """H=16, HV=32, D=128, T=256, bf16."""
    standard_check(KDA(lengths=(256,), dense=True, H=16, HV=32, K=128, V=128, dtype=torch.bfloat16, chunk_size=64), device)


@each_rule
@pytest.mark.parametrize("lengths", [(8192,), (4096, 1, 63, 64, 65, 1000, 0, 2903)], ids=str)
def test_long_sequences(device, rule, lengths):
    standard_check(rule(lengths=lengths, H=4, HV=8, K=128, V=128, dtype=torch.bfloat16, **MODEL), device)


@each_rule
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_long_sequences_in_other_dtypes(device, rule, dtype):
    standard_check(rule(lengths=(8192,), H=1, HV=2, K=64, V=64, dtype=dtype, **MODEL), device)


@each_rule
@pytest.mark.parametrize("lengths", [(8192,), (512,), (200, 300, 12, 500, 4, 520, 257, 255)], ids=str)
def test_the_shape_that_peers_are_measured_at(device, rule, lengths):
    """H=16, HV=32, K=V=128, bf16, l2norm in the kernel."""
    model = {**MODEL, "slack": 0}
    standard_check(rule(lengths=lengths, H=16, HV=32, K=128, V=128, dtype=torch.bfloat16, **model), device)


@each_rule
@pytest.mark.parametrize("K", [64, 100])
def test_strength_and_decay_gradients_on_hopper(device, rule, K):
    """T=1024, H=4, fp16: Triton 3.4 to 3.7.0 gave others wrong dbeta and dg on Hopper."""
    standard_check(rule(lengths=(1024,), dense=True, H=4, HV=4, K=K, V=K, dtype=torch.float16, chunk_size=64), device)


@each_rule
@pytest.mark.parametrize("tokens", [64, 128, 256])
def test_float32_key_and_strength_gradients_on_hopper(device, rule, tokens):
    standard_check(rule(lengths=(tokens,), dense=True, H=4, HV=4, K=32, V=32, chunk_size=64), device)


@each_rule
def test_dense_batch_of_a_model(device, rule):
    """B=2, T=1024, H=16, D=64, bf16."""
    standard_check(rule(lengths=(1024, 1024), dense=True, H=16, HV=16, K=64, V=64, dtype=torch.bfloat16, chunk_size=64),
                   device)


@each_rule
def test_a_value_head_over_the_limit_is_a_clear_error(device, rule):
    """B=4, T=2048, H=4, K=128, V=512, bf16 with h0."""
    problem = rule(lengths=(2048,) * 4, dense=True, H=4, HV=4, K=128, V=512, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="V: .*256.*512"):
        rule.op(**gdn_inputs(problem, device), **problem.options)


@each_rule
def test_as_many_sequences_as_a_grid_axis_holds(device, rule):
    """Dense B·HV = 65,536."""
    standard_check(rule(lengths=(2,) * 16384, dense=True, H=4, HV=4, K=16, V=16, states="none"), device)
