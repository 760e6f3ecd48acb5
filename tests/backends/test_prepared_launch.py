"""Launches that are prepared once: what a launch by Triton does, for every form of argument, and on CUDA without its dispatch."""

import pytest
import torch
import triton

from graphlin.backends import get_backend
from graphlin.kernels.copy_rows import copy_active_rows
from graphlin.kernels.launch import grid_stride, prepare, record_for

WIDTH, TOKENS = 8, 24


@pytest.fixture
def copy(device):
    y = torch.zeros(1, TOKENS, WIDTH, device=device)
    record = record_for("copy_active_rows", device, dtype=y.dtype)
    launch = prepare(copy_active_rows, grid_stride(1, record, device), y, None, None, TOKENS, WIDTH, 1, record=record,
                     N_MAX=0, HAS_CU=True, FILL_CU=False, HAS_MAIL=False)

    def run(x, cu):
        y.zero_()
        launch((x, cu), (cu.shape[0] - 1, x.shape[1], 0, 0, 0, 0))
        return y
    return run


def calls(device):
    """Tensors of every form that Triton compiles for itself, each twice and of two sizes."""
    for dtype in (torch.int32, torch.int64):
        for offset in (0, 1):
            for tokens in (7, TOKENS):
                x = torch.randn(tokens * WIDTH + offset, device=device)[offset:].view(1, tokens, WIDTH)
                assert (x.data_ptr() % 16 != 0) == offset
                yield x, torch.tensor([0, 3, tokens - 1], device=device, dtype=dtype)


def test_every_form_of_arguments_is_launched_as_it_should_be(device, copy):
    for x, cu in [*calls(device), *calls(device)]:
        y, end = copy(x, cu), int(cu[-1])
        assert torch.equal(y[:, :end], x[:, :end]) and not y[:, end:].any()


@pytest.mark.device_only
def test_triton_dispatches_the_first_launch_of_each_form_and_those_that_are_watched(device, copy, monkeypatch):
    run, dispatched, seen = copy_active_rows.run, [], []
    monkeypatch.setattr(copy_active_rows, "run", lambda *args, **kwargs: dispatched.append(args) or run(*args, **kwargs))
    arguments = [*calls(device), *calls(device)]
    for x, cu in arguments:
        copy(x, cu)
    quick = device.type == "cuda"                                  # other backends take Triton's way each time
    assert len(dispatched) == (4 if quick else len(arguments))
    if quick:
        monkeypatch.setattr(triton.knobs.runtime, "launch_enter_hook", seen.append)
        copy(x, cu)
        assert len(dispatched) == 5 and len(seen) == 1


def test_a_launch_from_another_stream_goes_there(device, copy):
    backend = get_backend(device)
    x, cu = torch.randn(1, 9, WIDTH, device=device), torch.tensor([0, 9], device=device, dtype=torch.int32)
    copy(x, cu)
    backend.synchronize(device)
    with backend.stream(backend.side_stream(device)):
        y = copy(x * 2, cu)
        backend.synchronize(device)
        assert torch.equal(y[:, :9], x * 2)
