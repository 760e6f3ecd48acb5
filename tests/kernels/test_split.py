"""Long sequences in pieces: which are split, which pieces stand, and that no bit depends on it."""

from dataclasses import replace

import pytest
import torch

import graphlin
from graphlin.backends import get_backend
from graphlin.kernels import delta_recurrence
from graphlin.kernels.launch import record_for
from graphlin.kernels.packing import Packing
from graphlin.kernels.split import SPLIT_RECORDS, pieces_of
from tests.inputs import cu_of
from tests.ops.op_cases import assert_bitwise

BT = 16
SECOND = {2: 10, 4: 7}      # the chunk that the second piece of a sequence of 16 begins with, all others being of 13 // pieces


@pytest.fixture
def splitting(device, monkeypatch):
    """Has sequences of `least` chunks or more split into some pieces of at least `segment`, or none; returns the launches of the
    recurrence, as they are made: programs and pieces, and that of the join."""
    backend, launches = get_backend(device), []
    own, launch = backend.launch_record, delta_recurrence.launch

    def noted(kernel, grid, *args, PIECES, **options):
        launches.append((kernel.fn.__name__, grid, PIECES))
        launch(kernel, grid, *args, PIECES=PIECES, **options)

    def split(pieces, least=8, segment=4):
        def record(kernel, **problem):
            if kernel not in SPLIT_RECORDS.values():
                return own(kernel, **problem)
            found = own("delta_recurrence", **problem)
            sizes = dict(SEGMENT=segment, LEAST=least if kernel == SPLIT_RECORDS.get(pieces) else 0)
            return replace(found, tiles={**found.tiles, **sizes})
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


@pytest.mark.parametrize("pieces", SPLIT_RECORDS)
@pytest.mark.parametrize("lengths", [(250,), (5, 0, 250, 100), (128, 112)], ids=str)
@pytest.mark.parametrize(("decay", "dtype"), [(0.05, torch.float32), (2.0, torch.bfloat16), (8.0, torch.float32)],
                         ids=["nothing forgotten", "near the bound", "all forgotten"])
def test_no_bit_depends_on_the_split(device, splitting, lengths, decay, dtype, pieces):
    drawn = draw(device, lengths, decay, dtype)
    assert not splitting(0)
    expected = apply(drawn)
    assert_bitwise(launched(splitting(pieces), drawn, pieces), expected, f"in {pieces} pieces")


def launched(launches, drawn, pieces, **options):
    found, tasks = apply(drawn, **options), 2 * drawn["initial_state"].shape[0]
    assert launches == [("delta_recurrence", pieces * tasks, pieces), ("delta_join", tasks, pieces)]
    return found


def test_dense_sequences_are_split_too(device, splitting):
    drawn = draw(device, (150, 150), 8.0)
    dense = {name: x.reshape(2, 150, *x.shape[2:]) for name, x in drawn.items() if name not in ("initial_state", "cu_seqlens")}
    found = launched(splitting(2), dense | {"initial_state": drawn["initial_state"]}, 2)
    splitting(0)
    assert_bitwise(found | {"o": found["o"].reshape(1, 300, 2, 16)}, apply(drawn), "dense")


def test_what_leaves_no_core_idle_or_is_short_is_not_split(device, splitting, monkeypatch):
    launches = splitting(2)
    apply(draw(device, (127,), 8.0))
    monkeypatch.setattr(get_backend(device), "num_cores", lambda device: 3)
    apply(draw(device, (250,), 8.0))
    assert launches == [("delta_recurrence", 2, 1)] * 2


def test_the_most_pieces_that_cores_have_room_for(device, monkeypatch):
    """By the device's own records of a real model's sizes, of those that split at all."""
    records = {pieces: record_for(name, device, K=128, V=128, dtype=torch.bfloat16) for pieces, name in SPLIT_RECORDS.items()}
    room = {pieces: pieces * 32 * -(-128 // record.tiles["BV"]) for pieces, record in records.items() if record.tiles["LEAST"]}

    def pieces(tokens, cores):
        monkeypatch.setattr(get_backend(device), "num_cores", lambda device: cores)
        packing = Packing(None, None, 1, tokens, tokens // 64, tokens // 64, 64, False)
        return pieces_of(packing, 32, 128, 128, torch.bfloat16, device)

    for count, programs in room.items():
        least = 64 * records[count].tiles["LEAST"]
        assert pieces(least, programs) == (count, records[count])
        assert pieces(least, programs - 1)[0] < count and pieces(least - 1, programs)[0] < count
    assert pieces(1 << 20, 1) == (1, None)


def joined(device, splitting, change, pieces=2):
    """Whether the bits of a sequence of sixteen chunks are the same in pieces as in one; whether the pieces' own programs had
    them right, by leaving out the launch that joins them."""
    drawn = draw(device, (256,), 8.0, HV=1)
    change(drawn)
    splitting(0)
    expected = apply(drawn)
    splitting(pieces)
    found = apply(drawn)
    alike = all(torch.equal(found[name].view(torch.int32), x.view(torch.int32)) for name, x in expected.items())
    run = delta_recurrence.launch

    def without_join(kernel, *args, **options):
        if kernel is not delta_recurrence.delta_join:
            run(kernel, *args, **options)
    delta_recurrence.launch = without_join      # the fixture puts back what was there before
    return alike, torch.equal(apply(drawn)["o"].view(torch.int32), expected["o"].view(torch.int32))


@pytest.mark.parametrize("pieces", SPLIT_RECORDS)
def test_pieces_stand_where_nothing_is_left_of_those_before(device, splitting, pieces):
    assert joined(device, splitting, lambda drawn: None, pieces) == (True, True)


def changed(name, rows, value):
    def change(drawn):
        drawn[name][0, rows] = value
    return change


@pytest.mark.parametrize("pieces", SPLIT_RECORDS)
@pytest.mark.parametrize("change", [
    changed("v", slice(0, 40), 1e34), changed("v", slice(30, 256), 0.0), changed("v", 3, float("nan")),
    changed("g", 3, float("nan")), changed("beta", slice(30, 256), 0.0), changed("g", slice(0, 48), 1.6),
    lambda drawn: drawn["initial_state"].mul_(1e34),
], ids=["huge values", "values of 0", "a nan", "a nan in the decays", "nothing written", "growth", "a huge state"])
def test_a_piece_that_lacked_something_is_taken_again(device, splitting, change, pieces):
    """The four chunks before the second piece forget just enough for decays alone."""
    def all_but(drawn):
        first = SECOND[pieces] * BT - 4 * BT
        drawn["g"][0, :first], drawn["g"][0, first:] = -0.01, -1.3
        change(drawn)
    alike, stood = joined(device, splitting, all_but, pieces)
    assert alike and not stood


@pytest.mark.parametrize("nats", [81.5, 83.5])
def test_a_piece_is_tried_where_enough_is_forgotten(device, splitting, nats):
    """In the four chunks before it, by a sum of whole bits, 30 or 29 a chunk; where it is not tried, the first stands for all."""
    def change(drawn):
        first = SECOND[2] * BT
        drawn["g"][0, first - 4 * BT:first] = -nats / (4 * BT)
        drawn["v"][0, :first - 4 * BT] *= 1e34
    alike, stood = joined(device, splitting, change)
    assert alike and stood == (nats < 82)


@pytest.mark.device_only
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("lengths", "pieces"), [((5000, 100, 4000), 2), ((12000, 4000), 4)])
def test_no_bit_depends_on_the_split_at_sizes_of_real_models(device, monkeypatch, lengths, pieces, dtype):
    """By the device's own records, with decays that forget nothing, too little, enough and all in time, and a NaN that no decay
    forgets."""
    drawn = draw(device, lengths, 0.05, dtype, HV=4, K=128)
    drawn["g"] *= torch.tensor([0.01, 0.5, 1.3, 20.0], device=device)
    drawn["v"][0, :100] *= 1e3
    drawn["v"][0, 7, 3, 5] = float("nan")
    launches, launch, cores = [], delta_recurrence.launch, get_backend(device).num_cores(device)
    monkeypatch.setattr(get_backend(device), "num_cores", lambda device: 1)
    expected = {name: x.nan_to_num(7.0) for name, x in apply(drawn, 64).items()}
    monkeypatch.setattr(get_backend(device), "num_cores", lambda device: cores)
    monkeypatch.setattr(delta_recurrence, "launch", lambda *args, **options: (launches.append(options["PIECES"]),
                                                                              launch(*args, **options)))
    assert_bitwise({name: x.nan_to_num(7.0) for name, x in apply(drawn, 64).items()}, expected, "in pieces")
    assert (expected["o"][0, 7:lengths[0], 3, 5] == 7.0).all() and launches == [pieces, pieces]
