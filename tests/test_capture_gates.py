"""Every gate of Kimi Delta Attention in a captured block, replayed for packs that change."""

from functools import partial

import pytest
import torch
from torch import nn

from graphlin.capture import capture
from graphlin.ops.kda import chunk_kda
from graphlin.tier import Tier
from tests.blocks import captured
from tests.inputs import cu_of

TIER = Tier(tokens=24, seqs=3, chunk_size=16)
PACKS = [(5, 18), (24,), (1, 0, 16), (0, 7), (9, 2, 11)]
K = V = 16
IN_KERNEL = {"use_gate_in_kernel": True}
GATES = {
    "given": ((), {}),
    "given, safe": ((), {"safe_gate": True}),
    "softplus": (("A_log",), IN_KERNEL),
    "softplus, bias": (("A_log", "dt_bias"), IN_KERNEL),
    "bounded": ((), {**IN_KERNEL, "lower_bound": -5.0}),
    "bounded, rate and bias": (("A_log", "dt_bias"), {**IN_KERNEL, "lower_bound": -2.5}),
    "bounded, safe": (("A_log", "dt_bias"), {**IN_KERNEL, "lower_bound": -5.0, "safe_gate": True}),
}


class Attention(nn.Module):
    """One call of the op, the gate's parameters beside it."""

    def __init__(self, parameters, options):
        super().__init__()
        for name in parameters:
            self.register_parameter(name, nn.Parameter(torch.randn({"A_log": 1, "dt_bias": K}[name])))
        self.op = partial(chunk_kda, use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True, **options)

    def forward(self, q, k, v, g, beta, initial_state, cu_seqlens, chunk_indices=None):
        return self.op(q, k, v, g, beta, initial_state=initial_state, output_final_state=True, cu_seqlens=cu_seqlens,
                       chunk_indices=chunk_indices, chunk_size=TIER.chunk_size, **dict(self.named_parameters()))


def draw(lengths, given, device):
    """q, k, v, g, beta and the initial state; a given g is a log decay of at least -5, the least that safe_gate promises."""
    shapes = ((1, K), (1, K), (1, V), (1, K), (1,))
    q, k, v, g, beta = (torch.randn(1, sum(lengths), *shape) for shape in shapes)
    g = -5 * g.sigmoid() if given else 3 * g
    tensors = (q, k, v, g, beta, torch.randn(len(lengths), 1, K, V))
    return [x.to(device).requires_grad_() for x in tensors]


def results(block, inputs, cu, parameters):
    """Outputs, and the gradients of all inputs and parameters."""
    outputs = block(*inputs, cu_seqlens=cu)
    loss = sum((x * torch.cos(torch.arange(x.numel(), device=x.device)).view(x.shape)).sum() for x in outputs)
    return [*outputs, *torch.autograd.grad(loss, [*inputs, *parameters])]


@pytest.mark.parametrize(("parameters", "options"), GATES.values(), ids=GATES)
def test_every_gate_is_replayed_and_equals_eager_bit_for_bit(device, parameters, options):
    block = Attention(parameters, options).to(device)
    graphed = capture(block, TIER, num_warmup_iters=1)
    for lengths in PACKS:
        inputs, cu = draw(lengths, "use_gate_in_kernel" not in options, device), cu_of(lengths, device)
        found, expected = (results(f, inputs, cu, list(block.parameters())) for f in (graphed, block))
        assert len(found) == 8 + len(parameters)
        for i, (f, e) in enumerate(zip(found, expected, strict=True)):
            assert f.isfinite().all() and torch.equal(f, e), f"result {i} at lengths {lengths}"
        assert found[5].any(), "no gradient reached the gate"
    captured(graphed, len(PACKS), backwards=len(PACKS))
