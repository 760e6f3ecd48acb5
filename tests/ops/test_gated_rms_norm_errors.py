"""Wrong arguments of the norm name the argument, what was expected and what was found."""

import pytest
import torch

from graphlin.ops.gated_rms_norm import gated_rms_norm
from tests.ops.norm_check import Norm, norm_inputs

WRONG = [
    ({"x": [1.0]}, TypeError, "^x: .*list"),
    ({"x": torch.zeros(2, 21, 24).to_sparse()}, ValueError, "^x: .*dense.*layout sparse_coo"),
    ({"gate": torch.nested.nested_tensor([torch.zeros(21, 24)], layout=torch.jagged)}, ValueError, "^gate: .*dense.*nested"),
    ({"x": torch.tensor(1.0)}, ValueError, r"^x: .*\[\.\.\., D\].*\[\]"),
    ({"x": torch.zeros(3, 0)}, ValueError, r"^x: .*1 and 4096.*\[3, 0\]"),
    ({"x": torch.zeros(3, 4097)}, ValueError, r"^x: .*1 and 4096.*\[3, 4097\]"),
    ({"x": torch.zeros(2, 21, 24, dtype=torch.float64)}, ValueError, "^x: .*float64"),
    ({"weight": torch.ones(23)}, ValueError, r"^weight: .*\[24\].*\[23\]"),
    ({"weight": torch.ones(1, 24)}, ValueError, r"^weight: .*\[24\].*\[1, 24\]"),
    ({"weight": torch.ones(24, dtype=torch.int32)}, ValueError, "^weight: .*int32"),
    ({"weight": None}, TypeError, "^weight: .*NoneType"),
    ({"gate": torch.zeros(2, 21, 1)}, ValueError, r"^gate: .*\[2, 21, 24\].*\[2, 21, 1\]"),
    ({"gate": torch.zeros(2, 21, 24, dtype=torch.float64)}, ValueError, "^gate: .*float64"),
    ({"gate": 1.0}, TypeError, "^gate: .*float"),
    ({"eps": 0.0}, ValueError, "^eps: .*positive.*0.0"),
    ({"eps": 1e-39}, ValueError, "^eps: .*at least 1.2e-38.*1e-39"),
    ({"eps": float("nan")}, ValueError, "^eps: .*positive.*nan"),
    ({"eps": float("inf")}, ValueError, "^eps: .*positive.*inf"),
    ({"eps": 1e39}, ValueError, r"^eps: .*at most 3.4e.*1e\+39"),
    ({"eps": 10 ** 400}, ValueError, "^eps: .*at most 3.4e.*1000"),
    ({"eps": torch.tensor(1e-5)}, TypeError, "^eps: .*Tensor"),
    ({"activation": "gelu"}, ValueError, "^activation: .*silu.*'gelu'"),
    ({"activation": None}, ValueError, "^activation: .*silu.*None"),
]


@pytest.mark.parametrize(("changes", "error", "message"), WRONG,
                         ids=[f"{i}-{next(iter(case[0]))}" for i, case in enumerate(WRONG)])
def test_a_wrong_argument_is_named(device, changes, error, message):
    arguments = {**norm_inputs(Norm(), device), **changes}
    del arguments["dy"]
    moved = {name: x.to(device) if isinstance(x, torch.Tensor) and name != "eps" else x for name, x in arguments.items()}
    with pytest.raises(error, match=message):
        gated_rms_norm(**moved)


@pytest.mark.parametrize("name", ["weight", "gate"])
def test_an_argument_on_another_device_is_named(device, name):
    arguments = norm_inputs(Norm(), device)
    del arguments["dy"]
    arguments[name] = arguments[name].to("meta")
    with pytest.raises(ValueError, match=f"^{name}: .*device"):
        gated_rms_norm(**arguments)
