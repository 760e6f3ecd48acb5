"""Wrong arguments name the argument, what was expected and what was found; wrong values never leave the tensors."""

import pytest
import torch

from graphlin.ops.causal_conv1d import causal_conv1d
from tests.inputs import cu_of, guarded, memory_of, run
from tests.ops.conv_check import Conv, conv_inputs, conv_upstream

PROBLEM = Conv(lengths=(12, 4), D=6)
WRONG = [
    ({"x": torch.zeros(16, 6)}, ValueError, r"^x: .*\[B, T, D\].*\[16, 6\]"),
    ({"x": [1.0]}, TypeError, "^x: .*list"),
    ({"x": torch.zeros(1, 16, 6, dtype=torch.float64)}, ValueError, "^x: .*float64"),
    ({"x": torch.zeros(2, 8, 6)}, ValueError, "^x: .*batch 1.*batch 2"),
    ({"weight": torch.zeros(5, 4)}, ValueError, r"^weight: .*\[6, W\].*\[5, 4\]"),
    ({"weight": torch.zeros(6, 1, 4)}, ValueError, r"^weight: .*\[6, W\].*\[6, 1, 4\]"),
    ({"weight": torch.zeros(6, 9)}, ValueError, "^weight: .*1 and 8.*9"),
    ({"weight": torch.zeros(6, 0)}, ValueError, "^weight: .*1 and 8.*0"),
    ({"weight": None}, TypeError, "^weight: .*NoneType"),
    ({"weight": torch.zeros(6, 4, dtype=torch.int32)}, ValueError, "^weight: .*int32"),
    ({"bias": torch.zeros(1)}, ValueError, r"^bias: .*\[6\].*\[1\]"),
    ({"bias": 0.0}, TypeError, "^bias: .*float"),
    ({"residual": torch.zeros(1, 15, 6)}, ValueError, r"^residual: .*\[1, 16, 6\].*\[1, 15, 6\]"),
    ({"initial_state": torch.zeros(2, 4, 6)}, ValueError, r"^initial_state: .*\[2, 6, 4\].*\[2, 4, 6\]"),
    ({"initial_state": torch.zeros(3, 6, 4)}, ValueError, r"^initial_state: .*\[2, 6, 4\].*\[3, 6, 4\]"),
    ({"initial_state": torch.zeros(2, 6, 4, dtype=torch.int64)}, ValueError, "^initial_state: .*int64"),
    ({"activation": "gelu"}, ValueError, "^activation: .*silu.*'gelu'"),
    ({"activation": True}, ValueError, "^activation: .*silu.*True"),
    ({"cu_seqlens": torch.tensor([0., 16.])}, ValueError, "^cu_seqlens: .*float32"),
    ({"cu_seqlens": torch.tensor([0])}, ValueError, "^cu_seqlens: .*1"),
    ({"chunk_size": 48}, ValueError, "^chunk_size: .*64.*48"),
    ({"chunk_indices": torch.zeros(1, 2, dtype=torch.int32)}, ValueError, "^chunk_indices: .*1"),
    ({"graph_capture": "yes"}, TypeError, "^graph_capture: .*yes"),
    ({"seq_idx": None}, TypeError, "seq_idx"),
]


def call(device, **changes):
    arguments = {**conv_inputs(PROBLEM, device), **PROBLEM.options, "chunk_size": 16, **changes}
    moved = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}
    return causal_conv1d(**moved)


@pytest.mark.parametrize(("changes", "error", "message"), WRONG,
                         ids=[f"{i}-{next(iter(case[0]))}" for i, case in enumerate(WRONG)])
def test_a_wrong_argument_is_named(device, changes, error, message):
    with pytest.raises(error, match=message):
        call(device, **changes)


def test_nothing_is_lost_after_an_error(device):
    expected, _ = call(device)
    with pytest.raises(ValueError, match="^activation"):
        call(device, activation="gelu")
    assert torch.equal(call(device)[0], expected)


@pytest.mark.parametrize("name", ["weight", "bias", "residual", "initial_state", "cu_seqlens"])
def test_an_argument_on_another_device_is_named(device, name):
    arguments = conv_inputs(PROBLEM, device)
    arguments[name] = arguments[name].to("meta")
    with pytest.raises(ValueError, match=f"^{name}: .*device"):
        causal_conv1d(**arguments)


def test_more_than_one_batch_row_with_cu_seqlens(device):
    """x `[2,1024,768]` with `cu=[0,1024,2048]`."""
    x, weight = torch.zeros(2, 1024, 768, device=device), torch.zeros(768, 4, device=device)
    with pytest.raises(ValueError, match="^x: .*batch 1.*batch 2"):
        causal_conv1d(x, weight, cu_seqlens=cu_of((1024, 1024), device))


def test_validate_names_the_wrong_value(device):
    cu = torch.tensor([0, 12, 8, 16], dtype=torch.int32, device=device)
    state = torch.zeros(3, 6, 4)
    for options in ({"validate": True}, {"graph_capture": False}):
        with pytest.raises(ValueError, match="^cu_seqlens: .*decrease.*12.*8"):
            call(device, cu_seqlens=cu, initial_state=state, **options)


@pytest.mark.parametrize("values", [(0, 12, 8, 16), (0, 40, 200, 3), (-9, 3, 70, 16), (16, 0, -1, 90)], ids=str)
def test_wrong_values_never_touch_memory_outside(device, values):
    """`cu=[0,12,8,16]`. Every tensor lies between NaN guards; what is read outside would show as NaN in the
    sequences that are clamped into the tensor, what is written outside would change the guards."""
    problem = Conv(lengths=(16, 0, 0), D=6)
    drawn = conv_inputs(problem, device)
    cu = torch.tensor((0, *values, 0), dtype=torch.int32, device=device)[1:-1]
    inputs = {name: guarded(x) for name, x in drawn.items() if name != "cu_seqlens"}
    memory = {name: memory_of(x) for name, x in inputs.items()}
    before = {name: x.clone() for name, x in memory.items()}
    upstream = {name: guarded(x) for name, x in conv_upstream(problem, drawn).items()}
    results = run(causal_conv1d, {**inputs, "cu_seqlens": cu}, upstream, chunk_size=16, **problem.options)
    for name in ("o", "ht", "dh0"):
        assert results[name].isfinite().all(), name
    for name, x in memory.items():
        assert torch.equal(x, before[name]), f"the memory of {name} was written"
