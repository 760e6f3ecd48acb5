"""The layers that the shared tests bind: a layer joins them by one entry of LAYER_CASES."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pytest
import torch
from torch.nn import functional as F

from graphlin.layers import GatedDeltaNet, KimiDeltaAttention
from graphlin.ops import reference

SIZES = {"hidden_size": 24, "head_dim": 16, "num_heads": 1, "num_v_heads": 2, "expand_v": 1, "chunk_size": 16}
ODD_SIZES = {"hidden_size": 25, "head_dim": 12, "expand_v": 1.5, "conv_bias": True, "conv_size": 3}


@dataclass(frozen=True)
class LayerCase:
    """A layer, its formula's own parts on parameters `p` by name, and the options under which it is tested."""

    name: str
    layer: type[torch.nn.Module]
    rule: Callable[..., tuple]         # the per-token recurrence
    gate: Callable[..., torch.Tensor]  # (layer, p, hidden) -> the recurrence's raw g
    output_gate: Callable[..., torch.Tensor]  # (layer, p, hidden) -> the factor of the normalised output
    rule_options: Callable[..., dict]
    variants: Mapping[str, dict]

    def make(self, device, dtype=torch.float32, **options):
        """A layer whose gate and norm are away from their symmetric start, so that a wrong one shows."""
        layer = self.layer(**{**SIZES, **options})
        with torch.no_grad():
            layer.A_log.uniform_(-1, 1)
            layer.dt_bias.uniform_(-1, 1)
            layer.o_norm.weight.uniform_(0.5, 1.5)
        return layer.to(device, dtype)

    def reference(self, layer, p, hidden, cu, states):
        """The layer written out on float64 parameters `p`, by the per-token reference ops."""
        delta_state, *conv_states = states
        mixed, last_inputs = [], []
        for i, name in enumerate("qkv"):
            x = hidden @ p[f"{name}_proj.weight"].T
            if layer.use_short_conv:
                x, last = reference.causal_conv1d_reference(
                    x, p[f"{name}_conv1d.weight"][:, 0], p.get(f"{name}_conv1d.bias"), initial_state=conv_states[i],
                    output_final_state=True, activation="silu", cu_seqlens=cu)
                last_inputs.append(last)
            else:
                x = F.silu(x)
            mixed.append(x.unflatten(-1, (-1, layer.head_v_dim if name == "v" else layer.head_k_dim)))
        o, delta_state = self.rule(
            *mixed, self.gate(layer, p, hidden), hidden @ p["b_proj.weight"].T, initial_state=delta_state,
            output_final_state=True, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, A_log=p["A_log"],
            dt_bias=p["dt_bias"], use_beta_sigmoid_in_kernel=True, allow_neg_eigval=layer.allow_neg_eigval, cu_seqlens=cu,
            **self.rule_options(layer))
        o = o / (o.square().mean(-1, keepdim=True) + 1e-5).sqrt() * p["o_norm.weight"]
        return (o.flatten(-2) * self.output_gate(layer, p, hidden)) @ p["o_proj.weight"].T, (delta_state, *last_inputs)


def _gdn_gate(layer, p, hidden):
    return hidden @ p["a_proj.weight"].T


def _gdn_output_gate(layer, p, hidden):
    return F.silu(hidden @ p["g_proj.weight"].T) if layer.use_gate else 1


def _kda_gate(layer, p, hidden):
    return (hidden @ p["f_proj.0.weight"].T @ p["f_proj.1.weight"].T).unflatten(-1, (layer.num_v_heads, layer.head_k_dim))


def _kda_output_gate(layer, p, hidden):
    return torch.sigmoid(hidden @ p["g_proj.0.weight"].T @ p["g_proj.1.weight"].T + p["g_proj.1.bias"])


GDN = LayerCase(
    "gdn", GatedDeltaNet, reference.gated_delta_rule_reference, _gdn_gate, _gdn_output_gate, lambda layer: {},
    variants={"plain": {}, "odd sizes, bias": ODD_SIZES,
              "no gate, no convolution": {"use_gate": False, "use_short_conv": False, "allow_neg_eigval": True}})
KDA = LayerCase(
    "kda", KimiDeltaAttention, reference.kda_reference, _kda_gate, _kda_output_gate,
    lambda layer: {"lower_bound": layer.lower_bound},
    variants={"plain": {}, "odd sizes, bias, bounded": {**ODD_SIZES, "lower_bound": -2.5},
              "no convolution, safe": {"use_short_conv": False, "allow_neg_eigval": True, "lower_bound": -5.0,
                                       "safe_gate": True}})
LAYER_CASES = [GDN, KDA]

each_layer = pytest.mark.parametrize("case", LAYER_CASES, ids=lambda case: case.name)
each_variant = pytest.mark.parametrize(("case", "options"), [
    pytest.param(case, options, id=f"{case.name}, {name}") for case in LAYER_CASES for name, options in case.variants.items()])
