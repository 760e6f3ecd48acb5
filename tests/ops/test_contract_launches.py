"""The contract of every packed op on its launches: how many, of how many programs, and that these visit only what is there."""

import pytest
import torch

from graphlin.backends import get_backend
from graphlin.kernels import common
from graphlin.ops.chunks import chunk_local_cumsum, prepare_chunk_indices
from graphlin.verify import count_launches
from tests.inputs import cu_of
from tests.ops.op_cases import assert_bitwise, each_op

LENGTHS = (3, 0, 16, 20)
TOKENS, SEQS = sum(LENGTHS), len(LENGTHS)
LAUNCHES = {"conv": (1, 2), "gdn_gate": (2, 5), "gdn": (2, 4),      # forward, backward
            "kda_gate": (2, 5), "kda_bounded": (2, 5), "kda": (2, 4)}


def _is_chunk_parallel(kernel, constexprs) -> bool:
    """Whether a kernel's tasks are chunks; the reduction reads the table too, but has its programs for columns."""
    return "GRAPH_CAPTURE" in constexprs and kernel.fn.__name__ != "sum_chunks"


@each_op
@pytest.mark.raw_memory
def test_launches_are_as_few_as_documented(case, device):
    """Counted by the profiler: a stray fill, copy or conversion beside the kernels counts too. The table is one more."""
    drawn, cu = case.draw(TOKENS + 5, SEQS, device), cu_of(LENGTHS, device)
    case.run(drawn, cu)                                   # compiles
    forward, backward = LAUNCHES[case.name]
    options = {**case.options, "cu_seqlens": cu, "output_final_state": True}
    leaves = {name: x.requires_grad_() for name, x in drawn.items() if name not in ("do", "dht")}
    table = prepare_chunk_indices(cu, TOKENS + 5, 16)
    assert count_launches(lambda: case.op(**leaves, **options), device) == forward + 1
    outputs = []
    assert count_launches(lambda: outputs.extend(case.op(**leaves, **options, chunk_indices=table)), device) == forward
    upstream = [drawn["do"], drawn["dht"]]
    assert count_launches(lambda: torch.autograd.grad(outputs, list(leaves.values()), upstream), device) == backward


@pytest.mark.raw_memory
def test_the_chunk_table_and_the_chunk_sums_are_one_launch_each(device):
    cu, g = cu_of(LENGTHS, device), torch.randn(1, TOKENS, 2, device=device)
    table = prepare_chunk_indices(cu, TOKENS, 16)
    chunk_local_cumsum(g, 16, cu_seqlens=cu)              # compiles
    assert count_launches(lambda: prepare_chunk_indices(cu, TOKENS, 16), device) == 1
    assert count_launches(lambda: chunk_local_cumsum(g, 16, cu_seqlens=cu, chunk_indices=table), device) == 1


@each_op
def test_chunk_parallel_grids_are_bounded_by_the_cores(case, device, monkeypatch):
    """`min(tasks, waves * cores)` programs, the tasks being a whole number for each row of the table, which may be fewer on fewer
    cores; all tasks, of which those without a chunk exit at once, where the record says that programs don't stride."""
    backend, tokens = get_backend(device), 200
    drawn, cu = case.draw(tokens, SEQS, device), cu_of(LENGTHS, device)
    rows = prepare_chunk_indices(cu, tokens, 16).shape[0]
    launches = []

    def note(kernel, grid, args, constexprs, record):
        if _is_chunk_parallel(kernel, constexprs):
            waves = record.waves if record.tiles.get("PERSISTENT", True) else 10 ** 6
            launches.append((kernel.fn.__name__, grid, waves))

    def grids(cores):
        launches.clear()
        monkeypatch.setattr(backend, "num_cores", lambda device: cores)
        case.run(drawn, cu)
        return list(launches)

    monkeypatch.setattr(backend, "launch", note)          # nothing runs
    unbounded = grids(10 ** 6)
    assert len(unbounded) >= 2
    for name, tasks, _ in unbounded:
        assert tasks > 0 and tasks % rows == 0, f"{name}: {tasks} tasks for {rows} chunks"
    for cores in (1, 3, 5):
        for (name, tasks, waves), (same, programs, _) in zip(unbounded, grids(cores), strict=True):
            # All tasks, in larger pieces: the one kernel that makes a key head's value heads one task where cores are few.
            whole = name == "gdn_prep" and programs % rows == 0 and tasks % programs == 0
            assert name == same and (programs == min(tasks, waves * cores) or whole and programs < waves * cores), (name, cores)


@each_op
def test_the_number_of_programs_changes_no_bit(case, device, monkeypatch):
    """Programs share the tasks out: none is left out, and none is done by halves."""
    drawn, cu = case.draw(TOKENS + 5, SEQS, device), cu_of(LENGTHS, device)
    expected = case.run(drawn, cu)
    for cores in (1, 3):
        if cores != get_backend(device).num_cores(device):
            monkeypatch.setattr(get_backend(device), "num_cores", lambda device, cores=cores: cores)
            assert_bitwise(case.run(drawn, cu), expected, f"on {cores} cores")


@pytest.fixture
def visits(request, monkeypatch) -> list[tuple[str, int]]:
    """Each launch of a chunk-parallel kernel: how often it looked up a chunk, which only the interpreter lets Python count."""
    if request.config.option.device != "host":
        pytest.skip("counts what the interpreter runs")
    looked_up, launches = [], []
    rewritten, backend = common.chunk.rewrite(), get_backend("cpu")
    launch = backend.launch

    def chunk(*args):
        looked_up.append(args)
        return rewritten(*args)

    def counted(kernel, grid, args, constexprs, record):
        looked_up.clear()
        launch(kernel, grid, args, constexprs, record)
        if _is_chunk_parallel(kernel, constexprs):
            launches.append((kernel.fn.__name__, len(looked_up)))

    monkeypatch.setattr(common.chunk, "rewrite", lambda: chunk)
    monkeypatch.setattr(backend, "launch", counted)
    return launches


@each_op
def test_work_follows_the_tokens_that_are_there(case, visits):
    """A nearly empty tier of 67 chunks: a kernel visits a chunk for each sequence and each full one, not all 67.

    It may do so once for each head; here twice for the one key head, whose dk and dq are tasks of their own.
    """
    device, tokens, lengths = torch.device("cpu"), 1024, (17, 3, 0, 0)
    case.run(case.draw(tokens, len(lengths), device), cu_of(lengths, device))
    expected = len(lengths) + sum(lengths) // 16
    assert len(visits) >= 2
    heads = case.output[0] if len(case.output) == 2 else 1
    tasks = {name: (2,) if name == "gdn_state_gradients" else (1, heads) for name, _ in visits}
    assert [(name, count) for name, count in visits if count not in [expected * n for n in tasks[name]]] == []
