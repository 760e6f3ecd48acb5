"""Calls of another structure than the one that was captured first."""

import pytest
import torch

from graphlin.capture import capture
from graphlin.layers import GatedDeltaNet
from graphlin.tier import Tier
from tests.blocks import captured, pack

pytestmark = pytest.mark.raw_memory


def test_states_may_come_after_a_capture_without_them(device):
    """Warmed up and captured on a sample without an initial state; a call with one is eager, and the capture still works."""
    layer = GatedDeltaNet(hidden_size=16, head_dim=16, num_heads=1, expand_v=1, chunk_size=16).to(device)
    x, cu = pack((9, 7), device, width=16)
    with torch.no_grad():
        graphed = capture(layer, Tier(tokens=16, seqs=2, chunk_size=16), (x, cu), num_warmup_iters=1)
        plain, (_, states) = layer(x, cu), layer(x, cu, output_final_state=True)
        expected, expected_states = layer(x, cu, initial_state=states, output_final_state=True)
        found, found_states = graphed(x, cu, initial_state=states, output_final_state=True)
        assert torch.equal(found, expected)
        for ours, theirs in zip(found_states, expected_states, strict=True):
            assert torch.equal(ours, theirs)
        assert torch.equal(graphed(x, cu), plain)
    captured(graphed, 1, StructureMismatch=1)
