"""Whether a block is still what its graphs were captured from."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch._C._dynamo.guards import TensorGuards
from torch.nn.modules import module as nn_module

from graphlin.errors import StaleAddress

_data_ptr = torch.Tensor.data_ptr
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def hooks_of(block: nn.Module) -> Iterator[tuple[str, dict]]:
    """For each module of the block, and for all modules of the process, what it is called and a dict of its hooks."""
    for path, module in block.named_modules():
        for name in _HOOKS:
            yield path or "the block", getattr(module, name)
    for name in _HOOKS:
        yield "all modules (torch.nn.modules.module.register_module_...)", getattr(nn_module, f"_global{name}")


def _form(tensor: torch.Tensor) -> tuple[torch.dtype, torch.Size, tuple[int, ...], bool, bool]:
    return tensor.dtype, tensor.size(), tensor.stride(), tensor.is_conj(), tensor.is_neg()


def _may_equal_another(value: torch.Tensor | nn.Module | None) -> bool:
    """Whether another value in this one's place may compare equal to it. With an ordinary tensor of several elements none does:
    `==` gives several truths, of which Python makes an error, or is an error itself where the shapes do not fit. Nor with a
    module, but where its class defines `==`."""
    if isinstance(value, torch.Tensor):
        return value.numel() < 2 or type(value) not in (torch.Tensor, nn.Parameter)
    return type(value).__eq__ is not object.__eq__ and value is not None


def _attributes(module: nn.Module) -> "Mapping[str, Any] | _Computed":
    return vars(module) if "training" in vars(module) else _Computed(module)


class _Computed:
    """Attributes by name of a module that computes `training`: what torch.compile makes of a module has that one's."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __getitem__(self, name: str) -> Any:
        return getattr(self._module, name)


class Watch:
    """Where a block's submodules, parameters, buffers and hooks lay, and as what, when its graphs were captured."""

    def __init__(self, block: nn.Module) -> None:
        self.attributes = [_attributes(module) for module in block.modules()]  # `training` among them
        self.params = list(block.parameters())
        modules = [(path, module._modules) for path, module in block.named_modules()]
        parts = modules + list(hooks_of(block))
        owners = [(path, owner) for path, module in block.named_modules() for owner in (module._parameters, module._buffers)]
        self._empty = [owner for _, owner in parts + owners if not owner]  # most of them are, and any() is quick
        self._filled = [owner for _, owner in parts + owners if owner]
        self._filled_then = [owner.copy() for owner in self._filled]
        entries = [(owner, name, value, f"{path}.{name}".strip("."))
                   for path, owner in modules + owners for name, value in owner.items()]
        self._entries = entries
        self._alike = [(owner, name, value) for owner, name, value, _ in entries if _may_equal_another(value)]
        self._tensors = [*self.params, *block.buffers()]
        self._addresses = [t.data_ptr() for t in self._tensors]
        self._forms = list(map(_form, self._tensors))                      # a cast there and back may end at the same address
        self._guards = TensorGuards(*self._tensors, dynamic_dims_sizes=[list(t.size()) for t in self._tensors],
                                    dynamic_dims_strides=[list(t.stride()) for t in self._tensors])
        self.num_addresses = len(self._addresses)

    def check(self) -> None:
        """Raises StaleAddress where a graph would read memory, or do work, that is no longer the block's."""
        same = (not any(self._empty)
                and self._has_entries()
                and list(map(_data_ptr, self._tensors)) == self._addresses
                # The guards tell it in a tenth of the time, but also mind requires_grad, autocast and inference mode, which are
                # no concern here: their no is only a maybe.
                and (self._guards.check(*self._tensors) or self._has_forms()))
        if not same:
            raise StaleAddress(f"{self._moved()} was added, replaced or moved since the capture, so the graph would "
                               "use the old one; call refresh() after changing a block (weights copied in place need nothing)")

    def _has_entries(self) -> bool:
        """Whether the modules hold the very modules and tensors, under the same names, and no others.

        Dicts take what is identical for equal, which is quicker than to ask of each entry. Where something is not identical they
        use `==`, which between tensors is an error, but for those of `_may_equal_another`, which are asked one by one.
        """
        try:
            same = self._filled == self._filled_then
        except Exception:  # of any kind: a class may define its own
            return False
        return same and (not self._alike or all(owner.get(name) is value for owner, name, value in self._alike))

    def _has_forms(self) -> bool:
        """Whether dtypes, sizes, strides and lazy signs are the same."""
        return list(map(_form, self._tensors)) == self._forms

    def _moved(self) -> str:
        for owner, name, value, path in self._entries:
            if owner.get(name) is not value:
                return path
            if isinstance(value, torch.Tensor) and value.data_ptr() not in self._addresses:
                return path
        return "a submodule, parameter, buffer or hook of the block, or of all modules,"
