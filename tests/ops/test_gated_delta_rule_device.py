"""The gated delta rule at sizes of real models, against the float64 recurrence on the same device."""

import pytest
import torch

from graphlin.ops.gated_delta_rule import chunk_gated_delta_rule
from tests.inputs import GDN, gdn_inputs
from tests.ops.standard_check import standard_check

pytestmark = pytest.mark.device_only

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
LENGTHS = (300, 0, 129, 64, 18)
MODEL = {"slack": 1, "chunk_size": 64, "gate": "raw_bias", "beta": "sigmoid"}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("K", "V"), [(64, 64), (100, 100), (128, 128), (256, 256), (128, 64), (64, 256), (256, 100),
                                      (16, 16)])
def test_head_sizes(device, K, V, dtype):
    standard_check(GDN(lengths=LENGTHS, H=2, HV=4, K=K, V=V, dtype=dtype, **MODEL), device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("chunk_size", [16, 32])
def test_chunk_sizes(device, chunk_size, dtype):
    model = {**MODEL, "chunk_size": chunk_size}
    standard_check(GDN(lengths=LENGTHS, H=2, HV=4, K=128, V=128, dtype=dtype, **model), device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("branches", [
    {"gate": "external", "beta": "given", "decay": "weak"}, {"gate": "external", "beta": "given", "decay": "strong"},
    {"gate": "external", "beta": "given", "decay": -20.}, {"gate": "external", "beta": "given", "decay": "masked"},
    {"gate": "external", "beta": "given", "keys": "alike", "decay": "weak"}, {"gate": "raw", "beta": "twice_sigmoid"},
    {"gate": "raw_bias", "l2norm": False, "states": "none"}, {"state_v_first": True, "states": "initial"},
], ids=lambda b: "-".join(map(str, b.values())))
def test_branches(device, branches, dtype):
    standard_check(GDN(lengths=LENGTHS, H=2, HV=4, K=128, V=128, dtype=dtype, **{**MODEL, **branches}), device)


@pytest.mark.parametrize("lengths", [(8192,), (4096, 1, 63, 64, 65, 1000, 0, 2903)], ids=str)
def test_long_sequences(device, lengths):
    standard_check(GDN(lengths=lengths, H=4, HV=8, K=128, V=128, dtype=torch.bfloat16, **MODEL), device)


@pytest.mark.parametrize("lengths", [(8192,), (512,), (200, 300, 12, 500, 4, 520, 257, 255)], ids=str)
def test_the_shape_that_peers_are_measured_at(device, lengths):
    """H=16, HV=32, K=V=128, bf16, l2norm in the kernel."""
    model = {**MODEL, "slack": 0}
    standard_check(GDN(lengths=lengths, H=16, HV=32, K=128, V=128, dtype=torch.bfloat16, **model), device)


@pytest.mark.parametrize("K", [64, 100])
def test_strength_and_decay_gradients_on_hopper(device, K):
    """T=1024, H=4, fp16: Triton 3.4 to 3.7.0 gave others wrong dbeta and dg on Hopper."""
    standard_check(GDN(lengths=(1024,), dense=True, H=4, HV=4, K=K, V=K, dtype=torch.float16, chunk_size=64), device)


@pytest.mark.parametrize("tokens", [64, 128, 256])
def test_float32_key_and_strength_gradients_on_hopper(device, tokens):
    standard_check(GDN(lengths=(tokens,), dense=True, H=4, HV=4, K=32, V=32, chunk_size=64), device)


def test_dense_batch_of_a_model(device):
    """B=2, T=1024, H=16, D=64, bf16."""
    standard_check(GDN(lengths=(1024, 1024), dense=True, H=16, HV=16, K=64, V=64, dtype=torch.bfloat16, chunk_size=64),
                   device)


def test_a_value_head_over_the_limit_is_a_clear_error(device):
    """B=4, T=2048, H=4, K=128, V=512, bf16 with h0."""
    problem = GDN(lengths=(2048,) * 4, dense=True, H=4, HV=4, K=128, V=512, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="V: .*256.*512"):
        chunk_gated_delta_rule(**gdn_inputs(problem, device), **problem.options)


def test_as_many_sequences_as_a_grid_axis_holds(device):
    """Dense B·HV = 65,536."""
    standard_check(GDN(lengths=(2,) * 16384, dense=True, H=4, HV=4, K=16, V=16, states="none"), device)
