"""What a graph can't hold, told before anything is captured."""

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from graphlin.errors import UnsupportedModule
from graphlin.watch import hooks_of


def check_block(block: nn.Module, device: torch.device | None = None) -> None:
    """Raises UnsupportedModule, naming the module and the remedy.

    For hooks, FSDP, DistributedDataParallel and modules of torch.jit inside the block, torch.compile with CUDA graphs of its own,
    and, given the device, parameters and buffers elsewhere.
    """
    for path, module in block.named_modules():
        name = path or "the block"
        _check_compiled(name, module)
        _check_wrapper(name, module)
    for name, hooks in hooks_of(block):
        if hooks:
            raise UnsupportedModule(f"{name} has a hook, {next(iter(hooks.values()))!r}, which would run while the block is "
                                    "captured and never at a replay. Remove it, or register it on what capture returns: "
                                    "that is called each time.")
    for name, tensor in [*block.named_parameters(), *block.named_buffers()] if device is not None else ():
        if tensor.device != device:
            raise UnsupportedModule(f"{name} lies on {tensor.device}, the block on {device}: a graph reads one device. Move it "
                                    "there, or capture the parts on each device by themselves.")


def _check_compiled(name: str, module: nn.Module) -> None:
    for compiled in (module, module._compiled_call_impl):
        config = getattr(compiled, "get_compiler_config", lambda: None)()
        if isinstance(config, Mapping) and config.get("triton.cudagraphs"):
            raise UnsupportedModule(f"{name} is compiled by torch.compile with CUDA graphs of its own, "
                                    "which cannot be part of another graph. Compile it without them: no "
                                    "mode='reduce-overhead' or 'max-autotune' ('max-autotune-no-cudagraphs' is "
                                    "fine), no 'triton.cudagraphs' among the options.")


def _check_wrapper(name: str, module: nn.Module) -> None:
    if isinstance(module, nn.parallel.DistributedDataParallel):
        raise UnsupportedModule(f"{name} is wrapped in DistributedDataParallel, whose reductions between processes are no "
                                "part of a graph. Capture the module inside and wrap what capture returns: "
                                "DistributedDataParallel(graphlin.capture(module, tier)).")
    if isinstance(module, torch.jit.ScriptModule):
        raise UnsupportedModule(f"{name} is compiled by torch.jit, in whose modules no other parameters can stand for a capture. "
                                "Capture the module that it was made from.")
    if isinstance(module, _fsdp_classes()):
        raise UnsupportedModule(f"{name} is wrapped in FSDP, which gathers its parameters at other addresses for each call. "
                                "Capture what holds whole parameters, and shard with DistributedDataParallel or an "
                                "optimizer that shards its states (ZeroRedundancyOptimizer).")


def _fsdp_classes() -> tuple[Any, ...]:
    """Those of the module where it has been imported, which a wrapped block needs; the import itself takes a while."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return tuple(cls for cls in (getattr(fsdp, "FullyShardedDataParallel", None), getattr(fsdp, "FSDPModule", None)) if cls)
