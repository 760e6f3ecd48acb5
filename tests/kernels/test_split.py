"""Long sequences in two halves: which are, which second halves stand, and that no bit depends on it."""

from dataclasses import replace

import pytest
import torch

import graphlin
from graphlin.backends import get_backend
from graphlin.kernels import delta_recurrence
from tests.inputs import cu_of
from tests.ops.op_cases import assert_bitwise

BT = 16


@pytest.fixture
def splitting(device, monkeypatch):
    """Has sequences of more than `least` chunks split, or none; returns the launches of the recurrence, as they are made."""
    backend, launches = get_backend(device), []
    own, launch = backend.launch_record, delta_recurrence.launch

    def noted(kernel, grid, *args, **options):
        launches.append((grid, options.get("SPLIT")))
        launch(kernel, grid, *args, **options)

    def split(least):
        def record(kernel, **problem):
            found = own(kernel, **problem)
            return replace(found, tiles={**found.tiles, "SEGMENT": least}) if kernel == "delta_recurrence" else found
        monkeypatch.setattr(backend, "launch_record", record)
        launches.clear()
        return launches
    monkeypatch.setattr(backend, "num_cores", lambda device: 64)
    monkeypatch.setattr(delta_recurrence, "launch", noted)
    return split


def draw(device, lengths, decay, dtype=torch.float32, HV=2, K=16):
    """Log decays from -2 decay to 0, so that a chunk of 16 rows forgets 16 decay nats."""
    rows = sum(lengths)
    q, k = (torch.randn(1, rows, 1, K, device=device).to(dtype) for _ in range(2))
    v, h0 = torch.randn(1, rows, HV, K, device=device).to(dtype), torch.randn(len(lengths), HV, K, K, device=device)
    g, beta = -2 * decay * torch.rand(1, rows, HV, device=device), torch.rand(1, rows, HV, device=device)
    return dict(q=q, k=k, v=v, g=g, beta=beta, initial_state=h0, cu_seqlens=cu_of(lengths, device))


def apply(drawn, chunk_size=BT):
    o, ht = graphlin.chunk_gated_delta_rule(**drawn, use_qk_l2norm_in_kernel=True, output_final_state=True, chunk_size=chunk_size)
    return {"o": o, "ht": ht}


@pytest.mark.parametrize("lengths", [(150,), (5, 0, 150, 33), (32, 33)], ids=str)
@pytest.mark.parametrize(("decay", "dtype"), [(0.05, torch.float32), (1.7, torch.bfloat16), (5.0, torch.float32)],
                         ids=["nothing forgotten", "near the bound", "all forgotten"])
def test_no_bit_depends_on_the_split(device, splitting, lengths, decay, dtype):
    drawn = draw(device, lengths, decay, dtype)
    assert not splitting(0)
    expected = apply(drawn)
    launches = splitting(2)
    assert_bitwise(apply(drawn), expected, "in halves")
    assert launches == [(4 * len(lengths), 1), (2 * len(lengths), 2)]


def test_dense_sequences_are_split_too(device, splitting):
    drawn = draw(device, (100, 100), 5.0)
    dense = {name: x.reshape(2, 100, *x.shape[2:]) for name, x in drawn.items() if name not in ("initial_state", "cu_seqlens")}
    launches = splitting(2)
    found = apply(dense | {"initial_state": drawn["initial_state"]})
    assert [split for _, split in launches] == [1, 2]
    splitting(0)
    assert_bitwise(found | {"o": found["o"].reshape(1, 200, 2, 16)}, apply(drawn), "dense")


def test_what_leaves_no_core_idle_or_is_short_is_not_split(device, splitting, monkeypatch):
    launches = splitting(2)
    apply(draw(device, (32,), 5.0))
    monkeypatch.setattr(get_backend(device), "num_cores", lambda device: 3)
    apply(draw(device, (100,), 5.0))
    assert [split for _, split in launches] == [0, 0]


def halves(device, splitting, change):
    """The bits of a sequence of twelve chunks in one piece; whether they are the same in halves; how many values of the second
    half its own program had right, by leaving out the launch that joins them."""
    drawn = draw(device, (192,), 5.0, HV=1)
    change(drawn)
    splitting(0)
    expected = apply(drawn)
    splitting(2)
    found = apply(drawn)
    alike = all(torch.equal(found[name].view(torch.int32), x.view(torch.int32)) for name, x in expected.items())
    run = delta_recurrence.launch

    def without_join(*args, SPLIT, **options):
        if SPLIT < 2:
            run(*args, SPLIT=SPLIT, **options)
    delta_recurrence.launch = without_join      # the fixture puts back what was there before
    return alike, torch.equal(apply(drawn)["o"].view(torch.int32), expected["o"].view(torch.int32))


def test_a_second_half_stands_where_nothing_is_left_of_the_first(device, splitting):
    assert halves(device, splitting, lambda drawn: None) == (True, True)


def changed(name, rows, value):
    def change(drawn):
        drawn[name][0, rows] = value
    return change


@pytest.mark.parametrize("change", [
    changed("v", slice(0, 40), 1e30), changed("v", slice(30, 192), 0.0), changed("v", 3, float("nan")),
    changed("g", 3, float("nan")), changed("beta", slice(30, 192), 0.0), changed("g", slice(0, 60), 1.3),
    lambda drawn: drawn["initial_state"].mul_(1e34),
], ids=["huge values", "values of 0", "a nan", "a nan in the decays", "nothing written", "growth", "a huge state"])
def test_a_second_half_that_lacked_something_is_taken_again(device, splitting, change):
    """Rows 64 to 111 forget 2.1 nats each, more than enough for decays alone."""
    def all_but(drawn):
        changed("g", slice(60, 192), -2.1)(drawn)
        if drawn["g"][0, :60].isfinite().all():
            drawn["g"][0, :60] = -0.01
        change(drawn)
    alike, stood = halves(device, splitting, all_but)
    assert alike and not stood


@pytest.mark.parametrize("nats", [47.0, 49.0])
def test_a_second_half_is_tried_where_enough_is_forgotten(device, splitting, nats):
    """In the two chunks before it, more of which are not tried; a half that is tried stands."""
    def change(drawn):
        drawn["g"][0, 64:112] = -nats / 32
        drawn["v"][0, :64] *= 1e30
    alike, stood = halves(device, splitting, change)
    assert alike and stood == (nats < 48)


@pytest.mark.device_only
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_no_bit_depends_on_the_split_at_sizes_of_real_models(device, splitting, dtype, monkeypatch):
    monkeypatch.setattr(get_backend(device), "num_cores", lambda device: 132)
    drawn = draw(device, (4500, 100, 9000), 0.05, dtype, HV=4, K=128)
    drawn["g"] *= torch.tensor([1.0, 0.01, 3.0, 20.0], device=device)
    drawn["v"][0, :100] *= 1e3
    splitting(0)
    expected = apply(drawn, 64)
    launches = splitting(32)
    assert_bitwise(apply(drawn, 64), expected, "in halves")
    assert [split for _, split in launches] == [1, 2]
