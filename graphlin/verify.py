"""Proof that a captured block computes what the block computes: poisoned replay against eager, launches, addresses."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from graphlin.backends import get_backend
from graphlin.graphed import GraphedBlock
from graphlin.modes import Call
from graphlin.replay import Pair
from graphlin.tier import Tier

# Root mean square of the difference over that of the eager result, at exact shapes: matrix libraries choose their
# kernels by the number of rows, so the last bits differ from the tier's.
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 5e-3}


@dataclass
class Report:
    """What `verify` found. `ok` is whether every check passed; printing the report shows them.

    `errors` has the relative RMS difference at exact shapes by tensor, `mismatches` a line for each failed check,
    `launches` host launches by (path, direction), path being "eager" (at the call's shapes), "graph" (the replay alone)
    or "copy in", and `addresses` the number of parameters and buffers found where the graph reads them.
    """

    tier: Tier
    tokens: int
    seqs: int
    errors: dict[str, float] = field(default_factory=dict)
    mismatches: list[str] = field(default_factory=list)
    launches: dict[tuple[str, str], int] = field(default_factory=dict)
    addresses: int = 0

    @property
    def ok(self) -> bool:
        return not self.mismatches

    def __str__(self) -> str:
        worst = max(self.errors.values(), default=0.0)
        found = self.mismatches or ["bitwise equal to eager at the tier's shapes; largest relative difference at exact "
                                    f"shapes {worst:.1e}"]
        lines = [f"{'ok' if self.ok else 'MISMATCH'}: {self.tokens} tokens in {self.seqs} sequences, at {self.tier}",
                 *(f"  {line}" for line in found), f"  {self.addresses} addresses unchanged"]
        lines += [f"  host launches, {path} {direction}: {count}" for (path, direction), count in self.launches.items()]
        return "\n".join(lines)


def verify(graphed: GraphedBlock, *args: Any, **kwargs: Any) -> Report:
    """Replays the call `graphed(*args, **kwargs)` into NaN-filled outputs and compares it with the block run eagerly.

    Bit for bit at the tier's shapes, outputs and, in grad mode, gradients of inputs and parameters; within tolerance at
    the call's own shapes (a block with dropout differs there: use eval()). Host launches are counted by profiler
    events. The random state and the block's buffers are as before afterwards. Captures the call's mode if need be.

    Raises the ReplayError that keeps the call from being replayed.

    >>> print(graphlin.verify(graphed, x, cu_seqlens=cu))
    """
    if not isinstance(graphed, GraphedBlock):
        raise TypeError(f"graphed: expected what graphlin.capture returns, found {type(graphed).__name__}")
    with graphed.acquired(args, kwargs) as (call, slot, pair):
        check = _Check(graphed, call, pair, slot.device)
        try:
            check.compare()
            graphed.check_addresses()
        finally:
            check.restore()
    return check.report


class _Check:
    def __init__(self, graphed: GraphedBlock, call: Call, pair: Pair, device: torch.device) -> None:
        self.graphed, self.call, self.pair, self.device = graphed, call, pair, device
        self.report = Report(call.tier, *call.sizes, addresses=graphed.num_addresses)
        self.buffers = [(b, b.clone()) for b in graphed.block.buffers()]
        self.rng = torch.get_rng_state(), _device_rng(self.device)

    def compare(self) -> None:
        replayed = self._replayed()
        names = [f"output {i}" for i in range(len(self.pair.outputs))] + self._gradient_names()
        for name, found, expected in zip(names, replayed, self._eager_at_tier(), strict=True):
            if not _same_bits(found, expected):
                self.report.mismatches.append(f"{name}: differs from eager at the tier's shapes")
        for name, found, expected in zip(names, self._cut(replayed), self._eager_at_call(), strict=True):
            if found is None or not found.is_floating_point():
                continue
            self.report.errors[name] = error = _relative_rms(found, expected)
            if not error <= TOLERANCES[found.dtype]:
                self.report.mismatches.append(f"{name}: relative difference {error:.1e} from eager at the call's "
                                              f"shapes, expected at most {TOLERANCES[found.dtype]:.0e}")

    @torch.no_grad()
    def _replayed(self) -> list[torch.Tensor | None]:
        """Outputs and gradients of a replay at the tier's shapes, each written over NaN."""
        pair = self.pair
        self.restore()
        block = self.graphed.block
        read = [*(copy.static for _, copy, _ in pair.inputs), pair.static_cu, *(copy.static for copy in pair.grads),
                *block.parameters(), *block.buffers()]
        kept = {t.untyped_storage()._cdata for t in read if t is not None}  # outputs may alias what the graph reads
        for t in [*pair.static_outputs, *(g for _, g in pair.input_grads), *pair.param_grads]:
            if t is not None and t.is_floating_point() and t.untyped_storage()._cdata not in kept:
                t.fill_(float("nan"))
        self._count("copy in", "forward", lambda: pair.copy_in(self.call.leaves))
        self._count("graph", "forward", pair.forward.replay)
        found = [t.clone() for t in pair.static_outputs]
        if pair.backward is not None:
            grads = [torch.randn_like(copy.static) for copy in pair.grads]
            self._count("copy in", "backward", lambda: [copy(grad, pair.static_cu)
                                                        for copy, grad in zip(pair.grads, grads, strict=True)])
            self._count("graph", "backward", pair.backward.replay)
            found += [None if g is None else g.clone() for g in [*(g for _, g in pair.input_grads), *pair.param_grads]]
        return found

    def _eager_at_tier(self) -> list[torch.Tensor | None]:
        tensors: list[Any] = [None] * len(self.call.leaves)
        for i, copy, _ in self.pair.inputs:
            tensors[i] = copy.static.clone()
        if self.pair.cu is not None:
            tensors[self.pair.cu] = self.pair.static_cu.clone()
        return self._eager_results(tensors, self.report.tier.tokens, [copy.static.clone() for copy in self.pair.grads])

    def _eager_at_call(self) -> list[torch.Tensor | None]:
        outputs = [o for o in self.pair.outputs if o.differentiable]
        grads = [output.take(copy.static, *self.call.sizes, None).clone()
                 for output, copy in zip(outputs, self.pair.grads, strict=True)]
        return self._eager_results(self.call.leaves, self.call.sizes[0], grads, count=self._count)

    def _eager_results(self, tensors: Sequence[torch.Tensor], tokens: int, grads: list,
                       count: Callable[[str, str, Callable], None] = lambda path, direction, run: run(),
                       ) -> list[torch.Tensor | None]:
        self.restore()
        with torch.set_grad_enabled(self.pair.backward is not None):
            count("eager", "forward", lambda: self._eager(tensors, tokens))
        results = [t.detach() for t in self.outs]
        if self.pair.backward is not None:
            count("eager", "backward", lambda: results.extend(self._eager_backward(grads)))
        return results

    def _count(self, path: str, direction: str, run: Callable[[], Any]) -> None:
        self.report.launches[path, direction] = count_launches(run, self.device)

    def _eager(self, tensors: Sequence[torch.Tensor], tokens: int) -> None:
        wanted = self.call.mode.grad_leaves
        self.tensors = [t.detach().requires_grad_(i in wanted) for i, t in enumerate(tensors)]
        out = self.graphed.call_block(self.call.mode, self.tensors, tokens)
        self.outs = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]

    def _eager_backward(self, grads: list[torch.Tensor]) -> tuple[torch.Tensor | None, ...]:
        outs = [t for t, output in zip(self.outs, self.pair.outputs, strict=True) if output.differentiable]
        wanted = [*(self.tensors[i] for i in self.call.mode.grad_leaves), *self.call.mode.grad_params]
        with torch.autocast(self.device.type, enabled=False):
            return torch.autograd.grad(outs, wanted, grads, allow_unused=True)

    def _cut(self, replayed: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Parts of tier-sized results that belong to the call."""
        count, sizes = len(self.pair.outputs), self.call.sizes
        cut = [output.take(t, *sizes, None) for output, t in zip(self.pair.outputs, replayed[:count], strict=True)]
        gradients = iter(replayed[count:])
        for leaf, _ in self.pair.input_grads:
            grad = next(gradients)
            cut.append(grad if leaf.role is None or grad is None
                       else grad.narrow(leaf.role.dim, 0, leaf.role.size(*sizes)))
        return [*cut, *gradients]

    def _gradient_names(self) -> list[str]:
        if self.pair.backward is None:
            return []
        names = {id(p): name for name, p in self.graphed.block.named_parameters()}
        return [f"gradient of {name}" for name in [*(leaf.name for leaf, _ in self.pair.input_grads),
                                                    *(names[id(p)] for p in self.pair.params)]]

    def restore(self) -> None:
        torch.set_rng_state(self.rng[0])
        if self.rng[1] is not None:
            torch.get_device_module(self.device).set_rng_state(self.rng[1], self.device)
        with torch.no_grad():
            for buffer, before in self.buffers:
                buffer.copy_(before)


def _device_rng(device: torch.device) -> torch.Tensor | None:
    return None if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)


def _same_bits(found: torch.Tensor | None, expected: torch.Tensor | None) -> bool:
    if found is None or expected is None:
        return found is expected
    if not found.is_floating_point():
        return torch.equal(found, expected)
    return torch.equal(found.reshape(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8))


def _relative_rms(found: torch.Tensor, expected: torch.Tensor) -> float:
    difference, size = (found.double() - expected.double()).norm().item(), expected.double().norm().item()
    return difference / size if size else difference


def count_launches(run: Callable[[], Any], device: torch.device) -> int:
    """Host launches that `run()` makes on the device, counted by its backend in torch.profiler's events.

    On CUDA the runtime's kernel, copy, fill and graph launches. On CPU the ATen ops that do work (no views, no
    allocations), Triton launches and host-graph replays, each as one.

    >>> count_launches(lambda: torch.ones(3) + 1, torch.device("cpu"))
    2
    """
    backend = get_backend(device)
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # Kineto of PyTorch 2.13 prints its start and stop otherwise
    backend.synchronize(device)
    # Every activity that the device has; PyTorch 2.11 warns of several cycles, of which there are none, without acc_events.
    with torch.profiler.profile(acc_events=True) as profile:
        run()
        backend.synchronize(device)
    return backend.count_launches(profile.events())
