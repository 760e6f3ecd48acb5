"""Whether a block is still what its graphs were captured from."""

import operator

import torch
from torch import nn

from graphlin.errors import StaleAddress


class Watch:
    """Where a block's submodules, parameters, buffers and hooks lay when its graphs were captured."""

    def __init__(self, block: nn.Module) -> None:
        self.modules = list(block.modules())
        self.params = list(block.parameters())
        owners = [(path, owner) for path, module in block.named_modules()
                  for owner in (module._parameters, module._buffers, module._modules)]
        entries = [(owner, name, value, f"{path}.{name}".strip(".")) for path, owner in owners
                   for name, value in owner.items()]
        hooks = [(path, owner) for path, module in block.named_modules()
                 for owner in (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks,
                               module._backward_pre_hooks)]
        entries += [(owner, name, hook, f"a hook of {path or 'the block'}") for path, owner in hooks
                    for name, hook in owner.items()]
        self._owners, self._names, self._values, self._paths = zip(*entries, strict=True) if entries else ((),) * 4
        self._dicts = [owner for _, owner in owners + hooks]
        self._counts = [len(owner) for owner in self._dicts]
        self._tensors = [*self.params, *block.buffers()]
        self._addresses = [t.data_ptr() for t in self._tensors]
        self._strides = [t.stride() for t in self._tensors]
        self.num_addresses = len(self._addresses)

    def check(self) -> None:
        """Raises StaleAddress where a graph would read memory, or do work, that is no longer the block's."""
        same = (all(map(operator.is_, map(dict.get, self._owners, self._names), self._values))
                and list(map(len, self._dicts)) == self._counts
                and list(map(torch.Tensor.data_ptr, self._tensors)) == self._addresses
                and list(map(torch.Tensor.stride, self._tensors)) == self._strides)
        if not same:
            raise StaleAddress(f"{self._moved()} was added, replaced or moved since the capture, so the graph would "
                               "use the old one; call refresh() after changing a block (weights copied in place need nothing)")

    def _moved(self) -> str:
        for owner, name, value, path in zip(self._owners, self._names, self._values, self._paths, strict=True):
            if owner.get(name) is not value:
                return path
            if isinstance(value, torch.Tensor) and value.data_ptr() not in self._addresses:
                return path
        return "a submodule, parameter, buffer or hook of the block"
