"""The delta rules' standard check: outputs and every gradient against the float64 recurrence."""

from collections.abc import Callable

import torch

from tests.inputs import GDN, gdn_inputs, gdn_upstream, in_float64, run
from tests.tolerances import ALIKE_KEYS_BF16, assert_close_rms


def standard_check(problem: GDN, device: torch.device, inputs: dict | None = None, op: Callable | None = None) -> dict:
    """Checks values and dtypes of one run; returns the results. `inputs` replaces the random ones, `op` the problem's with its
    options, as a captured block that has them does."""
    inputs = gdn_inputs(problem, device) if inputs is None else inputs
    upstream = gdn_upstream(problem, inputs)
    actual = run(op, inputs, upstream) if op else run(problem.op, inputs, upstream, **problem.op_options)
    expected = run(problem.reference, in_float64(inputs), upstream, **problem.options)
    assert actual.keys() == expected.keys()
    amplified = ALIKE_KEYS_BF16 if problem.keys == "alike" and problem.dtype == torch.bfloat16 else 1.
    for name, x in expected.items():
        argument = {"o": "v", "dh0": "initial_state"}.get(name, name[1:])
        assert actual[name].dtype == (torch.float32 if name == "ht" else inputs[argument].dtype), name
        assert_close_rms(name, actual[name], x, problem.dtype, amplified)
    return actual
