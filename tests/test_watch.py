"""What a watch notices: another tensor in place of one, also one of the same value, and names and entries that come and go."""

import pytest
import torch
from torch import nn

from graphlin.errors import StaleAddress
from graphlin.watch import Watch


class Agreeing(torch.Tensor):
    """Says that it equals everything."""

    def __eq__(self, other):
        return True

    __hash__ = torch.Tensor.__hash__


class Incomparable(torch.Tensor):
    """Can't be compared."""

    def __eq__(self, other):
        raise TypeError("no ==")

    __hash__ = torch.Tensor.__hash__


class Configured(nn.Linear):
    """Equals what is made in the same way."""

    def __eq__(self, other):
        return isinstance(other, Configured) and self.in_features == other.in_features

    __hash__ = nn.Linear.__hash__


class Holder(nn.Module):
    def __init__(self, shape, device):
        super().__init__()
        self.inner = nn.Module()
        self.inner.first, self.inner.second = (nn.Parameter(torch.ones(shape, device=device)) for _ in range(2))
        self.inner.register_buffer("buffer", torch.ones(shape, device=device))
        self.inner.register_buffer("absent", None)


def refuses(watch, name):
    with pytest.raises(StaleAddress, match=f"{name} was added, replaced or moved since the capture"):
        watch.check()


SHAPES = [(8,), (2, 4), (1,), (), (1, 1), (0,), (1, 8)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", ["first", "buffer"])
@pytest.mark.parametrize("others", SHAPES, ids=str)
def test_another_tensor_is_noticed_though_it_may_have_the_same_value(device, shape, name, others):
    holder = Holder(shape, device)
    watch = Watch(holder)
    watch.check()
    old = getattr(holder.inner, name)
    new = torch.ones(others, device=device)
    setattr(holder.inner, name, nn.Parameter(new) if name == "first" else new)
    refuses(watch, f"inner.{name}")
    setattr(holder.inner, name, old)
    watch.check()


@pytest.mark.parametrize("shape", [(8,), (1,)])
def test_another_object_on_the_same_memory_is_noticed(device, shape):
    holder = Holder(shape, device)
    watch = Watch(holder)
    holder.inner.first = nn.Parameter(holder.inner.first.detach())
    refuses(watch, "inner.first")


def test_tensors_that_say_that_they_equal_all_are_noticed(device):
    holder = Holder((8,), device)
    holder.inner.buffer = torch.ones(8, device=device).as_subclass(Agreeing)
    watch = Watch(holder)
    watch.check()
    holder.inner.buffer = torch.ones(8, device=device).as_subclass(Agreeing)
    refuses(watch, "inner.buffer")


def test_a_tensor_that_can_not_be_compared_is_noticed(device):
    holder = Holder((8,), device)
    watch = Watch(holder)
    holder.inner.buffer = torch.ones(8, device=device).as_subclass(Incomparable)
    refuses(watch, "inner.buffer")


@pytest.mark.parametrize("new", [Configured(8, 8), None, nn.Module()], ids=["equal", "None", "another"])
def test_a_module_in_place_of_one_that_says_that_it_equals_it_is_noticed(device, new):
    holder = Holder((8,), device)
    holder.inner.linear = Configured(8, 8)
    watch = Watch(holder)
    watch.check()
    holder.inner.linear = new
    refuses(watch, "inner.linear")


def test_memory_that_is_read_with_another_sign_is_noticed(device):
    holder = Holder((8,), device)
    holder.complex, holder.negative = (nn.Parameter(torch.ones(8, dtype=dtype, device=device)) for dtype in
                                       (torch.complex64, torch.float32))
    watch = Watch(holder)
    watch.check()
    for name, other in (("complex", torch.conj), ("negative", torch._neg_view)):
        tensor = getattr(holder, name)
        tensor.data = other(tensor.data)
        refuses(watch, "a submodule, parameter, buffer or hook of the block, or of all modules,")
        tensor.data = other(tensor.data)
        watch.check()


def test_tensors_that_change_names_come_or_go_are_noticed(device):
    holder = Holder((1,), device)
    inner, watch = holder.inner, Watch(holder)
    inner.first, inner.second = inner.second, inner.first
    refuses(watch, "inner.first")
    inner.first, inner.second = inner.second, inner.first
    inner.absent = inner.buffer
    refuses(watch, "inner.absent")
    inner.absent, inner.buffer = None, None
    refuses(watch, "inner.buffer")
    holder = Holder((8,), device)
    watch = Watch(holder)
    holder.inner.register_buffer("new", None)
    refuses(watch, "a submodule, parameter, buffer or hook of the block, or of all modules,")
    del holder.inner.new, holder.inner.second
    refuses(watch, "inner.second")
    holder.inner.third = nn.Parameter(torch.ones(8, device=device))
    refuses(watch, "inner.second")
    assert watch.num_addresses == 3
