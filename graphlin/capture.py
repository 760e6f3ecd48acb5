"""capture(): the arguments, and the options that the rest is told."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from graphlin.agreement import check_group
from graphlin.backends import GraphBackend
from graphlin.graphed import GraphedBlock
from graphlin.packing import Dims, Signature, check_dims
from graphlin.recording import record
from graphlin.refusals import check_block
from graphlin.tier import Tier, largest_first


def capture(block: nn.Module, tier: Tier | Sequence[Tier], sample_args: Sequence = (),
            sample_kwargs: Mapping[str, Any] | None = None, *, dims: Dims | None = None, slots: int = 1,
            num_warmup_iters: int = 3, allow_unused_input: bool = False, fallback: str = "eager",
            max_padding: float | None = None, budget: int | None = None, copy_outputs: bool = True,
            backend: GraphBackend | None = None, group: ProcessGroup | None = None) -> GraphedBlock:
    """Wraps a block so that its calls are replayed from device graphs, forward and backward.

    A call of at most `tier.tokens` tokens in `tier.seqs` sequences is copied into static buffers (active rows only) and
    replayed, in the smallest tier that it fits; its outputs have the call's own sizes. Dense calls `[B, T, ...]` of a block
    that takes cu_seqlens run as B packed sequences. A forward that accepts `chunk_indices` gets the table that the graph
    builds, in place of the caller's. Buffers that the block writes in its forward are put back after the capture: only real
    calls count.

    Args:
        block: any module whose work stays on the device; one that takes no cu_seqlens (and has no dims) is captured at
            the exact shapes of its first call.
        tier: bound of the inputs to replay, or several (see `graphlin.ladder`): each mode is captured in all of them, the
            largest first, and they share a slot's memory.
        sample_args, sample_kwargs: a call to capture now, in the current mode; no other mode is captured then. Default:
            capture at the first eligible call of each mode (training, grad, autocast, requires_grad, structure,
            constants).
        dims: varying dims of arguments, as torch.export's dynamic_shapes:
            `{"x": {1: "tokens"}, "cu_seqlens": {0: "seqs+1"}}`. Default: by name and position: dim 0 of cu_seqlens is
            seqs+1, dim 0 of `*state*` is seqs, dim 1 of `[1, T, ...]` tensors with the first one's T is tokens, all else
            is constant.
        slots: forwards that may wait for their backward at once; each holds its own memory.
        num_warmup_iters: eager runs before a capture.
        allow_unused_input: let parameters and inputs get no gradient, rather than raise.
        max_padding: largest part of the tier's rows, in [0, 1), that may lie after a call's last one; a call that fills less
            runs eagerly (TierUnderflow). Default: no limit.
        fallback: "eager" runs a call that can't be replayed eagerly and counts it; "raise" raises its ReplayError.
        budget: bytes that the graphs may hold, pools and static tensors of all slots together. A mode whose price
            (`graphlin.price`) would pass it is refused before it is captured. Default: no limit.
        copy_outputs: False returns views of the static outputs, which the slot's next replay overwrites; each mode and tier
            then has outputs of its own.
        backend: what records the graphs; default: that of the block's device. Kernels inside are launched by the
            registered one, so register it too (`register_backend`).
        group: the process group over which the block itself exchanges tensors (docs/parallel.md). Its ranks then capture a mode
            at the same call, or none does and it runs eagerly everywhere (RanksDiffer). Default: each process decides alone.

    Raises:
        TypeError, ValueError: naming the argument.
        CaptureError: HostSync, ColdKernel, Resource or UnsupportedModule, from here with a sample, else from the first
            call. Nothing is left open and the block works eagerly.
        BackendUnavailable: no backend serves the device.

    >>> graphed = graphlin.capture(block, graphlin.Tier(tokens=4096, seqs=32))
    >>> graphed(x, cu_seqlens=cu).sum().backward()
    """
    tiers = _check_tiers(tier)
    _check_options(block, slots, num_warmup_iters, fallback, max_padding, budget)
    if group is not None:
        check_group(group)
    if group is not None and num_warmup_iters < 2:
        raise ValueError(f"num_warmup_iters: expected at least 2 with a group, found {num_warmup_iters}; the first exchanges "
                         "connect its ranks, which a capture can't")
    _check_chunk_sizes(block, tiers[0].chunk_size)
    check_block(block)
    check_dims(dims, Signature(block).names)
    args, kwargs = check_sample(sample_args, sample_kwargs)
    has_sample = bool(args or kwargs)
    recorder = partial(record, num_warmup_iters=num_warmup_iters, allow_unused=allow_unused_input, copy_outputs=copy_outputs)
    graphed = GraphedBlock(block, tiers, recorder, dims=dims, slots=slots, fallback=fallback, max_padding=max_padding,
                           budget=budget, backend=backend, group=group)
    if has_sample or any(True for _ in block.parameters()):
        graphed.find_backend(args, kwargs)
    if has_sample:
        graphed.prepare(args, kwargs)
    return graphed


def _check_tiers(tier: Tier | Sequence[Tier]) -> tuple[Tier, ...]:
    tiers = (tier,) if isinstance(tier, Tier) else tuple(tier) if isinstance(tier, Sequence) else ()
    if not tiers or not all(isinstance(t, Tier) for t in tiers):
        raise TypeError(f"tier: expected a graphlin.Tier or a sequence of them, found {tier!r}")
    sizes = sorted({t.chunk_size for t in tiers})
    if len(sizes) > 1:
        raise ValueError(f"tier: expected one chunk_size for all tiers, found {sizes}; results would depend on the tier")
    return largest_first(tiers)


def _check_options(block: nn.Module, slots: int, num_warmup_iters: int, fallback: str, max_padding: float | None,
                   budget: int | None) -> None:
    if not isinstance(block, nn.Module):
        raise TypeError(f"block: expected a torch.nn.Module, found {type(block).__name__}; wrap a function in a module")
    if fallback not in ("eager", "raise"):
        raise ValueError(f"fallback: expected 'eager' or 'raise', found {fallback!r}")
    for name, value, least in (("slots", slots, 1), ("num_warmup_iters", num_warmup_iters, 0)):
        if not isinstance(value, int) or value < least:
            raise ValueError(f"{name}: expected an int of at least {least}, found {value!r}")
    if max_padding is not None and not (isinstance(max_padding, int | float) and 0 <= max_padding < 1):
        raise ValueError(f"max_padding: expected a part of the tier's rows in [0, 1), or None, found {max_padding!r}")
    if budget is not None and (not isinstance(budget, int) or budget < 0):
        raise ValueError(f"budget: expected a number of bytes, an int of at least 0, or None, found {budget!r}")


def _check_chunk_sizes(block: nn.Module, chunk_size: int) -> None:
    for path, module in block.named_modules():
        size = getattr(module, "chunk_size", None)
        if isinstance(size, int) and size != chunk_size:
            raise ValueError(f"tier: chunk_size {chunk_size} differs from chunk_size {size} of {path or 'the block'}; the "
                             f"graph's chunk table would not be its table. Pass Tier(..., chunk_size={size}), or build the "
                             f"module with chunk_size={chunk_size}.")


def check_sample(args: Sequence, kwargs: Mapping[str, Any] | None) -> tuple[tuple, dict[str, Any]]:
    """sample_args and sample_kwargs as a tuple and a dict; raises TypeError where they are neither."""
    if isinstance(args, torch.Tensor) or not isinstance(args, Sequence):
        raise TypeError(f"sample_args: expected a tuple of the call's positional arguments, found {type(args).__name__}; "
                        "write (x,) for a single one")
    if not isinstance(kwargs, Mapping | None):
        raise TypeError(f"sample_kwargs: expected a mapping of argument names to values, found {type(kwargs).__name__}")
    return tuple(args), dict(kwargs or {})
