"""The contract of every packed op on chunk tables that are not those of its sequences: memory stays safe, validate tells."""

import pytest
import torch

from graphlin.ops.chunks import prepare_chunk_indices
from tests.inputs import cu_of, guarded, memory_of
from tests.ops.op_cases import assert_bitwise, each_full_op

LENGTHS, TOKENS = (17, 3), 24
MOST, LEAST = 2 ** 31 - 1, -2 ** 31
NONSENSE = [[7, 5], [-3, 2], [1, -9], [MOST, MOST], [0, 2 ** 30], [LEAST, LEAST], [2, 0], [0, MOST]]
TABLES = {
    "sentinels": lambda cu: prepare_chunk_indices(cu, 100, 16),
    "sentinels first": lambda cu: prepare_chunk_indices(cu, 100, 16).flip(0).contiguous(),
    "other sequences": lambda cu: prepare_chunk_indices(cu_of((1, 20), cu.device), 100, 16),
    "more sequences": lambda cu: prepare_chunk_indices(cu_of((3,) * 7, cu.device), 100, 16),
    "smaller chunks": lambda cu: prepare_chunk_indices(cu_of((100, 60), cu.device), 160, 16),
    "larger chunks": lambda cu: prepare_chunk_indices(cu, 200, 32),
    "nonsense": lambda cu: torch.tensor(NONSENSE, dtype=torch.int32, device=cu.device),
}


@each_full_op
@pytest.mark.parametrize(("table", "graph_capture"), [
    ("sentinels", False), ("smaller chunks", False), ("nonsense", True), ("nonsense", False),
])
def test_a_table_of_something_else_never_touches_memory_outside(case, device, table, graph_capture):
    """Arguments lie between guards, and so does all memory that the op allocates."""
    cu = cu_of(LENGTHS, device)
    fenced = {name: guarded(x) for name, x in case.draw(TOKENS, len(LENGTHS), device).items()}
    memory = {name: memory_of(x) for name, x in fenced.items()}
    before = {name: x.clone() for name, x in memory.items()}
    case.run(fenced, cu, chunk_indices=TABLES[table](cu), graph_capture=graph_capture)
    for name, x in memory.items():
        assert torch.equal(x, before[name]), f"the memory of {name} was written"


@each_full_op
@pytest.mark.parametrize(("table", "graph_capture"), [
    *((name, None) for name in TABLES if name != "sentinels"), *((name, False) for name in TABLES),
])
def test_validate_names_the_table_of_something_else(case, device, table, graph_capture):
    cu, drawn = cu_of(LENGTHS, device), case.draw(TOKENS, len(LENGTHS), device)
    with pytest.raises(ValueError, match="^chunk_indices: .*chunk_size 16"):
        case.run(drawn, cu, chunk_indices=TABLES[table](cu), graph_capture=graph_capture, validate=True)


@each_full_op
def test_validate_accepts_the_right_table(case, device):
    cu, drawn = cu_of(LENGTHS, device), case.draw(TOKENS, len(LENGTHS), device)
    longer = prepare_chunk_indices(cu, 100, 16)
    expected = case.run(drawn, cu, chunk_indices=longer, validate=True)
    actual = case.run(drawn, cu, chunk_indices=longer[:3], graph_capture=False, validate=True)
    assert_bitwise(actual, expected, "between the two paths under validate")
