"""Names, shapes, order and start values of the layers' parameters: those of flash-linear-attention 0.6."""

import pytest
import torch
from torch.nn import functional as F

from graphlin.layers import GatedDeltaNet, KimiDeltaAttention
from tests.layers.layer_cases import SIZES, each_layer

CONVOLUTIONS = {
    "q_conv1d.weight": (192, 1, 4), "q_conv1d.bias": (192,), "k_conv1d.weight": (192, 1, 4), "k_conv1d.bias": (192,),
    "v_conv1d.weight": (768, 1, 4), "v_conv1d.bias": (768,),
}
PROJECTIONS = {"q_proj.weight": (192, 1000), "k_proj.weight": (192, 1000), "v_proj.weight": (768, 1000)}
OUTPUT = {"o_norm.weight": (128,), "o_proj.weight": (1000, 768)}
# Of layers with hidden_size=1000, expand_v=2, head_dim=64, num_heads=3, num_v_heads=6, conv_bias=True.
FLA_PARAMETERS = {
    GatedDeltaNet: {
        "A_log": (6,), "dt_bias": (6,), **PROJECTIONS, "a_proj.weight": (6, 1000), "b_proj.weight": (6, 1000),
        **CONVOLUTIONS, "g_proj.weight": (768, 1000), **OUTPUT},
    KimiDeltaAttention: {
        "A_log": (6,), "dt_bias": (384,), **PROJECTIONS, **CONVOLUTIONS,
        "f_proj.0.weight": (128, 1000), "f_proj.1.weight": (384, 128), "b_proj.weight": (6, 1000),
        "g_proj.0.weight": (128, 1000), "g_proj.1.weight": (768, 128), "g_proj.1.bias": (768,), **OUTPUT},
}


@pytest.mark.parametrize(("layer", "shapes"), FLA_PARAMETERS.items(), ids=lambda x: getattr(x, "__name__", ""))
def test_parameters_are_those_of_flash_linear_attention(layer, shapes):
    layer = layer(hidden_size=1000, expand_v=2, head_dim=64, num_heads=3, num_v_heads=6, conv_bias=True)
    # The order too: an optimiser's state knows its parameters by their place.
    assert [(name, tuple(p.shape)) for name, p in layer.named_parameters()] == list(shapes.items())
    checkpoint = {name: torch.randn(shape) for name, shape in shapes.items()}
    layer.load_state_dict(checkpoint)
    for name, p in layer.named_parameters():
        assert torch.equal(p, checkpoint[name]), name


@pytest.mark.parametrize(("layer", "expected"), [
    (GatedDeltaNet, {"q_proj.weight": (1536, 2048), "v_conv1d.weight": (3072, 1, 4), "dt_bias": (6,),
                     "o_proj.weight": (2048, 3072)}),
    (KimiDeltaAttention, {"q_proj.weight": (2048, 2048), "v_conv1d.weight": (2048, 1, 4), "dt_bias": (2048,),
                          "f_proj.1.weight": (2048, 128), "o_proj.weight": (2048, 2048)}),
], ids=lambda x: getattr(x, "__name__", ""))
def test_default_sizes_are_those_of_flash_linear_attention(layer, expected):
    with torch.device("meta"):
        layer = layer()
    shapes = {name: tuple(p.shape) for name, p in layer.named_parameters()}
    assert {name: shapes[name] for name in expected} == expected
    assert not any(name.endswith("conv1d.bias") for name in shapes)
    assert layer.o_norm.eps == 1e-5


@pytest.mark.parametrize(("layer", "lowest"), [
    (GatedDeltaNet(hidden_size=8, head_dim=1, num_heads=500, expand_v=1), 0),
    (KimiDeltaAttention(hidden_size=8, head_dim=1, num_heads=500), 1),
    (KimiDeltaAttention(hidden_size=8, head_dim=1, num_heads=500, lower_bound=-5.0), 1),
], ids=["gdn", "kda", "kda, bounded"])
def test_gate_starts_in_its_range(layer, lowest):
    decay, step = layer.A_log.exp(), F.softplus(layer.dt_bias)
    assert lowest * 0.999 <= decay.min() < lowest + 1 and 15 < decay.max() <= 16 * 1.001
    assert 1e-3 * 0.999 <= step.min() < 1.1e-3 and 9e-2 < step.max() <= 1e-1 * 1.001
    assert torch.equal(layer.o_norm.weight, torch.ones(1))


def test_safe_gate_starts_at_rate_one():
    layer = KimiDeltaAttention(**SIZES, lower_bound=-5.0, safe_gate=True)
    assert torch.equal(layer.A_log, torch.zeros(2))


@each_layer
def test_the_gate_is_marked_against_weight_decay(case):
    layer = case.layer(**SIZES)
    marked = {name for name, p in layer.named_parameters() if getattr(p, "_no_weight_decay", False)}
    assert marked == {"A_log", "dt_bias"}


@each_layer
@pytest.mark.parametrize(("options", "message"), [
    ({"num_heads": 2, "num_v_heads": 3}, "num_v_heads: expected a multiple of num_heads=2, found 3"),
    ({"head_dim": 10, "expand_v": 1.25}, "expand_v: expected head_dim"),
])
def test_wrong_sizes_are_named(case, options, message):
    with pytest.raises(ValueError, match=message):
        case.layer(**{**SIZES, **options})


def test_a_promise_that_nothing_keeps_is_refused():
    with pytest.raises(ValueError, match="safe_gate: expected a lower_bound"):
        KimiDeltaAttention(**SIZES, safe_gate=True)


def test_a_bound_out_of_range_is_named(device):
    layer = KimiDeltaAttention(**SIZES, lower_bound=-6.0).to(device)
    with pytest.raises(ValueError, match="lower_bound: expected"):
        layer(torch.randn(1, 4, SIZES["hidden_size"], device=device))
