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
    if device.type == "npu":
        pytest.xfail("Ascend's records split nothing, and its compiler knows no barrier inside a program")
    backend, launches = get_backend(device), []
    own, launch = backend.launch_record, delta_recurrence.launch

    def noted(kernel, grid, *args, PIECES, **options):
        launches.append((kernel.fn.__name__, grid, PIECES))
        launch(kernel, grid, *args, PIECES=PIECES, **options)

    def split(pieces, least=8, segment=4):
        def record(kernel, **problem):
            if kernel not in {name for family in SPLIT_RECORDS.values() for name in family.values()}:
                return own(kernel, **problem)
            found = own("delta_recurrence", **problem)
            wanted = kernel in {family.get(pieces) for family in SPLIT_RECORDS.values()}
            return replace(found, tiles={**found.tiles, "SEGMENT": segment, "LEAST": least if wanted else 0})
        monkeypatch.setattr(backend, "launch_record", record)
        launches.clear()
        return launches
    monkeypatch.setattr(backend, "num_cores", lambda device: 64)
    monkeypatch.setattr(delta_recurrence, "launch", noted)
    return split


def draw(device, lengths, decay, dtype=torch.float32, HV=2, K=16, per_channel=False):
    """Log decays from -2 decay to 0, so that a chunk of 16 rows forgets 16 decay nats; per_channel: of chunk_kda."""
    rows = sum(lengths)
    q, k = (torch.randn(1, rows, 1, K, device=device).to(dtype) for _ in range(2))
    v, h0 = torch.randn(1, rows, HV, K, device=device).to(dtype), torch.randn(len(lengths), HV, K, K, device=device)
    g = -2 * decay * torch.rand(1, rows, HV, *([K] if per_channel else []), device=device)
    beta = torch.rand(1, rows, HV, device=device)
    return dict(q=q, k=k, v=v, g=g, beta=beta, initial_state=h0, cu_seqlens=cu_of(lengths, device))


def apply(drawn, chunk_size=BT):
    op = graphlin.chunk_gated_delta_rule if drawn["g"].ndim == 3 else graphlin.chunk_kda
    o, ht = op(**drawn, use_qk_l2norm_in_kernel=True, output_final_state=True, chunk_size=chunk_size)
    return {"o": o, "ht": ht}


CASES = [(per_channel, pieces) for per_channel, records in SPLIT_RECORDS.items() for pieces in records]
each_split = pytest.mark.parametrize(("per_channel", "pieces"), CASES, ids=[f"{'kda' if kda else 'gdn'}-{n}" for kda, n in CASES])


@each_split
@pytest.mark.parametrize("lengths", [(5, 0, 250, 100), (128, 112)], ids=str)
@pytest.mark.parametrize(("decay", "dtype"), [(0.05, torch.float32), (2.0, torch.bfloat16), (8.0, torch.float32)],
                         ids=["nothing forgotten", "near the bound", "all forgotten"])
def test_no_bit_depends_on_the_split(device, splitting, lengths, decay, dtype, per_channel, pieces):
    drawn = draw(device, lengths, decay, dtype, per_channel=per_channel)
    launches = splitting(0)
    expected = apply(drawn)
    assert [pieces for *_, pieces in launches] == [1]
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


@pytest.mark.parametrize("per_channel", SPLIT_RECORDS)
def test_the_most_pieces_that_cores_have_room_for(device, monkeypatch, per_channel):
    """By the device's own records of a real model's sizes, of those that split at all."""
    records = {pieces: record_for(name, device, K=128, V=128, dtype=torch.bfloat16)
               for pieces, name in SPLIT_RECORDS[per_channel].items()}
    room = {pieces: pieces * 32 * -(-128 // record.tiles["BV"]) for pieces, record in records.items() if record.tiles["LEAST"]}

    def pieces(tokens, cores):
        monkeypatch.setattr(get_backend(device), "num_cores", lambda device: cores)
        packing = Packing(None, None, 1, tokens, tokens // 64, tokens // 64, 64, False)
        return pieces_of(packing, 32, 128, 128, per_channel, torch.bfloat16, device)

    for count, programs in room.items():
        least = 64 * records[count].tiles["LEAST"]
        assert pieces(least, programs) == (count, records[count])
        assert pieces(least, programs - 1)[0] < count and pieces(least - 1, programs)[0] < count
    assert pieces(1 << 20, 1) == (1, None)


def joined(device, splitting, change, pieces=2, per_channel=False):
    """Whether the bits of a sequence of sixteen chunks are the same in pieces as in one; whether the pieces' own programs had
    them right, by leaving out the launch that joins them."""
    drawn = draw(device, (256,), 8.0, HV=1, per_channel=per_channel)
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


@each_split
def test_pieces_stand_where_nothing_is_left_of_those_before(device, splitting, per_channel, pieces):
    assert joined(device, splitting, lambda drawn: None, pieces, per_channel) == (True, True)


def changed(name, rows, value):
    def change(drawn):
        drawn[name][0, rows] = value
    return change


CHANGES = {
    "huge values": changed("v", slice(0, 40), 1e34), "a nan": changed("v", 3, float("nan")),
    "nothing written": changed("beta", slice(30, 256), 0.0), "values of 0": changed("v", slice(30, 256), 0.0),
    "a nan in the decays": changed("g", 3, float("nan")), "growth": changed("g", slice(0, 48), 1.6),
    "a huge state": lambda drawn: drawn["initial_state"].mul_(1e34)}


@pytest.mark.parametrize(("change", "per_channel", "pieces"), [
    *((change, False, 4) for change in CHANGES), *((change, kda, 2) for change in list(CHANGES)[:3] for kda in (False, True))])
def test_a_piece_that_lacked_something_is_taken_again(device, splitting, change, per_channel, pieces):
    """The four chunks before the second piece forget just enough for decays alone."""
    def all_but(drawn):
        first = SECOND[pieces] * BT - 4 * BT
        drawn["g"][0, :first], drawn["g"][0, first:] = -0.01, -1.3
        CHANGES[change](drawn)
    alike, stood = joined(device, splitting, all_but, pieces, per_channel)
    assert alike and not stood


def test_all_channels_must_have_forgotten(device, splitting):
    """One that remembers keeps the first piece's program going, and the result as it is."""
    def change(drawn):
        drawn["g"][..., 11] = -0.01
    assert joined(device, splitting, change, per_channel=True) == (True, True)


@pytest.mark.parametrize("nats", [81.5, 83.5])
def test_a_piece_is_tried_where_enough_is_forgotten(device, splitting, nats):
    """In the four chunks before it, by a sum of whole bits, 29 or 30 a chunk; where it is not tried, the first stands for all."""
    def change(drawn):
        first = SECOND[2] * BT
        drawn["g"][0, first - 4 * BT:first], drawn["g"][0, first:] = -nats / (4 * BT), -0.01
        drawn["v"][0, :first - 4 * BT] *= 1e34
    alike, stood = joined(device, splitting, change)
    assert alike and stood == (nats < 82)


@pytest.mark.device_only
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("per_channel", "lengths", "pieces"), [
    (False, (5000, 100, 4000), 2), (False, (12000, 4000), 4), (True, (5000, 100, 4000), 2)])
def test_no_bit_depends_on_the_split_at_sizes_of_real_models(device, monkeypatch, per_channel, lengths, pieces, dtype):
    """By the device's own records, with decays that forget nothing, too little, enough and all in time, and a NaN that no decay
    forgets."""
    if not record_for(SPLIT_RECORDS[per_channel][pieces], device, K=128, V=128, dtype=dtype).tiles["LEAST"]:
        return                                                   # a device whose records split nothing
    drawn = draw(device, lengths, 0.2 if per_channel else 0.05, dtype, HV=4, K=128, per_channel=per_channel)
    drawn["g"] *= torch.tensor([0.01, 0.5, 1.3, 20.0], device=device).view(4, *[1] * per_channel)
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
