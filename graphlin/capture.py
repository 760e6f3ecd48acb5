"""capture(): checks, warm-up, and the order in which a block's graphs are recorded."""

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from graphlin.backends import Graph, GraphBackend
from graphlin.errors import CaptureError, Resource, UnsupportedModule
from graphlin.graphed import Call, GraphedBlock, inlining
from graphlin.packing import Dims, Output, Signature, check_dims, output_roles
from graphlin.replay import Pair
from graphlin.slots import Slot
from graphlin.tier import Tier


def capture(block: nn.Module, tier: Tier | Sequence[Tier], sample_args: Sequence = (),
            sample_kwargs: Mapping[str, Any] | None = None, *, dims: Dims | None = None, slots: int = 1,
            num_warmup_iters: int = 3, allow_unused_input: bool = False, fallback: str = "eager",
            budget: int | None = None, copy_outputs: bool = True, backend: GraphBackend | None = None) -> GraphedBlock:
    """Wraps a block so that its calls are replayed from device graphs, forward and backward.

    A call of at most `tier.tokens` tokens in `tier.seqs` sequences is copied into static buffers (active rows only) and
    replayed; its outputs have the call's own sizes. Dense calls `[B, T, ...]` of a block that takes cu_seqlens run as B
    packed sequences. A forward that accepts `chunk_indices` gets the table that the graph builds, in place of the
    caller's. Buffers that the block writes in its forward are put back after the capture: only real calls count.

    Args:
        block: any module whose work stays on the device; one that takes no cu_seqlens (and has no dims) is captured at
            the exact shapes of its first call.
        tier: bound of the inputs to replay. More than one tier is not supported yet.
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
        fallback: "eager" runs a call that can't be replayed eagerly and counts it; "raise" raises its ReplayError.
        budget: bytes that the graphs may hold, pools and static tensors of all slots together. A mode whose price
            (`graphlin.price`) would pass it is refused before it is captured. Default: no limit.
        copy_outputs: False returns views of the static outputs, which the slot's next replay overwrites.
        backend: what records the graphs; default: that of the block's device. Kernels inside are launched by the
            registered one, so register it too (`register_backend`).

    Raises:
        TypeError, ValueError: naming the argument.
        CaptureError: HostSync, ColdKernel, Resource or UnsupportedModule, from here with a sample, else from the first
            call. Nothing is left open and the block works eagerly.
        BackendUnavailable: no backend serves the device.

    >>> graphed = graphlin.capture(block, graphlin.Tier(tokens=4096, seqs=32))
    >>> graphed(x, cu_seqlens=cu).sum().backward()
    """
    tiers = _check_tiers(tier)
    _check_options(block, slots, num_warmup_iters, fallback, tiers, budget)
    _check_compiled(block)
    check_dims(dims, Signature(block).names)
    args, kwargs = tuple(sample_args), dict(sample_kwargs or {})
    has_sample = bool(args or kwargs)
    record = partial(_record, num_warmup_iters=num_warmup_iters, allow_unused=allow_unused_input,
                     copy_outputs=copy_outputs)
    graphed = GraphedBlock(block, tiers, record, dims=dims, slots=slots, fallback=fallback, backend=backend,
                           budget=budget)
    if has_sample or any(True for _ in block.parameters()):
        graphed.find_backend(args, kwargs)
    if has_sample:
        graphed.prepare(args, kwargs)
    return graphed


def _check_tiers(tier: Tier | Sequence[Tier]) -> tuple[Tier, ...]:
    tiers = (tier,) if isinstance(tier, Tier) else tuple(tier) if isinstance(tier, Sequence) else ()
    if not tiers or not all(isinstance(t, Tier) for t in tiers):
        raise TypeError(f"tier: expected a graphlin.Tier, found {tier!r}")
    if len(tiers) > 1:
        raise ValueError(f"tier: only one tier is supported yet, found {len(tiers)}; pass the largest")
    return tiers


def _check_options(block: nn.Module, slots: int, num_warmup_iters: int, fallback: str, tiers: tuple[Tier, ...],
                   budget: int | None) -> None:
    if not isinstance(block, nn.Module):
        raise TypeError(f"block: expected a torch.nn.Module, found {type(block).__name__}; wrap a function in a module")
    if fallback not in ("eager", "raise"):
        raise ValueError(f"fallback: expected 'eager' or 'raise', found {fallback!r}")
    for name, value, least in (("slots", slots, 1), ("num_warmup_iters", num_warmup_iters, 0)):
        if not isinstance(value, int) or value < least:
            raise ValueError(f"{name}: expected an int of at least {least}, found {value!r}")
    if budget is not None and (not isinstance(budget, int) or budget < 0):
        raise ValueError(f"budget: expected a number of bytes, an int of at least 0, or None, found {budget!r}")
    for path, module in block.named_modules():
        size = getattr(module, "chunk_size", None)
        if isinstance(size, int) and size != tiers[0].chunk_size:
            raise ValueError(f"tier: chunk_size {tiers[0].chunk_size} differs from chunk_size {size} of "
                             f"{path or 'the block'}; the graph's chunk table would not be its table")


def _check_compiled(block: nn.Module) -> None:
    """Refuses torch.compile where it makes CUDA graphs of its own, which can't be captured inside another one."""
    for path, module in block.named_modules():
        for compiled in (module, module._compiled_call_impl):
            config = getattr(compiled, "get_compiler_config", lambda: None)()
            if isinstance(config, Mapping) and config.get("triton.cudagraphs"):
                raise UnsupportedModule(f"{path or 'the block'} is compiled by torch.compile with CUDA graphs of its own, "
                                        "which cannot be part of another graph. Compile it without them: no "
                                        "mode='reduce-overhead' or 'max-autotune' ('max-autotune-no-cudagraphs' is "
                                        "fine), no 'triton.cudagraphs' among the options.")


def _record(graphed: GraphedBlock, slot: Slot, call: Call, warm_up: bool, *, num_warmup_iters: int, allow_unused: bool,
            copy_outputs: bool, rehearsal: bool = False) -> Pair:
    """Warms up and records one mode in one slot; after a failure nothing of it is left.

    A rehearsal, on tensors without memory, needs no warm-up and disturbs nothing.
    """
    with (_out_of_memory_typed(), nullcontext() if rehearsal else _undisturbed(graphed.block, slot.device),
          _fresh_leaves(graphed.block, call.mode.grad_params) as leaves, inlining()):
        recording = _Recording(graphed, slot, call, leaves, allow_unused, copy_outputs)
        try:
            return recording.run(num_warmup_iters if warm_up and not rehearsal else 0)
        except BaseException:
            recording.abandon()
            raise


@contextmanager
def _out_of_memory_typed() -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise Resource(f"out of device memory in a capture or its warm-up; use a smaller tier or fewer slots. {error}") from error


@contextmanager
def _undisturbed(block: nn.Module, device: torch.device) -> Iterator[None]:
    """The random state, the autocast cache, garbage collection and the block's buffers are afterwards as before.

    Casts are not cached inside: the cache would outlive the graph's memory. Garbage collected inside might free
    device memory in the midst of a capture.
    """
    devices = [] if device.type == "cpu" else [device]
    buffers = [(buffer, buffer.clone()) for buffer in block.buffers()]
    caches, collects, grad = torch.is_autocast_cache_enabled(), gc.isenabled(), torch.is_grad_enabled()
    rng = torch.random.fork_rng(devices, device_type=device.type if devices else "cuda")
    with rng, torch.inference_mode(False), torch.set_grad_enabled(grad):  # leaving inference mode turns grad on
        torch.set_autocast_cache_enabled(False)
        gc.disable()
        try:
            yield
        finally:
            if collects:
                gc.enable()
            torch.set_autocast_cache_enabled(caches)
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)


@contextmanager
def _fresh_leaves(block: nn.Module, params: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Inside, leaves on the same memory stand in the block's modules for `params`; yields them in that order.

    Any autograd graph that is still alive holds the accumulation nodes of its parameters, bound to the stream that it
    was made on; a captured backward that met them would tie that stream to the capture, which CUDA refuses. Nor do the
    parameters' hooks belong in a graph: they run on what a replay returns.
    """
    leaves = {param: nn.Parameter(param.detach()) for param in params}
    places = [(module._parameters, name, param) for module in block.modules()
              for name, param in module._parameters.items() if param in leaves]
    for owner, name, param in places:
        owner[name] = leaves[param]
    try:
        yield list(leaves.values())
    finally:
        for owner, name, param in places:
            owner[name] = param


@dataclass
class _Recording:
    """The steps from static buffers to a captured pair."""

    graphed: GraphedBlock
    slot: Slot
    call: Call
    leaves: list[nn.Parameter]
    allow_unused: bool
    copy_outputs: bool

    def __post_init__(self) -> None:
        self.backend, self.device = self.graphed.backend, self.slot.device
        self.tier = self.graphed.tiers[0]
        self.layout, self.mode = self.call.mode.layout, self.call.mode
        self.graphs: list[Graph] = []
        names = {id(leaf): name for name, leaf in self.graphed.block.named_parameters()}
        self._names = names | {id(p): names[id(leaf)] for p, leaf in zip(self.mode.grad_params, self.leaves, strict=True)}

    def run(self, num_warmup_iters: int) -> Pair:
        inputs, self.statics = self._static_inputs()
        self.backend.synchronize(self.device)
        with self.backend.stream(self.slot.stream):
            seen = self._shapes_at_other_sizes()
            for i in range(num_warmup_iters):
                self._warm_up(is_last=i == num_warmup_iters - 1)
        self.backend.synchronize(self.device)
        pair = self._forward(inputs, seen)
        self.backend.synchronize(self.device)
        return pair

    def abandon(self) -> None:
        for graph in self.graphs:
            graph.reset()

    def _static_inputs(self) -> tuple[list, list[torch.Tensor]]:
        """How the call's tensors are copied into static ones, which hold them now, and those as the block sees them."""
        sizes = self.tier.tokens, self.tier.seqs
        copies = [self.slot.copy(leaf.name, leaf.role, leaf.shape(*sizes), tensor.dtype)
                  for leaf, tensor in zip(self.layout.leaves, self.call.leaves, strict=True)]
        self.static_cu = None if self.layout.cu is None else copies[self.layout.cu].static
        inputs = [(i, copy, self.static_cu if i == self.layout.tokens else None)
                  for i, copy in enumerate(copies) if i != self.layout.cu]
        cu = None if self.static_cu is None else self.call.leaves[self.layout.cu].contiguous()
        with torch.no_grad():
            for i, copy, static_cu in inputs:
                copy(self.call.leaves[i], cu, static_cu)
        return inputs, [copy.static.detach().requires_grad_() if i in self.mode.grad_leaves else copy.static
                        for i, copy in enumerate(copies)]

    def _call_block(self) -> Any:
        return self.graphed.call_block(self.mode, self.statics, self.tier.tokens)

    def _other_sizes(self) -> tuple[int, int]:
        tokens, seqs = self.tier.tokens, self.tier.seqs
        return tokens - 16 if tokens > 16 else tokens + 16, seqs - 1 if seqs > 1 else seqs + 1

    @torch.no_grad()
    def _shapes_at_other_sizes(self) -> list[torch.Size] | None:
        """Output shapes for an input of other sizes (zeros, no active row), which tell the varying dims of outputs."""
        if self.layout.tokens is None:
            return None
        tokens, seqs = self._other_sizes()
        tensors = [torch.zeros(leaf.shape(tokens, seqs), dtype=tensor.dtype, device=self.device)
                   for leaf, tensor in zip(self.layout.leaves, self.call.leaves, strict=True)]
        out = self.graphed.call_block(self.mode, tensors, tokens)
        return [t.shape for t in tree_flatten(out)[0] if isinstance(t, torch.Tensor)]

    def _warm_up(self, is_last: bool) -> None:
        """One eager run; in the last one a host sync is found before it could break the capture."""
        with self.backend.syncs_refused() if is_last else nullcontext():
            out = self._call_block()
            outs = [t for t in tree_flatten(out)[0] if isinstance(t, torch.Tensor) and t.requires_grad]
            if outs and self.mode.needs_grad:
                self._gradients(outs, [torch.zeros_like(t) for t in outs])

    def _gradients(self, outs: list[torch.Tensor], grads: list[torch.Tensor]) -> Sequence[torch.Tensor | None]:
        """Gradients of the inputs that require them, then of the parameters; autocast is for forwards only."""
        wanted = [*(self.statics[i] for i in self.mode.grad_leaves), *self.leaves]
        self._check_leaves(outs, wanted)
        kind = self.device.type
        with torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext():
            return torch.autograd.grad(outs, wanted, grads, allow_unused=True)

    def _check_leaves(self, outs: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
        """What the block reads by a reference of its own would get no gradient from a replay, or too small a one."""
        known = {id(t) for t in wanted}
        for leaf in _leaves_of(outs):
            if id(leaf) not in known:
                what = self._names.get(id(leaf), f"a tensor of shape {list(leaf.shape)} that requires grad")
                raise UnsupportedModule(f"the block reads {what} neither from its arguments nor as a parameter of its "
                                        "modules, so a replay would give it no gradient. Read it as an attribute of "
                                        "the module that owns it (in an nn.ParameterList, not a list), register it, or "
                                        "detach it.")

    def _check_addresses(self) -> None:
        """A leaf that no longer lies where its parameter does was given other memory by the forward."""
        for param, leaf in zip(self.mode.grad_params, self.leaves, strict=True):
            if leaf.data_ptr() != param.data_ptr():
                raise UnsupportedModule(f"the block's forward gives {self._names[id(leaf)]} other memory (assigns its "
                                        "data), which a graph cannot follow; write into it in place, under no_grad")

    def _check_inputs(self, versions: list[int]) -> None:
        """A write into an argument would end in the static copy, and the caller's tensor would not see it."""
        for leaf, static, version in zip(self.layout.leaves, self.statics, versions, strict=True):
            if static._version != version:
                raise UnsupportedModule(f"the block writes into its argument {leaf.name} in place, which a replay would do to "
                                        "its own copy; return the new value instead, or clone the argument first")

    def _forward(self, inputs: list, seen: list[torch.Size] | None) -> Pair:
        versions = [static._version for static in self.statics]
        with self.backend.capture(pool=self.slot.pool, stream=self.slot.stream) as graph:
            self.graphs.append(graph)
            out = self._call_block()
        self._check_addresses()
        self._check_inputs(versions)
        flat, spec = tree_flatten(out)
        tensors = [t for t in flat if isinstance(t, torch.Tensor)]
        roles = [()] * len(tensors) if seen is None else [
            output_roles(f"output {i}", t.shape, self.tier, seen[i], self._other_sizes())
            for i, t in enumerate(tensors)]
        outputs = [Output(role, self.mode.needs_grad and t.requires_grad)
                   for role, t in zip(roles, tensors, strict=True)]
        template = [None if isinstance(t, torch.Tensor) else t for t in flat]
        places = [i for i, t in enumerate(flat) if isinstance(t, torch.Tensor)]
        pair = Pair(graph, inputs, self.layout.cu, self.static_cu, outputs, [t.detach() for t in tensors],
                    partial(_rebuild, spec, template, places), self.copy_outputs)
        if any(output.differentiable for output in outputs):
            self._backward(pair, tensors)
        return pair

    def _backward(self, pair: Pair, tensors: list[torch.Tensor]) -> None:
        outs = []
        for i, (output, tensor) in enumerate(zip(pair.outputs, tensors, strict=True)):
            if not output.differentiable:
                continue
            if len(output.roles) > 1:
                raise UnsupportedModule(f"output {i} needs a gradient and has {len(output.roles)} varying dims; return "
                                        "a tensor with one, or detach it")
            outs.append(tensor)
            role = output.roles[0] if output.roles else None
            pair.grads.append(self.slot.copy(f"gradient of output {i}", role, tensor.shape, tensor.dtype))
        self.backend.synchronize(self.device)
        with self.backend.capture(pool=self.slot.pool, stream=self.slot.stream) as graph:
            self.graphs.append(graph)
            grads = self._gradients(outs, [copy.static for copy in pair.grads])
        self._check_used(grads)
        leaves = [self.layout.leaves[i] for i in self.mode.grad_leaves]
        pair.backward = graph
        pair.input_grads = list(zip(leaves, grads[:len(leaves)], strict=True))
        pair.param_grads, pair.params = list(grads[len(leaves):]), list(self.mode.grad_params)
        pair.frozen = [p for p in self.graphed.block.parameters() if not p.requires_grad]

    def _check_used(self, grads: Sequence[torch.Tensor | None]) -> None:
        wanted = [*(self.layout.leaves[i].name for i in self.mode.grad_leaves),
                  *(self._names[id(leaf)] for leaf in self.leaves)]
        unused = [name for name, grad in zip(wanted, grads, strict=True) if grad is None]
        if unused and not self.allow_unused:
            raise CaptureError(f"no output depends on {', '.join(unused)}: expected a gradient for every parameter and "
                               "input that requires one. Turn requires_grad off there, or pass allow_unused_input=True.")


def _leaves_of(outs: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The leaves in which the autograd graph of `outs` ends."""
    nodes = [torch.autograd.graph.get_gradient_edge(out).node for out in outs]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        if node.name() == "torch::autograd::AccumulateGrad":
            yield node.variable
        new = {following for following, _ in node.next_functions} - seen - {None}
        seen |= new
        nodes += new


def _rebuild(spec: Any, template: list, places: list[int], tensors: Sequence[torch.Tensor]) -> Any:
    """The block's own return value around a call's output tensors."""
    if len(tensors) == len(template) == 1 and spec.is_leaf():
        return tensors[0]
    flat = list(template)
    for place, tensor in zip(places, tensors, strict=True):
        flat[place] = tensor
    return tree_unflatten(flat, spec)
