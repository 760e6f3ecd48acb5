"""The contract of every packed op, bit for bit: what a result may depend on, and what inactive rows hold."""

import pytest
import torch

from graphlin.ops.chunks import prepare_chunk_indices
from tests.inputs import cu_of
from tests.ops.op_cases import arrange, assert_bitwise, each_op, sequence_results

LENGTHS = (19, 0, 16, 37)
TOKENS = sum(LENGTHS)


def drawn_for(case, device, tokens=TOKENS, **kwargs):
    return case.draw(tokens, len(LENGTHS), device, **kwargs)


@each_op
@pytest.mark.parametrize(("more_tokens", "more_seqs"), [(1, 0), (0, 3), (70, 9)])
def test_results_are_independent_of_the_tier(case, device, more_tokens, more_seqs):
    drawn, order = drawn_for(case, device), range(len(LENGTHS))
    exact, cu = arrange(case, drawn, LENGTHS, order, TOKENS, len(LENGTHS))
    padded, padded_cu = arrange(case, drawn, LENGTHS, order, TOKENS + more_tokens, len(LENGTHS) + more_seqs)
    expected, actual = case.run(exact, cu), case.run(padded, padded_cu)
    for name, x in actual.items():
        if case.by_token(name):
            actual[name] = x[:, :TOKENS]
        elif case.by_sequence(name):
            actual[name] = x[:len(LENGTHS)]
    assert_bitwise(actual, expected, "between tiers")


@each_op
def test_empty_sequences_between_others_change_nothing(case, device):
    drawn = case.draw(TOKENS, len(LENGTHS), device)
    plain, cu = arrange(case, drawn, LENGTHS, (0, 2, 3), TOKENS, 3)
    mixed, mixed_cu = arrange(case, drawn, LENGTHS, (1, 0, 1, 1, 2, 1, 3), TOKENS, 7)
    expected, actual = case.run(plain, cu), case.run(mixed, mixed_cu)
    for name, x in actual.items():
        if case.by_sequence(name):
            actual[name] = x[[1, 4, 6]]
    assert_bitwise(actual, expected, "with empty sequences in between")


@each_op
def test_results_are_independent_of_the_place_in_the_pack(case, device):
    drawn = drawn_for(case, device)
    alone, alone_cu = arrange(case, drawn, LENGTHS, [3], LENGTHS[3], 1)
    expected = sequence_results(case, case.run(alone, alone_cu), alone_cu, 0)
    for order in ([3, 0, 1, 2], [0, 1, 3, 2], [2, 1, 0, 3]):
        moved, cu = arrange(case, drawn, LENGTHS, order, TOKENS, len(LENGTHS))
        actual = sequence_results(case, case.run(moved, cu), cu, order.index(3))
        assert_bitwise(actual, expected, f"at place {order.index(3)} of the pack")


@each_op
@pytest.mark.parametrize("neighbour", [0, 2], ids=["before", "after"])
def test_results_are_independent_of_a_neighbour_full_of_nan(case, device, neighbour):
    lengths, kept = (19, 37, 16), 1
    drawn = case.draw(sum(lengths), 3, device)
    clean, cu = arrange(case, drawn, lengths, range(3), sum(lengths), 3)
    dirty = {name: x.clone() for name, x in clean.items()}
    first, last = cu[neighbour:neighbour + 2].tolist()
    for name, x in dirty.items():
        if case.by_token(name):
            x[:, first:last] = float("nan")
        elif case.by_sequence(name):
            x[neighbour] = float("nan")
    expected, actual = (sequence_results(case, case.run(x, cu), cu, kept) for x in (clean, dirty))
    assert_bitwise(actual, expected, "beside NaN")


@each_op
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=lambda d: str(d)[6:])
def test_slack_full_of_nan_changes_nothing_and_inactive_rows_are_exactly_zero(case, device, dtype):
    slack = 21
    drawn = drawn_for(case, device, dtype=dtype)
    zeros, cu = arrange(case, drawn, LENGTHS, range(4), TOKENS + slack, 4, fill=0.)
    nans, _ = arrange(case, drawn, LENGTHS, range(4), TOKENS + slack, 4)
    expected, actual = case.run(zeros, cu), case.run(nans, cu)
    assert_bitwise(actual, expected, "with NaN in the slack")
    for name, x in actual.items():
        assert x.isfinite().all(), f"{name} took NaN from the slack"
        if case.by_token(name):
            assert torch.count_nonzero(x[:, TOKENS:]) == 0, f"inactive rows of {name} are not 0"
            assert torch.count_nonzero(x[:, :TOKENS]) > 0


@each_op
def test_an_empty_sequence_passes_its_state_and_its_gradient_on(case, device):
    """cases.md: `cu=[0,0,64,64,129,129]`, in chunks of 16."""
    lengths = (0, 16, 0, 33, 0)
    drawn = case.draw(sum(lengths), len(lengths), device)
    results = case.run(drawn, cu_of(lengths, device))
    for i in (0, 2, 4):
        assert torch.equal(results["ht"][i], drawn["initial_state"][i])
        assert torch.equal(results["dh0"][i], drawn["dht"][i])


@each_op
def test_a_pack_of_empty_sequences_only(case, device):
    lengths = (0, 0)
    drawn = case.draw(7, 2, device)
    results = case.run(drawn, cu_of(lengths, device))
    assert torch.equal(results["ht"], drawn["initial_state"]) and torch.equal(results["dh0"], drawn["dht"])
    for name, x in results.items():
        if not case.by_sequence(name):
            assert torch.count_nonzero(x) == 0, name


@each_op
def test_no_tokens_at_all(case, device):
    """cases.md: x `[1, 0, D]` with `cu=[0,0]`: empty results, and no launch with an empty grid."""
    drawn = case.draw(0, 1, device)
    results = case.run(drawn, cu_of((0,), device))
    assert results["o"].shape == (1, 0, *case.output)
    assert torch.equal(results["ht"], drawn["initial_state"]) and torch.equal(results["dh0"], drawn["dht"])
    for name in case.parameters:
        assert torch.count_nonzero(results["d" + name]) == 0


@each_op
def test_runs_repeat_bit_for_bit(case, device):
    drawn, cu = drawn_for(case, device), cu_of(LENGTHS, device)
    assert_bitwise(case.run(drawn, cu), case.run(drawn, cu), "between two runs")


@each_op
def test_the_switch_changes_no_bit(case, device):
    drawn, cu = drawn_for(case, device, tokens=TOKENS + 5), cu_of(LENGTHS, device)
    expected = case.run(drawn, cu)
    assert_bitwise(case.run(drawn, cu, graph_capture=True), expected, "with graph_capture=True")
    assert_bitwise(case.run(drawn, cu, graph_capture=False), expected, "with graph_capture=False")


@each_op
def test_a_given_chunk_table_changes_no_bit(case, device):
    drawn, cu = drawn_for(case, device, tokens=TOKENS + 5), cu_of(LENGTHS, device)
    expected = case.run(drawn, cu)
    table = prepare_chunk_indices(cu, TOKENS + 5, 16)
    longer = prepare_chunk_indices(cu, TOKENS + 200, 16)
    exact = table[table[:, 0] >= 0]
    assert_bitwise(case.run(drawn, cu, chunk_indices=table), expected, "with the table given")
    assert_bitwise(case.run(drawn, cu, chunk_indices=longer), expected, "with a longer table")
    assert_bitwise(case.run(drawn, cu, chunk_indices=exact, graph_capture=False), expected, "with an exact table")


@each_op
def test_cu_seqlens_may_be_int64_and_is_never_modified(case, device):
    drawn, cu = drawn_for(case, device), cu_of(LENGTHS, device)
    before = cu.clone()
    expected = case.run(drawn, cu)
    assert torch.equal(cu, before)
    assert_bitwise(case.run(drawn, cu.long()), expected, "with int64 cu_seqlens")


@each_op
def test_cu_seqlens_changed_in_place_between_calls(case, device):
    """cases.md: the new values are used; metadata cached by identity would be stale."""
    drawn, cu = drawn_for(case, device), cu_of(LENGTHS, device)
    case.run(drawn, cu)
    other = (5, 30, 0, 1)
    cu.copy_(cu_of(other, device))
    assert_bitwise(case.run(drawn, cu), case.run(drawn, cu_of(other, device)), "after a change in place")


@each_op
def test_dense_rows_equal_packed_sequences_of_the_same_length(case, device):
    batch, tokens = 3, 21
    drawn = case.draw(batch * tokens, batch, device)
    dense = {name: x.reshape(batch, tokens, *x.shape[2:]) if case.by_token(name) else x for name, x in drawn.items()}
    expected, actual = case.run(drawn, cu_of((tokens,) * batch, device)), case.run(dense, None)
    actual = {name: x.reshape(expected[name].shape) for name, x in actual.items()}
    assert_bitwise(actual, expected, "between dense and packed")
