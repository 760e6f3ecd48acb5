"""The convolution's kernels under other launch records than the device's own."""

from dataclasses import replace

import pytest
import torch
from triton.compiler.errors import CompileTimeAssertionFailure

from graphlin.kernels import conv, conv_backward
from graphlin.kernels.launch import record_for
from tests.ops.conv_check import Conv, conv_inputs, run_conv
from tests.tolerances import assert_close_rms


@pytest.fixture
def retile(monkeypatch):
    """Puts tiles of other values into the convolution's records, and one warp."""
    def change(**tiles):
        def record(kernel, *args, **kwargs):
            own = record_for(kernel, *args, **kwargs)
            return replace(own, tiles={name: tiles.get(name, value) for name, value in own.tiles.items()}, num_warps=1)

        monkeypatch.setattr(conv, "record_for", record)
        monkeypatch.setattr(conv_backward, "record_for", record)

    return change


@pytest.mark.parametrize(("W", "BR", "BD", "UNROLL", "options"), [
    (4, 1, 32, 4, {}), (6, 2, 16, 3, {}), (3, 16, 16, 2, {}), (1, 1, 32, 8, {}), (5, 4, 32, 4, {"activation": None}),
    (8, 2, 32, 8, {"chunk_size": 64}), (4, 4, 64, 8, {"chunk_size": 64, "extras": ("bias",)})])
def test_tiles_change_no_bit_of_a_sequence(device, retile, W, BR, BD, UNROLL, options):
    """BR strands of rows, BD channels at a time, a loop unrolled: y, dx and the states stay as they are."""
    problem = Conv(lengths=(19, 0, 2, 33), D=20, W=W, slack=2, **options)
    inputs = conv_inputs(problem, device)
    expected = run_conv(problem, inputs)
    retile(BR=BR, BD=BD, UNROLL=UNROLL)
    actual = run_conv(problem, inputs)
    summed = {"dweight", "dbias"} & actual.keys()
    for name in actual.keys() - summed:
        assert torch.equal(actual[name], expected[name]), name
    for name in summed:
        assert_close_rms(name, actual[name], expected[name], torch.float32)


def test_more_strands_than_a_chunk_has_rows_are_refused(device, retile):
    problem = Conv()
    inputs = conv_inputs(problem, device)
    retile(BR=32)
    with pytest.raises(Exception) as refused:
        run_conv(problem, inputs)
    causes = [refused.value]            # compilers wrap it in errors that say where, the interpreter too
    while causes[-1].__cause__ is not None:
        causes.append(causes[-1].__cause__)
    assert isinstance(causes[-1], (AssertionError, CompileTimeAssertionFailure))


@pytest.mark.parametrize("W", [1, 4])
def test_the_rowwise_form_gives_the_same_bits(device, retile, W):
    """The other one makes float32 of bfloat16 by its bits, of numbers of every kind."""
    if device.type == "npu":
        pytest.skip("Ascend's compiler knows no shift of rows: there they are converted alone")
    problem = Conv(lengths=(19, 0, 2, 18), D=20, W=W, dtype=torch.bfloat16)
    inputs = conv_inputs(problem, device)
    inputs["x"][..., 30, :6] = torch.tensor([-0.0, 1e-40, -1e-39, 1e30, float("inf"), float("nan")], device=device)
    results = []
    for rowwise in (False, True):
        retile(BR=4, UNROLL=2, ROWWISE=rowwise)
        results.append(run_conv(problem, inputs))
    for name, expected in results[0].items():
        assert torch.equal(results[1][name].isnan(), expected.isnan()), name
        assert torch.equal(results[1][name].nan_to_num(), expected.nan_to_num()), name
