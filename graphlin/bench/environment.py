"""Where a run is made: versions, device, clocks, commit."""

import subprocess
import sys
from dataclasses import asdict
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

import graphlin
from graphlin.bench.results import Environment
from graphlin.bench.setting import Setting

BUSY_PRODUCTS = 700  # about a second on an H200
_NVIDIA_FACTS = ("driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem", "power.limit", "temperature.gpu")


def environment(setting: Setting, commit: str | None) -> Environment:
    """Of a run that starts now. `commit` overrides what git says of the package's folder."""
    device, sizes = setting.device, asdict(setting.scale.sizes)
    names = ["torch", "triton", *dict.fromkeys(name for peer in setting.peers for name in peer.distributions)]
    on_cpu = device.type == "cpu"
    return Environment(
        date=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"), commit=commit or _commit(),
        device="CPU, kernels run by Triton's interpreter" if on_cpu
        else torch.get_device_module(device).get_device_name(device),
        clock="wall time on a CPU, no measure of an accelerator" if on_cpu else "device events",
        versions={"graphlin": graphlin.__version__, **{name: _version(name) for name in names}},
        sizes={name: value if isinstance(value, int) else str(value).removeprefix("torch.") for name, value in sizes.items()},
        device_facts=_nvidia_facts(device) if device.type == "cuda" else {},
        command=" ".join(["python -m graphlin", *sys.argv[1:]]))


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "not installed"


def _commit() -> str:
    return _output_of("git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty") or "unknown"


def _nvidia_facts(device: torch.device) -> dict[str, str]:
    """Read while the device multiplies matrices: an idle one clocks down."""
    x = torch.ones(8192, 8192, device=device, dtype=torch.bfloat16)
    for _ in range(BUSY_PRODUCTS):
        x @ x
    index = torch.cuda.current_device() if device.index is None else device.index
    uuid = f"GPU-{torch.cuda.get_device_properties(index).uuid}"
    found = _output_of("nvidia-smi", f"--id={uuid}", f"--query-gpu={','.join(_NVIDIA_FACTS)}", "--format=csv,noheader")
    return dict(zip(_NVIDIA_FACTS, found.split(", "), strict=True)) if found else {}


def _output_of(*command: str) -> str:
    """What a program prints, or nothing where it is missing or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
