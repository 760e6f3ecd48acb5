"""Which dims are tokens and sequences, by name and position or by dims=, and how calls are read."""

import pytest
import torch
from torch import nn

from graphlin.errors import StructureMismatch, UnsupportedModule
from graphlin.packing import (
    Role,
    Signature,
    check_dims,
    flatten,
    flatten_batch,
    make_layout,
    output_roles,
    rebuild,
)
from graphlin.tier import Tier

TOKENS, SEQS, ENDS = Role(1, "tokens"), Role(0, "seqs"), Role(0, "seqs", 1)


class Block(nn.Module):
    def forward(self, x, cu_seqlens=None, initial_state=None, scale=1.0, *, extra=None, chunk_indices=None):
        raise AssertionError("only read")


def layout(dims=None, **arguments):
    signature = Signature(Block())
    leaves, structure = flatten(signature.bind((), arguments))
    return make_layout(signature.names, structure, leaves, dims), leaves


def roles(dims=None, **arguments):
    return {leaf.name: leaf.role for leaf in layout(dims, **arguments)[0].leaves}


def zeros(*shape):
    return torch.zeros(shape)


def test_roles_by_name_and_position():
    assert roles(x=zeros(1, 6, 4), cu_seqlens=zeros(3), extra=zeros(1, 6), initial_state=zeros(2, 5)) == {
        "x": TOKENS, "cu_seqlens": ENDS, "extra": TOKENS, "initial_state": SEQS}


def test_equal_sizes_do_not_make_a_role():
    found = roles(x=zeros(1, 6, 6), cu_seqlens=zeros(7), extra=zeros(6, 6), initial_state=zeros(6, 6))
    assert found == {"x": TOKENS, "cu_seqlens": ENDS, "extra": None, "initial_state": SEQS}
    assert roles(x=zeros(1, 4), cu_seqlens=zeros(2), initial_state=zeros(1, 4))["initial_state"] == SEQS


def test_a_first_argument_called_hidden_states_holds_tokens():
    class Layer(nn.Module):
        def forward(self, hidden_states, cu_seqlens, encoder_hidden_states):
            raise AssertionError
    signature = Signature(Layer())
    leaves, structure = flatten(signature.bind((zeros(1, 6, 4), zeros(3), zeros(1, 6, 2)), {}))
    found = make_layout(signature.names, structure, leaves, None)
    assert [leaf.role for leaf in found.leaves] == [TOKENS, ENDS, TOKENS]


def test_states_in_a_tree_are_named_by_path():
    found = roles(x=zeros(1, 6, 4), cu_seqlens=zeros(3), initial_state=(zeros(2, 5), {"conv": [zeros(2, 3)]}))
    assert found["initial_state[0]"] == found["initial_state[1]['conv'][0]"] == SEQS


def test_without_cu_seqlens_every_shape_is_constant():
    assert set(roles(x=zeros(1, 6, 4), extra=zeros(1, 6)).values()) == {None}


def test_dims_say_all():
    dims = {"x": {0: "tokens"}, "extra": ({0: "seqs"}, None), "cu_seqlens": {0: "seqs+1"}}
    found = roles(dims, x=zeros(6, 4), cu_seqlens=zeros(3), extra=(zeros(2, 5), zeros(1, 6)), initial_state=zeros(2, 5))
    assert found == {"x": Role(0, "tokens"), "cu_seqlens": ENDS, "extra[0]": SEQS, "extra[1]": None,
                     "initial_state": None}


def test_sizes_of_a_call():
    plan, leaves = layout(x=zeros(1, 6, 4), cu_seqlens=zeros(3), initial_state=zeros(2, 5), extra=zeros(9))
    assert plan.sizes(leaves) == (6, 2)
    assert plan.sizes([zeros(1, 60, 4), zeros(1), zeros(0, 5), zeros(9)]) == (60, 0)
    assert plan.leaves[0].shape(64, 8) == (1, 64, 4) and plan.leaves[1].shape(64, 8) == (9,)


@pytest.mark.parametrize("change, message", [
    (dict(x=zeros(1, 6, 5)), r"x: expected shape \[1, 6, 4\] as captured, found \[1, 6, 5\]"),
    (dict(x=zeros(2, 6, 4)), "x: expected shape"),
    (dict(x=zeros(6)), "x: expected shape"),
    (dict(cu_seqlens=zeros()), r"cu_seqlens: expected shape \[1\] as captured, found \[\]"),
    (dict(initial_state=zeros(3, 5)), r"initial_state: expected shape \[2, 5\] as captured, found \[3, 5\]"),
    (dict(extra=zeros(8)), r"extra: expected shape \[9\]"),
])
def test_other_constant_sizes_do_not_match(change, message):
    arguments = dict(x=zeros(1, 6, 4), cu_seqlens=zeros(3), initial_state=zeros(2, 5), extra=zeros(9))
    plan, _ = layout(**arguments)
    leaves, _ = flatten(list((arguments | change).values()))
    with pytest.raises(StructureMismatch, match=message):
        plan.sizes(leaves)


@pytest.mark.parametrize("arguments, message", [
    (dict(x=zeros(2, 6, 4), cu_seqlens=zeros(3)), r"no argument holds tokens: expected the first tensor to be \[1, T"),
    (dict(x=zeros(1, 6), cu_seqlens=zeros(3), initial_state=zeros(4, 5)), r"initial_state: expected shape \[2, 5\] for"),
    (dict(x=zeros(1, 6, 4), cu_seqlens=zeros()), r"cu_seqlens: expected shape \[1\] for 6 tokens in 0 sequences, found \[\]"),
])
def test_contradicting_sizes_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        layout(**arguments)


@pytest.mark.parametrize("dims, message", [
    ({"y": {0: "tokens"}}, "dims: the block's forward has no argument 'y'; it has x, cu_seqlens"),
    ({"x": {1: "token"}}, r"dims\['x'\]: expected roles among .* found 'token'"),
])
def test_wrong_dims_are_named(dims, message):
    with pytest.raises(ValueError, match=message):
        check_dims(dims, Signature(Block()).names)


@pytest.mark.parametrize("dims, message", [
    ({"x": {5: "tokens"}}, r"dims\['x'\]: expected a dim in \[0, 3\), found 5"),
    ({"x": {0: "seqs", 1: "tokens"}}, r"dims\['x'\]: expected one varying dim a tensor"),
])
def test_dims_that_do_not_fit_the_tensor_are_named(dims, message):
    with pytest.raises(ValueError, match=message):
        layout(dims, x=zeros(1, 6, 4))


def test_binding_is_that_of_a_call():
    signature = Signature(Block())
    assert signature.bind((1, 2), dict(extra=3)) == [1, 2, None, 1.0, 3, None]
    for args, kwargs, message in (((), {}, "missing a required argument: 'x'"),
                                  ((1,), dict(y=2), "unexpected keyword.*'y'"),
                                  ((1,), dict(x=2), "multiple values"),
                                  ((1,) * 5, {}, "too many positional")):
        with pytest.raises(TypeError, match=message):
            signature.bind(args, kwargs)


def test_variadic_forwards_bind_too():
    class Any(nn.Module):
        def forward(self, first, /, *rest, flag=False, **more):
            return first, rest, flag, more
    block, signature = Any(), Signature(Any())
    leaves, structure = flatten(signature.bind((1, 2, 3), dict(a=4)))
    assert not leaves
    assert signature.call(block, rebuild(structure, leaves)) == (1, (2, 3), False, {"a": 4})


def test_structure_tells_constants_and_their_types_apart():
    x = zeros(1)
    keys = [flatten([x, value])[1] for value in (1, True, 1.0, None, "1", (1,), [1], (x,), {"a": x}, {"b": x})]
    assert len(set(keys)) == len(keys)
    assert flatten([x, {"a": (1, x)}])[1] == flatten([zeros(2), {"a": (1, zeros(3))}])[1]


def test_an_argument_that_cannot_be_compared_is_named_by_type():
    with pytest.raises(TypeError, match="an argument of type set is neither"):
        flatten([{1, 2}])


def test_a_dense_call_becomes_equal_sequences():
    signature = Signature(Block())
    x = torch.arange(24.0).reshape(2, 3, 4)
    values = signature.bind((x,), dict(extra=zeros(2, 3), initial_state=zeros(2, 3)))
    assert flatten_batch(values, signature, None) == (2, 3)
    assert values[0].shape == (1, 6, 4) and values[1].tolist() == [0, 3, 6]
    assert values[2].shape == (2, 3), "a state has one row a sequence already"
    assert values[4].shape == (1, 6)
    assert flatten_batch(values, signature, None) is None


@pytest.mark.parametrize("shape, other, expected", [
    ((1, 64, 8), (1, 48, 8), (Role(1, "tokens"),)),
    ((4, 64), (3, 64), (Role(0, "seqs"),)),
    ((5,), (4,), (Role(0, "seqs", 1),)),
    ((4, 64), (3, 48), (Role(0, "seqs"), Role(1, "tokens"))),
    ((64, 64), (64, 64), ()),
])
def test_varying_output_dims_are_those_that_vary(shape, other, expected):
    assert output_roles("output", torch.Size(shape), Tier(64, 4), torch.Size(other), (48, 3)) == expected


def test_an_output_that_follows_neither_is_refused():
    with pytest.raises(UnsupportedModule, match=r"output 1 has shape \[67\] at 64 tokens in 4 sequences.*0 is neither"):
        output_roles("output 1", torch.Size([67]), Tier(64, 4), torch.Size([50]), (48, 3))
    with pytest.raises(UnsupportedModule, match=r"output 1 has shape \[1, 64\] at .* and \[48\] at 48.*expected as many dims"):
        output_roles("output 1", torch.Size([1, 64]), Tier(64, 4), torch.Size([48]), (48, 3))
