"""A block of code in which the host must not wait for the device."""

import warnings
from contextlib import contextmanager

import torch

from graphlin.backends import get_backend

SYNCS = ("item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__", "__array__", "nonzero")


@contextmanager
def no_host_sync(device, monkeypatch):
    """Raises where the host reads a device value, other than inside the interpreter that stands for a kernel."""
    if device.type != "cpu":
        module = torch.get_device_module(device)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")     # the mode is a prototype, says PyTorch
                module.set_sync_debug_mode("error")
            yield
        finally:
            module.set_sync_debug_mode("default")
        return
    with monkeypatch.context() as patch:
        launching = _count_launches(patch, get_backend(device))
        for name in SYNCS:
            patch.setattr(torch.Tensor, name, _refusing(name, getattr(torch.Tensor, name), launching))
        yield


def _count_launches(patch, backend):
    depth, launch = [0], backend.launch

    def counted(*args, **kwargs):
        depth[0] += 1
        try:
            return launch(*args, **kwargs)
        finally:
            depth[0] -= 1

    patch.setattr(backend, "launch", counted)
    return depth


def _refusing(name, original, launching):
    def method(self, *args, **kwargs):
        if not launching[0]:
            raise AssertionError(f"host sync: Tensor.{name}")
        return original(self, *args, **kwargs)
    return method
