"""Kimi Delta Attention with either form of its diagonal blocks, which the launch record chooses: PAIRWISE or anchored."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from graphlin.backends import get_backend
from tests.inputs import KDA, gdn_inputs
from tests.ops.standard_check import standard_check

PAIRED = {"kda_prep", "kda_intra_gradients"}


@pytest.fixture(params=[True, False], ids=["pairwise", "anchored"])
def form(request, device, monkeypatch) -> bool:
    """Whether the records under test ask for pairwise blocks; the first of both must have been launched so."""
    backend, launched = get_backend(device), set()
    launch_record, launch = backend.launch_record, backend.launch

    def changed_record(kernel, **problem):
        record = launch_record(kernel, **problem)
        return replace(record, tiles={**record.tiles, "PAIRWISE": request.param}) if kernel in PAIRED else record

    def noted(kernel, grid, args, constexprs, record):
        launched.add((kernel.fn.__name__, record.tiles.get("PAIRWISE")))
        launch(kernel, grid, args, constexprs, record)

    monkeypatch.setattr(backend, "launch_record", changed_record)
    monkeypatch.setattr(backend, "launch", noted)
    yield request.param
    assert ("kda_prep", request.param) in launched and ("kda_prep", not request.param) not in launched


@pytest.mark.parametrize("problem", [
    KDA(lengths=(21, 0, 33), HV=2, chunk_size=64, gate="raw_bias", beta="twice_sigmoid"),
    KDA(lengths=(70,), HV=1, chunk_size=64, decay="masked"),
    KDA(lengths=(40,), HV=1, K=24, chunk_size=32, decay="strong"),
    KDA(lengths=(35, 5), HV=1, chunk_size=16, gate="raw_bias", lower_bound=-5., safe_gate=True),
    KDA(lengths=(70, 21), HV=2, chunk_size=64, gate="raw_bias", lower_bound=-5., safe_gate=True),
    KDA(lengths=(40,), HV=1, K=24, chunk_size=32, gate="raw_bias", lower_bound=-5., safe_gate=True),
    KDA(lengths=(64,), HV=1, chunk_size=64, gate="raw", dtype=torch.bfloat16),
    KDA(lengths=(64,), HV=1, chunk_size=64, decay=-20., dtype=torch.float16),
], ids=str)
def test_values_and_gradients(device, form, problem):
    standard_check(problem, device)


def test_a_row_follows_from_those_before_it(device, form):
    """Other values in the last rows of a block, its gates among them, change no bit of the rows before."""
    problem = KDA(lengths=(30,), HV=1, chunk_size=32, states="none")
    inputs, others = gdn_inputs(problem, device), gdn_inputs(problem, device, seed=1)
    expected, _ = problem.op(**inputs, **problem.op_options)
    for name in ("q", "k", "v", "g", "beta"):
        inputs[name][:, 13:] = others[name][:, 13:]
    actual, _ = problem.op(**inputs, **problem.op_options)
    assert torch.equal(actual[:, :13], expected[:, :13])
    assert not torch.equal(actual[:, 13:], expected[:, 13:])


@pytest.mark.parametrize("chunk_size", [32, 64])
def test_sums_by_products_or_by_scans(device, monkeypatch, chunk_size):
    """A bounded gate's decays are summed by either, as the record says (SUMS): as float32, or as two halves of bfloat16."""
    if device.type == "npu":
        return                                                   # its records take pairs one by one, without either
    dtype, products, tolerance = (torch.bfloat16, 2, 1e-2) if device.type == "cuda" else (torch.float32, 1, 1e-5)
    backend = get_backend(device)
    launch_record = backend.launch_record
    problem = KDA(lengths=(70, 21), HV=2, chunk_size=chunk_size, gate="raw_bias", lower_bound=-5., safe_gate=True, dtype=dtype)
    inputs, results = gdn_inputs(problem, device), []
    for sums in (0, products):
        def changed_record(kernel, sums=sums, **options):
            record = launch_record(kernel, **options)
            tiles = {"SUMS": sums, "PAIRWISE": False} if kernel == "kda_prep" else {}
            return replace(record, tiles={**record.tiles, **tiles})

        monkeypatch.setattr(backend, "launch_record", changed_record)
        results.append(problem.op(**inputs, **problem.op_options)[0].float())
    scanned, multiplied = results
    assert (scanned - multiplied).norm() <= tolerance * scanned.norm()
    assert not torch.equal(scanned, multiplied)


@pytest.fixture
def written_out(device, monkeypatch) -> Callable[[bool], list[dict]]:
    """Makes the record of the gradients inside chunks ask for blocks written out, or in a loop (UNROLLED). Returns the arguments
    of its launches from then on."""
    backend = get_backend(device)
    launch_record, launch = backend.launch_record, backend.launch

    def ask(unrolled: bool) -> list[dict]:
        launched = []

        def changed_record(kernel, **options):
            record = launch_record(kernel, **options)
            if kernel == "kda_intra_gradients":
                record = replace(record, tiles={**record.tiles, "PAIRWISE": False, "UNROLLED": unrolled})
            return record

        def noted(kernel, grid, args, constexprs, record):
            launch(kernel, grid, args, constexprs, record)
            if kernel.fn.__name__ == "kda_intra_gradients":
                launched.append(dict(zip(kernel.arg_names, args, strict=False)))

        monkeypatch.setattr(backend, "launch_record", changed_record)
        monkeypatch.setattr(backend, "launch", noted)
        return launched

    return ask


@pytest.mark.parametrize("problem", [
    KDA(lengths=(70, 21), HV=2, chunk_size=64, gate="raw_bias", lower_bound=-5., safe_gate=True),
    KDA(lengths=(64, 0, 49), H=1, HV=1, K=24, chunk_size=64, gate="raw", lower_bound=-5., safe_gate=True, beta="sigmoid"),
    KDA(lengths=(102, 32), H=1, HV=1, K=80, chunk_size=64, gate="raw_bias", lower_bound=-5., safe_gate=True),
    KDA(lengths=(75, 33), HV=1, K=40, chunk_size=64, gate="raw_bias", lower_bound=-5., safe_gate=True, dtype=torch.bfloat16),
], ids=str)
@pytest.mark.parametrize("unrolled", [False, True], ids=["loop", "unrolled"])
def test_blocks_in_a_loop_or_written_out(device, written_out, problem, unrolled):
    """The gradients of a bounded gate's chunks take either form, as the record says (UNROLLED)."""
    if device.type == "npu":
        return                                                   # triton-ascend can't compile what is written out with tuples
    launched = written_out(unrolled)
    standard_check(problem, device)
    assert len(launched) == 1


def test_blocks_behind_the_end_are_left_out(device, written_out):
    """Written out, a chunk of 17 rows has two blocks of 16 that are made, and two that are not."""
    if device.type == "npu":
        return
    launched = written_out(True)
    standard_check(KDA(lengths=(17,), HV=1, chunk_size=64, gate="raw", lower_bound=-5., safe_gate=True), device)
    for name in ("dqk", "pb"):
        rows = launched[0][name].float().isfinite().reshape(-1, 64, launched[0][name].shape[-1] if name == "dqk" else 1)
        assert rows[:, :32].all() and not rows[:, 32:].any(), name
