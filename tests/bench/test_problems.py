import pytest
import torch

import graphlin
from graphlin.bench.problems import OUR_OPS, PROBLEMS, random_cuts
from graphlin.bench.results import BOTH, FORWARD
from tests.bench.conftest import TINY


def test_cuts_are_distinct_and_the_same_every_time(device):
    cu = random_cuts(20, 5, device)
    assert cu.dtype == torch.int32 and len(cu) == 6
    assert cu[0] == 0 and cu[-1] == 20 and (cu.diff() > 0).all()
    assert torch.equal(cu, random_cuts(20, 5, device))
    assert random_cuts(4, 4, device).tolist() == [0, 1, 2, 3, 4]
    assert random_cuts(7, 1, device).tolist() == [0, 7]


def test_cuts_are_padded_by_sequences_of_no_token(device):
    assert random_cuts(7, 1, device, entries=4).tolist() == [0, 7, 7, 7]


@pytest.mark.parametrize(("tokens", "seqs"), [(3, 4), (3, 0)])
def test_more_sequences_than_tokens_are_refused(device, tokens, seqs):
    with pytest.raises(ValueError, match=f"seqs: expected between 1 and the 3 tokens, found {seqs}"):
        random_cuts(tokens, seqs, device)


@pytest.mark.parametrize("op", PROBLEMS)
def test_every_problem_is_an_op_of_ours_with_all_gradients(device, op):
    problem = PROBLEMS[op](20, random_cuts(20, 2, device), TINY.sizes)
    output, *grads = problem.work(OUR_OPS[op], BOTH)()
    assert torch.equal(problem.work(OUR_OPS[op], FORWARD)()[0], output)
    assert problem.names(BOTH) == ["output", *(f"gradient of {name}" for name in problem.tensors)]
    assert all(g.shape == t.shape and g.abs().sum() > 0 for g, t in zip(grads, problem.tensors.values(), strict=True))


def test_the_problem_is_the_documented_one(device):
    problem = PROBLEMS["conv"](20, random_cuts(20, 2, device), TINY.sizes)
    x, weight = problem.tensors.values()
    expected, _ = graphlin.causal_conv1d(x, weight, activation="silu", cu_seqlens=problem.options["cu_seqlens"])
    found, dx, _ = problem.work(OUR_OPS["conv"], BOTH)()
    assert torch.equal(found, expected)
    assert torch.equal(dx, torch.autograd.grad(expected, x, problem.grad)[0])
