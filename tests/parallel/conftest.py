"""The devices that a world of processes runs on."""

import pytest
import torch


@pytest.fixture(scope="session")
def devices(request) -> tuple[torch.device, str]:
    """The device under test and the backend that exchanges its tensors; skipped, in any lane, where two of them are absent."""
    name = request.config.option.device
    if name == "host":
        return torch.device("cpu"), "gloo"
    kind, backend = {"cuda": ("cuda", "nccl"), "npu": ("npu", "hccl")}[name]
    found = torch.get_device_module(kind).device_count() if hasattr(torch, kind) else 0
    if found < 2:
        pytest.skip(f"needs two devices, found {found}")
    return torch.device(kind), backend
