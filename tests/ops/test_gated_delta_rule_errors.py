"""Wrong arguments name the argument, what was expected and what was found; wrong values never leave the tensors."""

import pytest
import torch

from tests.inputs import GDN, KDA, cu_of, each_rule, gdn_inputs, guarded, memory_of, run

PROBLEM = GDN(lengths=(12, 4), H=2, HV=4, gate="raw_bias")
WRONG = [
    ({"q": torch.zeros(16, 2, 16)}, ValueError, r"^q: .*\[B, T, H, K\].*\[16, 2, 16\]"),
    ({"q": [1.0]}, TypeError, "^q: .*list"),
    ({"q": torch.zeros(1, 16, 2, 16, dtype=torch.float64)}, (TypeError, ValueError), "^q: .*float64"),
    ({"k": torch.zeros(1, 16, 2, 15)}, ValueError, r"^k: .*\[1, 16, 2, 16\].*\[1, 16, 2, 15\]"),
    ({"k": torch.zeros(1, 16, 2, 16, dtype=torch.float16)}, (TypeError, ValueError), "^k: .*float32.*float16"),
    ({"v": torch.zeros(1, 16, 3, 16)}, ValueError, "^v: .*multiple.*2.*3"),
    ({"v": torch.zeros(1, 15, 4, 16)}, ValueError, r"^v: .*16.*\[1, 15, 4, 16\]"),
    ({"v": torch.zeros(1, 16, 4, 16, dtype=torch.bfloat16)}, (TypeError, ValueError), "^v: .*float32.*bfloat16"),
    ({"g": torch.zeros(1, 16, 2)}, ValueError, r"^g: .*\[1, 16, 4\].*\[1, 16, 2\]"),
    ({"g": torch.zeros(1, 16, 4, dtype=torch.int64)}, (TypeError, ValueError), "^g: .*int64"),
    ({"beta": torch.zeros(1, 16, 4, 1)}, ValueError, r"^beta: .*\[1, 16, 4\].*\[1, 16, 4, 1\]"),
    ({"beta": None}, TypeError, "^beta: .*NoneType"),
    ({"initial_state": torch.zeros(3, 4, 16, 16)}, ValueError, r"^initial_state: .*\[2, 4, 16, 16\].*\[3, 4, 16, 16\]"),
    ({"A_log": None}, ValueError, "^A_log: .*use_gate_in_kernel.*None"),
    ({"A_log": torch.zeros(2)}, ValueError, r"^A_log: .*\[4\].*\[2\]"),
    ({"dt_bias": torch.zeros(4, 16)}, ValueError, r"^dt_bias: .*\[4\].*\[4, 16\]"),
    ({"use_gate_in_kernel": False}, ValueError, "^A_log: .*use_gate_in_kernel"),
    ({"cu_seqlens": torch.tensor([[0, 16]])}, ValueError, r"^cu_seqlens: .*\[1, 2\]"),
    ({"cu_seqlens": torch.tensor([0., 12., 16.])}, (TypeError, ValueError), "^cu_seqlens: .*float32"),
    ({"cu_seqlens": (0, 12, 16)}, TypeError, "^cu_seqlens: .*tuple"),
    ({"cu_seqlens": torch.tensor([0])}, ValueError, "^cu_seqlens: .*1"),
    ({"chunk_size": 128}, ValueError, "^chunk_size: .*64.*128"),
    ({"chunk_indices": torch.zeros(1, 2, dtype=torch.int32)}, ValueError, "^chunk_indices: .*1"),
    ({"chunk_indices": torch.zeros(9, 2)}, (TypeError, ValueError), "^chunk_indices: .*float32"),
    ({"graph_capture": "yes"}, TypeError, "^graph_capture: .*yes"),
    ({"lower_bound": -5.0}, TypeError, "lower_bound"),
    ({"scale": torch.tensor(0.5)}, TypeError, "^scale: .*Tensor"),      # a hidden sync, were it accepted
]
KDA_PROBLEM = KDA(lengths=(12, 4), H=2, HV=4, gate="raw_bias", lower_bound=-5.)
KDA_WRONG = [
    ({"g": torch.zeros(1, 16, 4)}, ValueError, r"^g: .*\[1, 16, 4, 16\].*\[1, 16, 4\]"),
    ({"dt_bias": torch.zeros(4, 16)}, ValueError, r"^dt_bias: .*\[64\].*\[4, 16\]"),
    ({"A_log": None, "lower_bound": None}, ValueError, "^A_log: .*use_gate_in_kernel.*None"),
    ({"lower_bound": -5.5}, ValueError, r"^lower_bound: .*\[-5, 0\).*-5.5"),
    ({"lower_bound": 0.}, ValueError, r"^lower_bound: .*\[-5, 0\).*0"),
    ({"lower_bound": float("nan")}, ValueError, "^lower_bound: .*nan"),
    ({"lower_bound": "-5"}, TypeError, "^lower_bound: .*str"),
    ({"use_gate_in_kernel": False, "A_log": None, "dt_bias": None}, ValueError, "^lower_bound: .*use_gate_in_kernel.*-5"),
    ({"v": torch.zeros(1, 16, 3, 16)}, ValueError, "^v: .*multiple.*2.*3"),
    ({"initial_state": torch.zeros(3, 4, 16, 16)}, ValueError, r"^initial_state: .*\[2, 4, 16, 16\].*\[3, 4, 16, 16\]"),
    ({"use_gate": True}, TypeError, "use_gate"),
]


def call(device, problem=PROBLEM, **changes):
    arguments = {**gdn_inputs(problem, device), **problem.op_options, **changes}
    moved = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}
    return problem.op(**moved)


@pytest.mark.parametrize(("changes", "error", "message"), WRONG,
                         ids=[f"{i}-{next(iter(case[0]))}" for i, case in enumerate(WRONG)])
def test_a_wrong_argument_is_named(device, changes, error, message):
    with pytest.raises(error, match=message):
        call(device, **changes)


@pytest.mark.parametrize(("changes", "error", "message"), KDA_WRONG,
                         ids=[f"{i}-{next(iter(case[0]))}" for i, case in enumerate(KDA_WRONG)])
def test_a_wrong_argument_of_channel_gates_is_named(device, changes, error, message):
    with pytest.raises(error, match=message):
        call(device, KDA_PROBLEM, **changes)


def test_nothing_is_lost_after_an_error(device):
    expected, _ = call(device)
    with pytest.raises(ValueError, match="^A_log"):
        call(device, A_log=None)
    assert torch.equal(call(device)[0], expected)


@each_rule
def test_more_than_one_batch_row_with_cu_seqlens(device, rule):
    inputs = gdn_inputs(rule(lengths=(16, 16), dense=True), device)
    with pytest.raises(ValueError, match=r"^q: .*batch 1.*batch 2"):
        rule.op(**inputs, cu_seqlens=cu_of((16, 16), device))


@each_rule
def test_heads_over_the_limit(device, rule):
    for K, V in ((257, 16), (16, 257)):
        with pytest.raises(ValueError, match="256.*257"):
            rule.op(**gdn_inputs(rule(lengths=(1,), K=K, V=V), device))


@pytest.mark.parametrize("problem", [PROBLEM, KDA_PROBLEM], ids=["gdn", "kda"])
@pytest.mark.parametrize("name", ["k", "v", "g", "beta", "initial_state", "A_log", "dt_bias", "cu_seqlens"])
def test_an_argument_on_another_device_is_named(device, problem, name):
    arguments = {**gdn_inputs(problem, device), **problem.options}
    arguments[name] = arguments[name].to("meta")
    with pytest.raises(ValueError, match=f"^{name}: .*device"):
        problem.op(**arguments)


@pytest.mark.parametrize(("values", "message"), [
    ((0, 12, 8, 16), "decrease.*12.*8"), ((0, 5, 17, 17), "16.*17"), ((2, 5, 9, 16), "start at 0.*2"),
], ids=["decreasing", "beyond T", "not from 0"])
def test_validate_names_the_wrong_value(device, values, message):
    cu = torch.tensor(values, dtype=torch.int32, device=device)
    state = torch.zeros(3, 4, 16, 16)
    with pytest.raises(ValueError, match=f"^cu_seqlens: .*{message}"):
        call(device, cu_seqlens=cu, initial_state=state, validate=True)
    with pytest.raises(ValueError, match=f"^cu_seqlens: .*{message}"):
        call(device, cu_seqlens=cu, initial_state=state, graph_capture=False)


def test_validate_accepts_good_values(device):
    assert torch.equal(call(device, validate=True)[0], call(device)[0])


@each_rule
@pytest.mark.parametrize("values", [(0, 12, 8, 16), (0, 40, 200, 3), (-9, 3, 70, 16), (16, 0, -1, 90)], ids=str)
def test_wrong_values_never_touch_memory_outside(device, rule, values):
    """`cu=[0,12,8,16]`. Every tensor lies between NaN guards; what is read outside would show as NaN in the
    sequences that are clamped into the tensor, what is written outside would change the guards."""
    problem = rule(lengths=(16, 0, 0))
    drawn = gdn_inputs(problem, device)
    cu = torch.tensor((0, *values, 0), dtype=torch.int32, device=device)[1:-1]
    inputs = {name: guarded(x) for name, x in drawn.items() if name != "cu_seqlens"}
    memory = {name: memory_of(x) for name, x in inputs.items()}
    before = {name: x.clone() for name, x in memory.items()}
    upstream = {"o": guarded(torch.ones_like(inputs["v"])),
                "ht": guarded(torch.ones(problem.state_shape, device=device))}
    results = run(rule.op, {**inputs, "cu_seqlens": cu}, upstream, **problem.op_options)
    assert results["ht"].isfinite().all()
    for name, x in memory.items():
        assert torch.equal(x, before[name]), f"the memory of {name} was written"
