"""Worlds of processes, each of which runs many checks, since starting one takes seconds."""

import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.processes import end_process

Check = Callable[[int, torch.device], None]


def run_world(world: int, make_checks: Callable[[int], Mapping[str, Check]], folder: Path, device: torch.device,
              backend: str = "gloo", timeout: float = 60) -> dict[str, list[str]]:
    """Runs every check on every rank; name -> what went wrong on each rank, "" where nothing did.

    A check must exchange as much on every rank, whatever goes wrong on one: assertions come after its exchanges.
    """
    found = world if device.type == "cpu" else torch.get_device_module(device).device_count()
    if found < world:
        pytest.skip(f"needs {world} devices, found {found}")
    torch.multiprocessing.spawn(_worker, (world, make_checks, folder, device, backend, timeout), nprocs=world)
    told = [torch.load(folder / f"{rank}.pt") for rank in range(world)]
    return {name: [each.get(name, "was not run") for each in told] for name in told[0]}


def _worker(rank: int, world: int, make_checks: Callable[[int], Mapping[str, Check]], folder: Path, device: torch.device,
            backend: str, timeout: float) -> None:
    torch.set_num_threads(1)
    if device.type != "cpu":
        device = torch.device(device.type, rank)
        torch.get_device_module(device).set_device(device)
    dist.init_process_group(backend, init_method=f"file://{folder / 'store'}", rank=rank, world_size=world,
                            timeout=timedelta(seconds=timeout))
    told = {}
    for name, check in make_checks(world).items():
        try:
            check(rank, device)
            told[name] = ""
        except Exception:
            told[name] = traceback.format_exc()
    torch.save(told, folder / f"{rank}.pt")
    dist.destroy_process_group()
    end_process()


def assert_fine(told: Mapping[str, list[str]], name: str) -> None:
    """Asserts that nothing went wrong with a check on any rank."""
    wrong = [f"rank {rank}:\n{error}" for rank, error in enumerate(told[name]) if error]
    assert not wrong, "\n".join(wrong)
