"""Layers over a batch split over processes, states in and out, as one process computes them in float64."""

from functools import partial

import pytest
import torch
import torch.distributed as dist

from tests.inputs import cu_of
from tests.layers.layer_cases import LAYER_CASES, LayerCase
from tests.parallel.layouts import Layout
from tests.parallel.world import assert_fine, run_world
from tests.tolerances import assert_close_rms

LAYOUT = Layout("crossing", (7, 20, 4), (17,))


def draw(layer: torch.nn.Module, device: torch.device) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
    """Hidden states of the whole batch, initial states of all sequences, and the output's gradient."""
    torch.manual_seed(1)
    tokens, seqs = sum(LAYOUT.lengths), len(LAYOUT.lengths)
    shapes = [(seqs, layer.num_v_heads, layer.head_k_dim, layer.head_v_dim), *[(seqs, layer.key_dim, 4)] * 2,
              (seqs, layer.value_dim, 4)]
    return (torch.randn(1, tokens, layer.hidden_size, device=device), [torch.randn(shape, device=device) for shape in shapes],
            torch.randn(1, tokens, layer.hidden_size, device=device))


def check(case: LayerCase, rank: int, device: torch.device) -> None:
    torch.manual_seed(0)
    layer = case.make(device)
    hidden, states, grad = draw(layer, device)
    parameters = dict(layer.named_parameters())
    y_all, states_all, grads_all = expected_results(case, layer, hidden, states, grad)
    first, last = LAYOUT.offsets[rank:rank + 2]
    own = torch.nn.functional.pad(hidden[:, first:last], (0, 0, 0, 3), value=float("nan"))
    y, found_states = layer(own, initial_state=tuple(states), output_final_state=True, cp_context=LAYOUT.context(device))
    found = torch.autograd.grad([y[:, :last - first], *found_states], list(parameters.values()),
                                [grad[:, first:last], *map(torch.ones_like, found_states)])
    for x in found:
        dist.all_reduce(x)
    mine = torch.tensor([owner == rank for owner in LAYOUT.ends()], device=device)
    assert_close_rms("o", y[:, :last - first], y_all[:, first:last], torch.float32)
    for name, x, e in zip(("ht", "final", "final", "final"), found_states, states_all, strict=True):
        assert not x[~mine].any()
        assert_close_rms(name, x[mine], e[mine], torch.float32)
    for name, x in zip(parameters, found, strict=True):
        assert_close_rms("dA_log", x, grads_all[name], torch.float32, amplified=2)


def expected_results(case: LayerCase, layer: torch.nn.Module, hidden: torch.Tensor, initial: list[torch.Tensor],
                     grad: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor], dict[str, torch.Tensor]]:
    """Output, final states and the gradients of all parameters, of one process in float64."""
    p = {name: x.detach().double().requires_grad_() for name, x in layer.named_parameters()}
    y, states = case.reference(layer, p, hidden.double(), cu_of(LAYOUT.lengths, hidden.device), [s.double() for s in initial])
    grads = torch.autograd.grad([y, *states], list(p.values()), [grad.double(), *map(torch.ones_like, states)])
    return y.detach(), [s.detach() for s in states], dict(zip(p, grads, strict=True))


def checks(world: int) -> dict:
    return {case.name: partial(check, case) for case in LAYER_CASES}


@pytest.fixture(scope="module")
def told(devices, tmp_path_factory):
    return run_world(2, checks, tmp_path_factory.mktemp("world"), *devices)


@pytest.mark.parametrize("name", [case.name for case in LAYER_CASES])
def test_layers(told, name):
    assert_fine(told, name)
