"""The contract of every packed op, bit for bit: what a result may depend on, and what inactive rows hold."""

import pytest
import torch

from graphlin.ops.chunks import prepare_chunk_indices
from tests.inputs import cu_of
from tests.ops.op_cases import BOUNDED_64, OP_CASES, arrange, assert_bitwise, each_full_op, sequence_results

LENGTHS = (3, 0, 16, 20)
TOKENS, SEQS = sum(LENGTHS), len(LENGTHS)
SLACK = 5

CASES = [*OP_CASES, BOUNDED_64]

each_op = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.name)
def packed(request, device):
    """An op, arguments with slack, cu_seqlens and the results; memory was not poisoned for these."""
    case = request.param
    drawn, cu = case.draw(TOKENS + SLACK, SEQS, device), cu_of(LENGTHS, device)
    return case, drawn, cu, case.run(drawn, cu)


def test_runs_repeat_bit_for_bit(packed):
    case, drawn, cu, expected = packed
    assert_bitwise(case.run(drawn, cu), expected, "between two runs")


@pytest.mark.parametrize("graph_capture", [True, False])
def test_the_switch_changes_no_bit(packed, graph_capture):
    case, drawn, cu, expected = packed
    assert_bitwise(case.run(drawn, cu, graph_capture=graph_capture), expected, f"with graph_capture={graph_capture}")


def test_a_given_chunk_table_changes_no_bit(packed):
    case, drawn, cu, expected = packed
    table = prepare_chunk_indices(cu, TOKENS + SLACK, case.options["chunk_size"])
    longer = prepare_chunk_indices(cu, TOKENS + 200, case.options["chunk_size"])
    exact = table[table[:, 0] >= 0]
    assert_bitwise(case.run(drawn, cu, chunk_indices=longer), expected, "with a longer table")
    assert_bitwise(case.run(drawn, cu, chunk_indices=exact, graph_capture=False), expected, "with an exact table")


def test_cu_seqlens_may_be_int64_and_is_never_modified(packed):
    case, drawn, cu, expected = packed
    wide = cu.long()
    assert_bitwise(case.run(drawn, wide), expected, "with int64 cu_seqlens")
    assert torch.equal(wide, cu_of(LENGTHS, cu.device)) and torch.equal(cu, wide)


@each_full_op
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda d: str(d)[6:])
def test_arguments_are_never_written(case, device, dtype):
    """Nor their version counters touched, by which autograd tells that a tensor it saved was modified."""
    drawn, cu = case.draw(7, 2, device, dtype), cu_of((3, 4), device)
    before = {name: (x.clone(), x._version) for name, x in drawn.items()}
    case.run(drawn, cu)
    for name, (values, version) in before.items():
        assert torch.equal(drawn[name], values) and drawn[name]._version == version, name


def test_negative_views_are_read_as_what_they_stand_for(packed):
    case, drawn, cu, expected = packed
    assert_bitwise(case.run({name: torch._neg_view(-x) for name, x in drawn.items()}, cu), expected, "from negative views")


def test_cu_seqlens_changed_in_place_between_calls(packed):
    """The new values are used; metadata cached by identity would be stale."""
    case, drawn, cu, _ = packed
    changing, other = cu.clone(), cu_of((5, 30, 0, 1), cu.device)
    case.run(drawn, changing)
    changing.copy_(other)
    assert_bitwise(case.run(drawn, changing), case.run(drawn, other), "after a change in place")


@each_op
def test_results_are_independent_of_the_tier(case, device):
    drawn, order = case.draw(TOKENS, SEQS, device), range(SEQS)
    expected = case.run(*arrange(case, drawn, LENGTHS, order, TOKENS, SEQS))
    for more_tokens, more_seqs in ((0, 3), (70, 9)):
        actual = case.run(*arrange(case, drawn, LENGTHS, order, TOKENS + more_tokens, SEQS + more_seqs))
        for name, x in actual.items():
            if case.by_token(name):
                actual[name] = x[:, :TOKENS]
            elif case.by_sequence(name):
                actual[name] = x[:SEQS]
        assert_bitwise(actual, expected, f"with {more_tokens} more tokens and {more_seqs} more sequences in the tier")


@each_op
def test_empty_sequences_between_others_change_nothing(case, device):
    drawn = case.draw(TOKENS, SEQS, device)
    expected = case.run(*arrange(case, drawn, LENGTHS, (0, 2, 3), TOKENS, 3))
    actual = case.run(*arrange(case, drawn, LENGTHS, (1, 0, 1, 1, 2, 1, 3), TOKENS, 7))
    for name, x in actual.items():
        if case.by_sequence(name):
            actual[name] = x[[1, 4, 6]]
    assert_bitwise(actual, expected, "with empty sequences in between")


@each_op
def test_results_are_independent_of_the_place_in_the_pack(case, device):
    drawn = case.draw(TOKENS, SEQS, device)
    alone, cu = arrange(case, drawn, LENGTHS, [3], LENGTHS[3], 1)
    expected = sequence_results(case, case.run(alone, cu), cu, 0)
    for order in ([3, 0, 1, 2], [2, 1, 0, 3]):
        moved, cu = arrange(case, drawn, LENGTHS, order, TOKENS, SEQS)
        actual = sequence_results(case, case.run(moved, cu), cu, order.index(3))
        assert_bitwise(actual, expected, f"at place {order.index(3)} of the pack")


@each_op
def test_results_are_independent_of_neighbours_full_of_nan(case, device):
    lengths, kept = (3, 20, 16), 1
    clean, cu = case.draw(sum(lengths), 3, device), cu_of(lengths, device)
    dirty = {name: x.clone() for name, x in clean.items()}
    for name, x in dirty.items():
        if case.by_token(name):
            x[:, :3] = x[:, 23:] = float("nan")
        elif case.by_sequence(name):
            x[[0, 2]] = float("nan")
    expected, actual = (sequence_results(case, case.run(x, cu), cu, kept) for x in (clean, dirty))
    assert_bitwise(actual, expected, "between neighbours of NaN")


@each_op
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda d: str(d)[6:])
def test_slack_full_of_nan_changes_nothing_and_inactive_rows_are_exactly_zero(case, device, dtype):
    slack = 21
    drawn = case.draw(TOKENS, SEQS, device, dtype)
    zeros, cu = arrange(case, drawn, LENGTHS, range(SEQS), TOKENS + slack, SEQS, fill=0.)
    nans, _ = arrange(case, drawn, LENGTHS, range(SEQS), TOKENS + slack, SEQS)
    expected, actual = case.run(zeros, cu), case.run(nans, cu)
    assert_bitwise(actual, expected, "with NaN in the slack")
    for name, x in actual.items():
        assert x.isfinite().all(), f"{name} took NaN from the slack"
        if case.by_token(name):
            assert torch.count_nonzero(x[:, TOKENS:]) == 0, f"inactive rows of {name} are not 0"
            assert torch.count_nonzero(x[:, :TOKENS]) > 0


@each_op
def test_an_empty_sequence_passes_its_state_and_its_gradient_on(case, device):
    """`cu=[0,0,64,64,129,129]`, scaled to chunks of 16."""
    lengths = (0, 16, 0, 17, 0)
    drawn = case.draw(sum(lengths), len(lengths), device)
    results = case.run(drawn, cu_of(lengths, device))
    for i in (0, 2, 4):
        assert torch.equal(results["ht"][i], drawn["initial_state"][i])
        assert torch.equal(results["dh0"][i], drawn["dht"][i])


@each_op
@pytest.mark.parametrize("graph_capture", [None, False])
@pytest.mark.parametrize("tokens", [7, 0])
def test_no_active_token_at_all(case, device, tokens, graph_capture):
    """Tokens `[1, 0, ...]` with `cu=[0,0]`: empty results, and no launch with an empty grid; rows without a chunk are zeroed."""
    drawn = case.draw(tokens, 2, device)
    results = case.run(drawn, cu_of((0, 0), device), graph_capture=graph_capture)
    assert results["o"].shape == (1, tokens, *case.output)
    assert torch.equal(results["ht"], drawn["initial_state"]) and torch.equal(results["dh0"], drawn["dht"])
    for name, x in results.items():
        if not case.by_sequence(name):
            assert torch.count_nonzero(x) == 0, name


@each_op
def test_dense_rows_equal_packed_sequences_of_the_same_length(case, device):
    batch, tokens = 2, 21
    drawn = case.draw(batch * tokens, batch, device)
    dense = {name: x.reshape(batch, tokens, *x.shape[2:]) if case.by_token(name) else x for name, x in drawn.items()}
    expected, actual = case.run(drawn, cu_of((tokens,) * batch, device)), case.run(dense, None)
    actual = {name: x.reshape(expected[name].shape) for name, x in actual.items()}
    assert_bitwise(actual, expected, "between dense and packed")
