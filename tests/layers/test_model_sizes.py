"""Layers at sizes that went wrong elsewhere, and a stack of them that must not wait for the device."""

import copy

import pytest
import torch

from graphlin.layers import GatedDeltaNet, gated_delta_net, norm, short_convolution
from graphlin.ops.reference import causal_conv1d_reference, gated_delta_rule_reference, gated_rms_norm_reference
from tests.host_sync import no_host_sync
from tests.inputs import cu_of
from tests.tolerances import assert_close_rms


def make_layer(device, hidden_size, head_dim, chunk_size):
    layer = GatedDeltaNet(hidden_size, expand_v=1, head_dim=head_dim, num_heads=1, chunk_size=chunk_size)
    with torch.no_grad():
        layer.A_log.uniform_(-1, 1)
        layer.dt_bias.uniform_(-1, 1)
    return layer.to(device)


def gradients(output, hidden, layer):
    weights = torch.cos(torch.arange(output.numel(), device=output.device)).view(output.shape).to(output.dtype)
    return torch.autograd.grad(output, [hidden, *layer.parameters()], weights)


def without_chunks(reference):
    def op(*args, chunk_indices, chunk_size, cp_context, **options):
        return reference(*args, **options)
    return op


@pytest.mark.parametrize(("hidden_size", "head_dim", "lengths", "chunk_size"), [
    (20, 80, (3, 0, 21), 16), pytest.param(1000, 256, (100, 28), 64, marks=pytest.mark.device_only),
], ids=["K=80", "K=256"])
def test_wide_heads_in_a_layer_of_odd_width(device, monkeypatch, hidden_size, head_dim, lengths, chunk_size):
    """hidden_size=1000, T=128, K=256 against the layer in float64 on the per-token recurrences; host takes a smaller one."""
    layer, cu = make_layer(device, hidden_size, head_dim, chunk_size), cu_of(lengths, device)
    hidden = torch.randn(1, sum(lengths), hidden_size).to(device).requires_grad_()
    y = layer(hidden, cu)
    found = gradients(y, hidden, layer)
    monkeypatch.setattr(gated_delta_net, "chunk_gated_delta_rule", without_chunks(gated_delta_rule_reference))
    monkeypatch.setattr(short_convolution, "causal_conv1d", without_chunks(causal_conv1d_reference))
    monkeypatch.setattr(norm, "gated_rms_norm", gated_rms_norm_reference)
    judge, hidden64 = copy.deepcopy(layer).double(), hidden.detach().double().requires_grad_()
    expected = judge(hidden64, cu)
    assert_close_rms("o", y, expected, torch.float32)
    names = {"A_log": "dA_log", "dt_bias": "ddt_bias", "a_proj.weight": "dg", "b_proj.weight": "dbeta"}
    for name, gradient, wanted in zip(["hidden", *dict(layer.named_parameters())], found, gradients(expected, hidden64, judge),
                                      strict=True):
        assert_close_rms(names.get(name, "dx"), gradient, wanted, torch.float32)


def test_four_stacked_layers_never_wait_for_the_device(device, monkeypatch):
    """Neither forward nor backward, each layer building its own table."""
    stack = [make_layer(device, 16, 16, 16) for _ in range(4)]
    cu, hidden = cu_of((4, 5), device), torch.randn(1, 9, 16).to(device).requires_grad_()

    def run(layers):
        x = hidden
        for layer in layers:
            x = x + layer(x, cu)
        return torch.autograd.grad(x, [hidden, *(p for layer in layers for p in layer.parameters())], torch.ones_like(x))

    run(stack[:1])                                        # compiles
    with no_host_sync(device, monkeypatch):
        found = run(stack)
    assert len(found) == 1 + 4 * len(list(stack[0].parameters()))
    assert all(x.isfinite().all() and x.any() for x in found)
