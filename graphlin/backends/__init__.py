"""Devices behind one protocol. Importing this package imports no device library and no Triton."""

from importlib import import_module

import torch

from graphlin.backends.protocol import Allocate, CompileAhead, Entry, Graph, GraphBackend, LaunchRecord, PoolModel, Prepared
from graphlin.errors import BackendUnavailable

__all__ = ["Allocate", "CompileAhead", "Entry", "Graph", "GraphBackend", "LaunchRecord", "PoolModel", "Prepared",
           "get_backend", "register_backend"]

_BUILT_IN = {"cpu": ("graphlin.backends.host", "HostBackend"), "cuda": ("graphlin.backends.cuda", "CudaBackend"),
             "npu": ("graphlin.backends.npu", "NpuBackend"), "meta": ("graphlin.backends.meta", "MetaBackend")}
_backends: dict[str, GraphBackend] = {}
_available: dict[str, GraphBackend] = {}  # those that said they can run: not asked again at each launch


def register_backend(backend: GraphBackend) -> None:
    """Makes `backend` serve every tensor on devices of type `backend.device_type`, replacing an earlier one.

    Raises TypeError if the object lacks a part of `GraphBackend`.

    >>> register_backend(MyBackend())
    >>> graphlin.capture(block.to("my_device"), tier)
    """
    missing = [name for name in _protocol_members() if not hasattr(backend, name)]
    if missing:
        raise TypeError(f"backend: {type(backend).__name__} lacks {', '.join(missing)} of graphlin.backends.GraphBackend")
    _backends[backend.device_type] = backend


def get_backend(device: torch.device | str) -> GraphBackend:
    """The backend of a device or device type; raises BackendUnavailable where none can serve it.

    >>> get_backend("cuda").num_cores(torch.device("cuda", 0))
    132
    """
    device_type = device.type if isinstance(device, torch.device) else device.partition(":")[0]
    backend = _backends.get(device_type)
    if backend is not None and _available.get(device_type) is backend:
        return backend
    if backend is None:
        if device_type not in _BUILT_IN:
            known = ", ".join(sorted({*_BUILT_IN, *_backends}))
            raise BackendUnavailable(f"no graphlin backend for device type {device_type!r}; there are: {known}. "
                                     "Move the tensors, or register one with graphlin.backends.register_backend.")
        module, name = _BUILT_IN[device_type]
        backend = _backends[device_type] = getattr(import_module(module), name)()
    if not backend.is_available():
        raise BackendUnavailable(f"the {device_type!r} backend cannot run in this process: {_remedy(device_type)}")
    _available[device_type] = backend
    return backend


def _protocol_members() -> list[str]:
    return ["device_type", *(name for name in vars(GraphBackend) if not name.startswith("_"))]


def _remedy(device_type: str) -> str:
    if device_type == "cpu":
        return ("Triton was imported without its interpreter (or for an accelerator). Set TRITON_INTERPRET=1 before the "
                "first import, or move the tensors to the accelerator.")
    return f"no {device_type} device or no Triton for it is installed; install graphlin[{device_type}] on a machine with one."
