"""The norm as a module: what it takes for an activation, and that it is the op."""

import pickle

import pytest
import torch

from graphlin.layers.norm import GatedRMSNorm
from graphlin.ops.gated_rms_norm import gated_rms_norm


@pytest.mark.parametrize("activation", ["silu", "swish", "sigmoid"])
def test_the_module_is_the_op(device, activation):
    norm = GatedRMSNorm(24, 1e-3, activation).to(device)
    torch.nn.init.uniform_(norm.weight)
    x, gate = torch.randn(2, 5, 24).to(device), torch.randn(2, 5, 24).to(device)
    assert torch.equal(norm(x, gate), gated_rms_norm(x, norm.weight, gate, 1e-3, activation))
    assert torch.equal(norm(x), gated_rms_norm(x, norm.weight, eps=1e-3))
    assert repr(norm) == f"GatedRMSNorm(24, eps=0.001, {activation})"
    copy = pickle.loads(pickle.dumps(norm))
    assert torch.equal(copy(x, gate), norm(x, gate))


def test_its_state_is_the_weight():
    assert {name: tuple(x.shape) for name, x in GatedRMSNorm(24).state_dict().items()} == {"weight": (24,)}


@pytest.mark.parametrize("activation", [torch.sigmoid, "gelu", None, ["silu"]], ids=["a function", "gelu", "None", "a list"])
def test_another_activation_is_refused_at_construction(activation):
    with pytest.raises(ValueError, match="^activation: expected 'silu', 'swish' or 'sigmoid', found"):
        GatedRMSNorm(24, activation=activation)


def test_a_wrong_eps_is_refused_at_construction():
    with pytest.raises(ValueError, match="^eps: expected a positive number"):
        GatedRMSNorm(24, eps=0.0)
    with pytest.raises(TypeError, match="^eps: expected a Python number, found str"):
        GatedRMSNorm(24, eps="1e-5")


@pytest.mark.parametrize("size", [0, -1, 4097, 24.0, (24,), (2, 12)], ids=str)
def test_a_wrong_size_is_refused_at_construction(size):
    with pytest.raises(ValueError, match="^size: expected an int between 1 and 4096, found"):
        GatedRMSNorm(size)
