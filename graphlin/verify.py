"""Proof that a captured block computes what the block computes: poisoned replay against eager, launches, addresses."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from graphlin.backends import get_backend
from graphlin.errors import StaleAddress
from graphlin.graphed import Call, GraphedBlock, inlining
from graphlin.packing import Output
from graphlin.recording import keep, put_back, without_autocast
from graphlin.replay import Pair
from graphlin.slots import Slot
from graphlin.tier import Tier

# Root mean square of the difference over that of the eager result, at exact shapes: matrix libraries choose their
# kernels by the number of rows, so the last bits differ from the tier's. What is no float is chosen by such bits:
# the share of entries that differ.
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 5e-3}
TOLERANCES |= {torch.complex64: TOLERANCES[torch.float32], torch.complex128: TOLERANCES[torch.float64]}
SHARE_OF_OTHERS = 1e-2

Results = list[torch.Tensor | None]


@dataclass
class Report:
    """What `verify` found. `ok` is whether every check passed; printing the report shows them.

    `tiers` are those that the call was replayed in, largest first, each in every one of `slots`; `busy` counts slots that
    were not checked, since a forward in them waits for its backward. `errors` has the relative RMS difference at exact shapes
    by tensor (for what is no float, the share of entries that differ), the worst of all replays; it is empty where the block
    is `random`: its masks depend on the number of rows. `mismatches` has a line for each failed check, `launches` host
    launches by (path, direction), path being "eager" (at the call's shapes), "graph" (the replay alone) or "copy in", and
    `addresses` the number of parameters and buffers found where the graph reads them. A call that does not vary in shape has
    no tokens or sequences; the graph is of its own shape, whatever the tier.
    """

    tokens: int
    seqs: int
    tiers: tuple[Tier, ...] = ()
    slots: tuple[int, ...] = ()
    busy: int = 0
    random: bool = False
    errors: dict[str, float] = field(default_factory=dict)
    mismatches: list[str] = field(default_factory=list)
    launches: dict[tuple[str, str], int] = field(default_factory=dict)
    addresses: int = 0
    varies: bool = True

    @property
    def ok(self) -> bool:
        return not self.mismatches

    @property
    def tier(self) -> Tier:
        """The smallest tier that the call fits, in which it is replayed."""
        return self.tiers[-1]

    def as_json(self) -> dict[str, Any]:
        """Everything, as JSON has it."""
        launches = {f"{path} {direction}": count for (path, direction), count in self.launches.items()}
        return asdict(self) | {"ok": self.ok, "tiers": [asdict(tier) for tier in self.tiers], "launches": launches}

    def __str__(self) -> str:
        where = " and ".join(f"{tier.tokens} x {tier.seqs}" for tier in self.tiers)
        slots = f"slot{'s' * (len(self.slots) > 1)} {', '.join(map(str, self.slots))}"
        call = f"{self.tokens} tokens in {self.seqs} sequences, replayed at {where}" if self.varies else \
            "a call of constant shape, replayed"
        lines = [f"{'ok' if self.ok else 'MISMATCH'}: {call} in {slots}"]
        lines += [f"  {line}" for line in self.mismatches or self._passed()]
        if self.busy:
            lines.append(f"  {self.busy} busy slots, whose forward waits for its backward, not checked")
        lines += [f"  host launches, {path} {direction}: {count}" for (path, direction), count in self.launches.items()]
        return "\n".join(lines)

    def _passed(self) -> list[str]:
        passed = ["outputs and gradients, written over NaN, equal eager's at the tier's shapes bit for bit"]
        if self.random:
            passed.append("random numbers are drawn, so that the call's own shapes would give other masks: not compared there")
        elif self.errors:
            name = max(self.errors, key=self.errors.__getitem__)
            passed.append(f"largest relative difference at exact shapes {self.errors[name]:.1e}, of {name}")
        return [*passed, f"{self.addresses} addresses unchanged"]


def verify(graphed: GraphedBlock, *args: Any, **kwargs: Any) -> Report:
    """Replays the call `graphed(*args, **kwargs)` into NaN-filled outputs and compares it with the block run eagerly.

    In every tier that the call fits and every slot that is free: bit for bit with eager at the tier's shapes, outputs and, in
    grad mode, gradients of inputs and parameters, and what the block returns beside tensors; then within tolerance with eager
    at the call's own shapes, unless the block draws random numbers. Host launches are counted by profiler events. The random
    state and the block's buffers are as before afterwards. Captures the call's mode if need be.

    Raises the ReplayError that keeps the call from being replayed, and TypeError for what is no GraphedBlock.

    >>> print(graphlin.verify(graphed, x, cu_seqlens=cu))
    """
    if not isinstance(graphed, GraphedBlock):
        raise TypeError(f"graphed: expected what graphlin.capture returns, found {type(graphed).__name__}")
    with graphed.acquired(args, kwargs) as (call, slot, _):
        pairs = {each: call.mode.pairs[each][:call.rung + 1] for each in call.mode.pairs if each is slot or not each.busy}
        report = Report(*call.sizes, call.mode.tiers[:call.rung + 1], tuple(each.index for each in pairs),
                        len(call.mode.pairs) - len(pairs), addresses=graphed.num_addresses, varies=call.mode.layout.varies)
        check = _Check(graphed, call, slot.device, report)
        try:
            check.run(pairs)
            graphed.check_addresses()
        except StaleAddress as error:
            report.mismatches.append(str(error))
        finally:
            check.restore()
    return report


class _Check:
    """The replays of one call, and what they are compared with."""

    def __init__(self, graphed: GraphedBlock, call: Call, device: torch.device, report: Report) -> None:
        self.graphed, self.call, self.device, self.report = graphed, call, device, report
        self._eager = _Eager(graphed, call, device)
        self._buffers = keep(graphed.block.buffers())
        self._random_state = _random_state(device)

    def run(self, pairs: dict[Slot, Sequence[Pair]]) -> None:
        own = next(iter(pairs.values()))[-1]
        self._grads = [self._gradient(output, _part(output, static, self.call.sizes))
                       for output, static in zip(own.outputs, own.static_outputs, strict=True) if output.differentiable]
        at_call, _ = self._run_eagerly(own, self.call.leaves, self.call.sizes[0], self._grads, self._count)
        for slot, captured in pairs.items():
            for tier, pair in zip(self.report.tiers, captured, strict=True):
                where = f"{tier.tokens} x {tier.seqs}, slot {slot.index}" if self.report.varies else f"slot {slot.index}"
                self._compare(pair, tier, at_call, where, pair is own)

    def _gradient(self, output: Output, tensor: torch.Tensor) -> torch.Tensor:
        """A random gradient of an output, 0 in inactive rows, whose gradients a replay leaves out."""
        grad = torch.randn(tensor.shape, dtype=tensor.dtype, device=self.device)
        cu = self.call.mode.layout.cu
        for role in output.roles:
            if role.kind == "tokens" and cu is not None:
                inactive = torch.arange(grad.shape[role.dim], device=self.device) >= self.call.leaves[cu][-1]
                grad.movedim(role.dim, 0)[inactive] = 0
        return grad

    def _compare(self, pair: Pair, tier: Tier, at_call: Results, where: str, counts: bool) -> None:
        """One replay with eager at its shapes, then with what eager gave at the call's."""
        count = self._count if counts else _run
        fresh = pair.fresh(self.call.sizes[0])
        self._copy_in(pair, count, fresh)
        expected, returned = self._run_eagerly(pair, _static_leaves(pair, len(self.call.leaves)), tier.tokens,
                                               [copy.static.clone() for copy in pair.grads])
        if fresh is not None:
            _poison(fresh, self._cut(pair, expected)[pair.delivery.index])
        found = self._replay(pair, expected, count)
        names = self._names(pair)
        report = self.report.mismatches
        report += [f"{name}: differs from eager at the tier's shapes ({where})"
                   for name, f, e in zip(names, found, expected, strict=True) if not _same_bits(f, e)]
        if _constants(pair.rebuild(list(pair.static_outputs))) != returned:
            report.append(f"what is returned beside tensors differs from eager at the tier's shapes ({where})")
        cut = self._cut(pair, found)
        if not self.report.random:
            for name, f, e in zip(names, cut, at_call, strict=True):
                self._measure(name, f, e, where)
        if fresh is not None and not _same_bits(fresh, cut[pair.delivery.index]):
            report.append(f"{names[pair.delivery.index]}: what the call is given is not what the graph computed ({where})")

    @torch.no_grad()
    def _copy_in(self, pair: Pair, count: Callable, fresh: torch.Tensor | None) -> None:
        count("copy in", "forward", lambda: pair.copy_in(self.call.leaves, fresh))
        if pair.grads:
            count("copy in", "backward", lambda: [copy(grad, pair.static_cu)
                                                  for copy, grad in zip(pair.grads, self._grads, strict=True)])

    def _measure(self, name: str, found: torch.Tensor | None, expected: torch.Tensor | None, where: str) -> None:
        if found is None or expected is None:
            return  # by both, or it is told at the tier's shapes
        error = _difference(found, expected)
        self.report.errors[name] = max(error, self.report.errors.get(name, 0.0))
        tolerance = TOLERANCES.get(found.dtype, SHARE_OF_OTHERS)
        if not error <= tolerance:
            self.report.mismatches.append(f"{name}: relative difference {error:.1e} from eager at the call's shapes, expected at "
                                          f"most {tolerance:.0e} ({where})")

    @torch.no_grad()
    def _replay(self, pair: Pair, expected: Results, count: Callable) -> Results:
        """Outputs and gradients of a replay at the tier's shapes, each written over what it can't be."""
        self.restore()
        written = [*pair.static_outputs, *(g for _, g in pair.input_grads), *pair.param_grads]
        read = [*(copy.static for _, copy, _ in pair.inputs), pair.static_cu, *(copy.static for copy in pair.grads),
                *self.graphed.block.parameters(), *self.graphed.block.buffers()]
        kept = {t.untyped_storage().data_ptr() for t in read if t is not None}  # outputs may alias what the graph reads
        for tensor, right in zip(written, expected, strict=True):
            if tensor is not None and right is not None and tensor.untyped_storage().data_ptr() not in kept:
                _poison(tensor, right)
        count("graph", "forward", pair.forward.replay)
        found: Results = [t.clone() for t in pair.static_outputs]
        if pair.backward is not None:
            count("graph", "backward", pair.backward.replay)
            found += [None if g is None else g.clone() for g in [*(g for _, g in pair.input_grads), *pair.param_grads]]
        return found

    def _run_eagerly(self, pair: Pair, leaves: Sequence[torch.Tensor], tokens: int, grads: list,
                     count: Callable | None = None) -> tuple[Results, Any]:
        """Outputs and gradients, and what is returned beside tensors."""
        self.restore()
        results = self._eager.run(pair, leaves, tokens, grads, count or _run)
        self.report.random |= any(not torch.equal(now, before) for now, before in
                                  zip(_random_state(self.device), self._random_state, strict=True))
        return results

    def _count(self, path: str, direction: str, run: Callable[[], Any]) -> None:
        self.report.launches[path, direction] = count_launches(run, self.device)

    def _cut(self, pair: Pair, replayed: Results) -> Results:
        """Parts of tier-sized results that belong to the call."""
        outputs, gradients = replayed[:len(pair.outputs)], iter(replayed[len(pair.outputs):])
        cut: Results = [_part(output, t, self.call.sizes) for output, t in zip(pair.outputs, outputs, strict=True)]
        cut += [None if (grad := next(gradients)) is None else leaf.cut(grad, *self.call.sizes) for leaf, _ in pair.input_grads]
        return [*cut, *gradients]

    def _names(self, pair: Pair) -> list[str]:
        outputs = [f"output {i}" for i in range(len(pair.outputs))]
        if pair.backward is None:
            return outputs
        names = {id(p): name for name, p in self.graphed.block.named_parameters()}
        return outputs + [f"gradient of {name}" for name in [*(leaf.name for leaf, _ in pair.input_grads),
                                                              *(names[id(p)] for p in pair.params)]]

    def restore(self) -> None:
        torch.set_rng_state(self._random_state[0])
        if len(self._random_state) > 1:
            torch.get_device_module(self.device).set_rng_state(self._random_state[1], self.device)
        put_back(self._buffers)


@dataclass
class _Eager:
    """The block itself, in the mode of the call."""

    graphed: GraphedBlock
    call: Call
    device: torch.device

    def run(self, pair: Pair, leaves: Sequence[torch.Tensor], tokens: int, grads: list, count: Callable) -> tuple[Results, Any]:
        trains = pair.backward is not None
        wanted = self.call.mode.grad_leaves
        tensors = [t.detach().requires_grad_(trains and i in wanted) for i, t in enumerate(leaves)]
        returned: list = []
        with torch.set_grad_enabled(trains), inlining():
            count("eager", "forward", lambda: returned.append(self.graphed.call_block(self.call.mode, tensors, tokens)))
        outs = [t for t in tree_flatten(returned[0])[0] if isinstance(t, torch.Tensor)]
        results: Results = [t.detach().clone() for t in outs]
        if trains:
            targets = [t for t, output in zip(outs, pair.outputs, strict=True) if output.differentiable]
            sources = [*(tensors[i] for i in wanted), *self.call.mode.grad_params]
            count("eager", "backward", lambda: results.extend(self._gradients(targets, sources, grads)))
        return results, _constants(returned[0])

    def _gradients(self, targets: list, sources: list, grads: list) -> tuple[torch.Tensor | None, ...]:
        with without_autocast(self.device.type):
            return torch.autograd.grad(targets, sources, grads, allow_unused=True)


def _run(path: str, direction: str, run: Callable[[], Any]) -> None:
    run()


def _part(output: Output, static: torch.Tensor, sizes: tuple[int, int]) -> torch.Tensor:
    return output.take(static, *sizes, None)


def _static_leaves(pair: Pair, count: int) -> list[torch.Tensor]:
    """Copies of the static arguments, as the graph reads them."""
    leaves: list[Any] = [None] * count
    for i, copy, _ in pair.inputs:
        leaves[i] = copy.static.clone()
    if pair.cu is not None:
        leaves[pair.cu] = pair.static_cu.clone()
    return leaves


def _constants(returned: Any) -> Any:
    """A value with its structure and what it holds beside tensors, to be compared."""
    flat, spec = tree_flatten(returned)
    return spec, [None if isinstance(v, torch.Tensor) else v for v in flat]


def _random_state(device: torch.device) -> tuple[torch.Tensor, ...]:
    """Of the host's generator, and of the device's if it has its own."""
    host = torch.get_rng_state()
    return (host,) if device.type == "cpu" else (host, torch.get_device_module(device).get_rng_state(device))


def _poison(tensor: torch.Tensor, right: torch.Tensor) -> None:
    """Fills a tensor with what can't be its right value."""
    tensor.fill_(float("nan")) if _holds_nan(tensor) else tensor.copy_(right.bitwise_not())


def _holds_nan(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _same_bits(found: torch.Tensor | None, expected: torch.Tensor | None) -> bool:
    if found is None or expected is None:
        return found is expected
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    return torch.equal(_bytes(found), _bytes(expected))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


def _difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    if not _holds_nan(found):
        return (found != expected).double().mean().item() if found.numel() else 0.0
    kind = torch.complex128 if found.is_complex() else torch.float64
    found, expected = found.to(kind), expected.to(kind)
    same = (found == expected) | (found.isnan() & expected.isnan())     # infinities too, whose difference is none
    difference = torch.where(same, 0, found - expected).norm().item()
    size = torch.where(expected.isfinite(), expected, 0).norm().item()
    return difference / size if size else difference


def count_launches(run: Callable[[], Any], device: torch.device) -> int:
    """Host launches that `run()` makes on the device, counted by its backend in torch.profiler's events.

    On CUDA the runtime's kernel, copy, fill and graph launches. On CPU the ATen ops that do work (no views, no
    allocations), Triton launches and host-graph replays, each as one.

    >>> count_launches(lambda: torch.ones(3) + 1, torch.device("cpu"))
    2
    """
    with profiled(device) as profile:
        run()
    return get_backend(device).count_launches(profile.events())


@contextmanager
def profiled(device: torch.device) -> Iterator[torch.profiler.profile]:
    """Profiles the device's work in the body, all of it and nothing else, with every activity that the device has."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # Kineto of PyTorch 2.13 prints its start and stop otherwise
    wait = get_backend(device).synchronize
    wait(device)
    with torch.profiler.profile(acc_events=True) as profile:  # else PyTorch 2.11 warns of several cycles, of which there are none
        yield profile
        wait(device)
