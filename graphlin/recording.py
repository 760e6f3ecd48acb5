"""From a call to captured pairs: warm-up, and the order in which a mode's tiers are recorded in a slot."""

import gc
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any, NoReturn

import torch
from torch import nn
from torch.autograd.graph import _engine_run_backward
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from graphlin.backends import Graph
from graphlin.errors import CaptureError, Resource, UnsupportedModule
from graphlin.graphed import GraphedBlock, inlining
from graphlin.kernels.ahead import compiling_ahead
from graphlin.modes import INTEGERS, Call
from graphlin.packing import Leaf, Output, Role, output_roles
from graphlin.refusals import check_block
from graphlin.replay import Delivery, Pair
from graphlin.slots import Held, Slot
from graphlin.tier import Tier


def record(graphed: GraphedBlock, slot: Slot, call: Call, warm_up: bool, *, num_warmup_iters: int, allow_unused: bool,
           copy_outputs: bool, rehearsal: bool = False) -> tuple[Pair, ...]:
    """Warms up and records every tier of one mode in one slot, the largest first; after a failure nothing of it is left.

    A rehearsal, on tensors without memory, needs no warm-up and disturbs nothing.
    """
    check_block(graphed.block, slot.device)
    graphs: list[Graph] = []
    # cuBLAS keeps a workspace for each stream: one that is made in a capture would lie in its pool, and outlive it.
    iterations = num_warmup_iters if warm_up else 0 if slot.held else min(1, num_warmup_iters)
    with (_out_of_memory_typed(), nullcontext() if rehearsal else _undisturbed(graphed.block, slot.device),
          _fresh_leaves(graphed.block, call.mode.grad_params) as leaves, inlining()):
        try:
            return tuple([_Recording(graphed, slot, call, tier, leaves, graphs, allow_unused, copy_outputs).run(
                0 if rehearsal else iterations) for tier in call.mode.tiers])
        except BaseException:
            for graph in graphs:
                graph.reset()
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
    device memory in the midst of a capture. Anomaly detection would look for NaN inside, on the host.
    """
    devices = [] if device.type == "cpu" else [device]
    buffers = keep(block.buffers())
    caches, collects, grad = torch.is_autocast_cache_enabled(), gc.isenabled(), torch.is_grad_enabled()
    rng = torch.random.fork_rng(devices, device_type=device.type if devices else "cuda")
    with (rng, _saved_as_they_are(), torch.autograd.set_detect_anomaly(False), torch.inference_mode(False),
          torch.set_grad_enabled(grad)):  # leaving inference mode turns it on
        torch.set_autocast_cache_enabled(False)
        gc.disable()
        try:
            yield
        finally:
            if collects:
                gc.enable()
            torch.set_autocast_cache_enabled(caches)
            put_back(buffers)


def keep(tensors: Iterable[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Tensors with copies of their values."""
    return [(t, t.detach().clone()) for t in tensors]


def put_back(kept: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Writes the values of `keep` back. To autograd that is no change: a backward that waits reads what it saved."""
    for tensor, before in kept:
        if tensor.is_inference():
            with torch.inference_mode():
                tensor.copy_(before)
        else:
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(tensor):
                tensor.copy_(before)


def without_autocast(kind: str) -> AbstractContextManager:
    """Turns autocast off on devices of a type, if they have it: it is for forwards only."""
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()


@contextmanager
def _saved_as_they_are() -> Iterator[None]:
    """Inside, no hooks of the caller (activation checkpointing around the call) pack what the block saves for its backward."""
    hooks = []
    while (pair := torch._C._autograd._top_saved_tensors_default_hooks(True)) is not None:
        hooks.append(pair)
        torch._C._autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pair in reversed(hooks):
            torch._C._autograd._push_saved_tensors_default_hooks(*pair)


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


def _recomputation(what: str) -> UnsupportedModule:
    return UnsupportedModule(f"{what} is computed anew in the backward (activation checkpointing), which a graph cannot do with "
                             "the forward's random numbers. Capture without checkpointing inside: a smaller tier or fewer "
                             "slots save memory, and what capture returns may itself be checkpointed.")


@contextmanager
def _recomputation_refused(block: nn.Module) -> Iterator[None]:
    """A module of the block that is called in a backward is computed anew there, by activation checkpointing.

    It asks for the random state and sets it, on the host: the masks of a captured recomputation would not be the forward's.
    """
    def refuse(path: str, *args: Any) -> NoReturn:
        raise _recomputation(path or "the block")
    with ExitStack() as stack:
        for path, module in block.named_modules():
            stack.callback(module.register_forward_pre_hook(partial(refuse, path)).remove)
        yield


@dataclass
class _Recording:
    """The steps from static buffers to a captured pair of one tier; its graphs are added to `graphs`."""

    graphed: GraphedBlock
    slot: Slot
    call: Call
    tier: Tier
    leaves: list[nn.Parameter]
    graphs: list[Graph]
    allow_unused: bool
    copy_outputs: bool

    def __post_init__(self) -> None:
        self.backend, self.device = self.graphed.backend, self.slot.device
        self.layout, self.mode = self.call.mode.layout, self.call.mode
        names = {id(leaf): name for name, leaf in self.graphed.block.named_parameters()}
        self._names = names | {id(p): names[id(leaf)] for p, leaf in zip(self.mode.grad_params, self.leaves, strict=True)}

    def run(self, num_warmup_iters: int) -> Pair:
        pool, static = self._held_bytes()
        self.backend.synchronize(self.device)
        varies, seen = self.layout.varies and self.mode.output_roles is None, None
        with compiling_ahead(self.backend, runs=False) as ops_run:
            with self.backend.stream(self.slot.stream), nullcontext() if ops_run else suppress(Exception):
                seen = self._shapes_at_other_sizes() if varies else None
            inputs, self.statics = self._static_inputs()  # while kernels are compiled
        self.backend.synchronize(self.device)
        with self.backend.stream(self.slot.stream):
            if varies and seen is None:  # it may fail by the zeros that its ops returned, where their values would do
                seen = self._shapes_at_other_sizes()
            for i in range(num_warmup_iters):
                self._warm_up(is_first=i == 0, is_last=i == num_warmup_iters - 1)
        self.backend.synchronize(self.device)
        pair = self._forward(inputs, seen)
        self.backend.synchronize(self.device)
        self._share_memory(pair)
        new_pool, new_static = self._held_bytes()
        self.slot.held.append(Held(self.tier, self.slot.index, pair.backward is not None, new_pool - pool, new_static - static))
        return pair

    def _held_bytes(self) -> tuple[int, int]:
        return self.backend.pool_bytes(self.slot.pool, self.device), self.slot.static_bytes()

    def _static_inputs(self) -> tuple[list, list[torch.Tensor]]:
        """How a call's tensors are copied into static ones, and those as the block sees them; they hold the call's first rows."""
        sizes = self.tier.tokens, self.tier.seqs
        copies = [self.slot.copy(leaf.name, leaf.role, leaf.shape(*sizes), tensor.dtype)
                  for leaf, tensor in zip(self.layout.leaves, self.call.leaves, strict=True)]
        self.static_cu = None if self.layout.cu is None else copies[self.layout.cu].static
        inputs = [(i, copy, self.static_cu if i == self.layout.tokens else None)
                  for i, copy in enumerate(copies) if i != self.layout.cu]
        with torch.no_grad():
            tensors, cu = self._first_rows()
            for i, copy, static_cu in inputs:
                copy(tensors[i], cu, static_cu)
                if static_cu is not None:
                    copy.warm_up(static_cu)
        return inputs, [copy.static.detach().requires_grad_() if i in self.mode.grad_leaves else copy.static
                        for i, copy in enumerate(copies)]

    def _first_rows(self) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        """As much of the call as the tier holds, and its cu_seqlens."""
        tokens, seqs = min(self.call.sizes[0], self.tier.tokens), min(self.call.sizes[1], self.tier.seqs)
        tensors = [leaf.cut(tensor, tokens, seqs) for leaf, tensor in zip(self.layout.leaves, self.call.leaves, strict=True)]
        return tensors, None if self.static_cu is None else tensors[self.layout.cu].clamp(max=tokens)

    def _call_block(self) -> Any:
        return self.graphed.call_block(self.mode, self.statics, self.tier.tokens)

    def _other_sizes(self) -> tuple[int, int]:
        tokens, seqs = self.tier.tokens, self.tier.seqs
        return tokens - 16 if tokens > 16 else tokens + 16, seqs - 1 if seqs > 1 else seqs + 1

    def _shapes_at_other_sizes(self) -> list[torch.Size]:
        """Output shapes for an input of other sizes (zeros, no active row), which tell the varying dims of outputs.

        It requires the gradients that the call does: the block's kernels for that are compiled, and no others.
        """
        tokens, seqs = self._other_sizes()
        tensors = [torch.zeros(leaf.shape(tokens, seqs), dtype=tensor.dtype, device=self.device)
                   for leaf, tensor in zip(self.layout.leaves, self.call.leaves, strict=True)]
        for i in self.mode.grad_leaves:
            tensors[i].requires_grad_()
        out = self.graphed.call_block(self.mode, tensors, tokens)
        return [t.shape for t in tree_flatten(out)[0] if isinstance(t, torch.Tensor)]

    def _output_roles(self, shapes: list[torch.Size], seen: list[torch.Size]) -> list[tuple[Role, ...]]:
        return [output_roles(f"output {i}", shape, self.tier, other, self._other_sizes())
                for i, (shape, other) in enumerate(zip(shapes, seen, strict=True))]

    def _warm_up(self, is_first: bool, is_last: bool) -> None:
        """One eager run; in the last one a host sync is found before it could break the capture."""
        with self.backend.syncs_refused() if is_last else nullcontext():
            with compiling_ahead(self.backend) if is_first else nullcontext():
                out = self._call_block()
            outs = [t for t in tree_flatten(out)[0] if isinstance(t, torch.Tensor) and t.requires_grad]
            if outs and self.mode.needs_grad:
                self._gradients(outs, [torch.zeros_like(t) for t in outs])

    def _gradients(self, outs: list[torch.Tensor], grads: list[torch.Tensor]) -> Sequence[torch.Tensor | None]:
        """Gradients of the inputs that require them, then of the parameters."""
        wanted = [*(self.statics[i] for i in self.mode.grad_leaves), *self.leaves]
        self._check_leaves(outs, wanted)
        with without_autocast(self.device.type), _recomputation_refused(self.graphed.block):
            # What torch.autograd.grad(outs, wanted, grads, allow_unused=True) calls, past its check of the shapes of grads, for
            # which it imports SymPy: half a second or more in the first capture of a process (tests/test_recording.py).
            return _engine_run_backward(tuple(outs), tuple(grads), False, False, tuple(wanted), True, accumulate_grad=False)

    def _check_leaves(self, outs: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
        """What the block reads by a reference of its own would get no gradient from a replay, or too small a one."""
        known = {id(t) for t in wanted}
        for node in _nodes_of(outs):
            if node.name() == "CheckpointFunctionBackward":
                raise _recomputation("a part of the block")
            leaf = node.variable if node.name() == "torch::autograd::AccumulateGrad" else None
            if leaf is not None and id(leaf) not in known:
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

    def _check_count(self, count: int, before: Sequence | None) -> None:
        if before is not None and count != len(before):
            raise UnsupportedModule(f"the block returns {count} tensors in one run, at {self.tier.tokens} rows, and "
                                    f"{len(before)} in another: a graph repeats one run. Return as many for any number of rows; "
                                    "what decides otherwise belongs among the arguments.")

    def _check_inputs(self, versions: list[int]) -> None:
        """A write into an argument would end in the static copy, and the caller's tensor would not see it."""
        for leaf, static, version in zip(self.layout.leaves, self.statics, versions, strict=True):
            if static._version != version:
                raise UnsupportedModule(f"the block writes into its argument {leaf.name} in place, which a replay would do to "
                                        "its own copy; return the new value instead, or clone the argument first")

    def _share_memory(self, pair: Pair) -> None:
        """Lets later captures in the pool write what only this pair's graphs write, since one replay at a time has the slot."""
        gc.collect()  # what Python's garbage holds of the captured run would not be shared
        count = len(pair.static_outputs) if pair.copy_outputs else 0
        tensors = [*pair.static_outputs[:count], *(grad for _, grad in pair.input_grads), *pair.param_grads]
        shared = iter(self.backend.unowned(tensors))
        pair.static_outputs[:count] = [next(shared) for _ in range(count)]
        pair.input_grads = [(leaf, next(shared)) for leaf, _ in pair.input_grads]
        pair.param_grads = list(shared)

    def _forward(self, inputs: list, seen: list[torch.Size] | None) -> Pair:
        versions = [static._version for static in self.statics]
        buffers = [(b, b._version) for b in self.graphed.block.buffers() if not b.is_inference()]
        plain = [t for module in self.graphed.block.modules() for t in tree_leaves(vars(module))
                 if isinstance(t, torch.Tensor) and t.grad_fn is None]
        with self.backend.capture(pool=self.slot.pool, stream=self.slot.stream) as graph:
            self.graphs.append(graph)
            entry = next((copy.record(graph, static_cu) for _, copy, static_cu in inputs if static_cu is not None), None)
            out = self._call_block()
            flat, spec = tree_flatten(out)
            tensors = [t for t in flat if isinstance(t, torch.Tensor)]
            self._check_count(len(tensors), seen if self.mode.output_roles is None else self.mode.output_roles)
            self.mode.returns_integers |= any(t.dtype in INTEGERS for t in tensors)
            if self.mode.output_roles is None:
                shapes = [t.shape for t in tensors]
                self.mode.output_roles = [()] * len(tensors) if seen is None else self._output_roles(shapes, seen)
            delivery = self._deliver(tensors) if self.copy_outputs and self.static_cu is not None else None
        self._only_read = [b for b, version in buffers if b._version == version]
        self._check_addresses()
        self._check_inputs(versions)
        outputs = [Output(role, self.mode.needs_grad and t.requires_grad)
                   for role, t in zip(self.mode.output_roles, tensors, strict=True)]
        template = [None if isinstance(t, torch.Tensor) else t for t in flat]
        places = [i for i, t in enumerate(flat) if isinstance(t, torch.Tensor)]
        rebuild = itemgetter(0) if isinstance(out, torch.Tensor) else partial(_rebuild, spec, template, places)
        pair = Pair(graph, inputs, self.layout.cu, self.static_cu, outputs, [t.detach() for t in tensors], rebuild,
                    self.copy_outputs, delivery, entry, keeps=plain)
        if any(output.differentiable for output in outputs):
            self._backward(pair, tensors)
        return pair

    def _deliver(self, tensors: list[torch.Tensor]) -> Delivery | None:
        """Lets the graph deliver the first output that it can, and tells which that is."""
        for i, (tensor, roles) in enumerate(zip(tensors, self.mode.output_roles, strict=True)):
            if [role.kind for role in roles] == ["tokens"] and self.slot.deliver(tensor, roles[0].dim):
                return Delivery(i, Leaf.of(f"output {i}", roles[0], tensor), self.backend.allocator(tensor.dtype, tensor.device))
        return None

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
        pair.reads = [*self.graphed.block.parameters(), *self._only_read, *(copy.static for _, copy, _ in pair.inputs),
                      *(() if pair.static_cu is None else (pair.static_cu,)), *(() if pair.copy_outputs else pair.static_outputs)]

    def _check_used(self, grads: Sequence[torch.Tensor | None]) -> None:
        wanted = [*(self.layout.leaves[i].name for i in self.mode.grad_leaves),
                  *(self._names[id(leaf)] for leaf in self.leaves)]
        unused = [name for name, grad in zip(wanted, grads, strict=True) if grad is None]
        if unused and not self.allow_unused:
            raise CaptureError(f"no output depends on {', '.join(unused)}: expected a gradient for every parameter and "
                               "input that requires one. Turn requires_grad off there, or pass allow_unused_input=True.")


def _nodes_of(outs: Sequence[torch.Tensor]) -> Iterator[torch.autograd.graph.Node]:
    """All nodes of the autograd graph of `outs`."""
    nodes = [torch.autograd.graph.get_gradient_edge(out).node for out in outs]
    seen = set(nodes)
    while nodes:
        yield (node := nodes.pop())
        new = {following for following, _ in node.next_functions} - seen - {None}
        seen |= new
        nodes += new


def _rebuild(spec: Any, template: list, places: list[int], tensors: Sequence[torch.Tensor]) -> Any:
    """The block's own return value around a call's output tensors."""
    flat = list(template)
    for place, tensor in zip(places, tensors, strict=True):
        flat[place] = tensor
    return tree_unflatten(flat, spec)
