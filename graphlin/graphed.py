"""A block whose calls are replayed from graphs wherever that gives the eager result, and run eagerly elsewhere."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling
from torch.distributed import ProcessGroup

from graphlin.agreement import check_agreement
from graphlin.backends import GraphBackend, get_backend
from graphlin.errors import RanksDiffer, ReplayError, SlotInUse, StaleAddress, StructureMismatch, TierOverflow, TierUnderflow
from graphlin.kernels.chunk_table import chunk_table
from graphlin.modes import Call, Key, Mode, new_call
from graphlin.packing import Dims, Layout, Signature, Structure, flatten, flatten_batch, make_layout, rebuild
from graphlin.price import Price, check_budget
from graphlin.rehearsal import Specimen, autocast_dtype, rehearse
from graphlin.replay import Pair, Run, replay_with_grad
from graphlin.slots import Held, Slot
from graphlin.ticket import Ticket, form_of
from graphlin.tier import Tier
from graphlin.turn import Turn
from graphlin.watch import Watch

MAX_MODES = 16  # a constant that changes at each call must not fill the memory with graphs
_training, _requires_grad = itemgetter("training"), attrgetter("requires_grad")
_inlined = ContextVar("inlined", default=False)


@contextmanager
def inlining() -> Iterator[None]:
    """Graphed blocks called inside run as the blocks that they wrap, so that an outer one warms up what it captures."""
    token = _inlined.set(True)
    try:
        yield
    finally:
        _inlined.reset(token)


@dataclass
class Stats:
    """How the calls of a GraphedBlock ran.

    `replays` and `backward_replays` count graph replays, `captures` captured pairs, `inlined` calls while another
    block is captured, and `eager` the fallbacks by reason: the name of the error that `fallback="raise"` would have raised.
    """

    replays: int = 0
    backward_replays: int = 0
    captures: int = 0
    inlined: int = 0
    eager: Counter[str] = field(default_factory=Counter)


class GraphedBlock(nn.Module):
    """Calls of `block`, replayed from graphs; made by `graphlin.capture`.

    `block` is the wrapped module, `tiers` the tiers its graphs are made for (largest first), `stats` counts how calls
    ran. Threads may share it if their calls run on one stream, or on streams that wait for each other: a slot's memory is
    used again as soon as its replay is enqueued. A deep or pickled copy holds the block and the options, and captures anew.

    >>> graphed = graphlin.capture(block, graphlin.Tier(tokens=4096, seqs=32))
    >>> y = graphed(x, cu_seqlens=cu)
    """

    def __init__(self, block: nn.Module, tiers: Sequence[Tier],
                 record: Callable[["GraphedBlock", Slot, Call, bool], tuple[Pair, ...]], *, dims: Dims | None, slots: int,
                 fallback: str, max_padding: float | None, budget: int | None, backend: GraphBackend | None,
                 group: ProcessGroup | None = None) -> None:
        super().__init__()
        self.block = block
        self.tiers = tuple(tiers)
        self._given_backend = backend
        self._record = record
        self._dims = dims
        self._num_slots = slots
        self._fallback = fallback
        self._max_padding = max_padding
        self._budget = budget
        self._group = group
        self._accepts_modes = True
        self._known: set[Key] = set()
        self._start()

    def _start(self) -> None:
        """Everything that belongs to this object alone, and not to a copy of it."""
        self.stats = Stats()
        self.signature = Signature(self.block)
        self.backend = self._given_backend
        self._turn = Turn()
        self._watch = Watch(self.block)
        self._slots: list[Slot] = []
        self._modes: dict[Key, Mode] = {}
        self._tickets: dict[tuple, Ticket] = {}  # of captured modes, by the form of a call

    def __getstate__(self) -> dict[str, Any]:
        own = {"stats", "signature", "backend", "_turn", "_watch", "_slots", "_modes", "_tickets"}
        state = super().__getstate__() | {"_known": self._known | self._modes.keys()}
        return {name: value for name, value in state.items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._start()

    def __deepcopy__(self, memo: dict) -> "GraphedBlock":
        memo |= {id(shared): shared for shared in (self._given_backend, self._group)}
        copy = memo[id(self)] = type(self).__new__(type(self))
        copy.__setstate__(deepcopy(self.__getstate__(), memo))
        return copy

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Like `block(*args, **kwargs)`: the same outputs, in the call's own sizes.

        Replayed where the input fits a tier, the mode is captured (or may be, now) and a slot is free; otherwise eager
        and counted in `stats.eager`, or, with `fallback="raise"`, a ReplayError. Raises CaptureError where a first
        call of a mode can't be captured. torch.compile around it runs it beside its graphs.
        """
        if is_dynamo_compiling():
            return torch.compiler.disable(self.forward)(*args, **kwargs)
        if self.backend is None:
            self.find_backend(args, kwargs)
        if _inlined.get() or self.backend.is_capturing():
            self.stats.inlined += 1
            return self.block(*args, **kwargs)
        self._turn.take()  # in a capture the block's parameters are others, so no thread may then run it eagerly
        try:
            call = self._read(args, kwargs)
            slot, pair = self._acquire(call)
            self.stats.replays += 1
        except ReplayError as error:
            if self._fallback == "raise":
                raise
            self.stats.eager[type(error).__name__] += 1
            return self.block(*args, **kwargs)
        finally:
            self._turn.release()
        return pair.rebuild(self._replay(call, slot, pair))

    def _replay(self, call: Call, slot: Slot, pair: Pair) -> Sequence[torch.Tensor]:
        mode = call.mode
        if pair.backward is not None:
            run = Run(pair, call.leaves, call.sizes, call.batch, slot.release, self._count_backward)
            return replay_with_grad(run, [*[call.leaves[i] for i in mode.grad_leaves], *mode.grad_params])
        try:
            if not mode.needs_grad:  # then nothing is noted for autograd anyhow, and the host saves a microsecond
                return pair.play(call.leaves, *call.sizes, call.batch)
            with torch.no_grad():
                return pair.play(call.leaves, *call.sizes, call.batch)
        finally:
            slot.release()

    def find_backend(self, args: tuple, kwargs: dict) -> None:
        """Settles on the backend of the block's device, or of this call's; raises BackendUnavailable."""
        if self.backend is None:
            self.backend = get_backend(first_device(self.block, args, kwargs))

    def _count_backward(self) -> None:
        self.stats.backward_replays += 1

    def _read(self, args: tuple, kwargs: dict) -> Call:
        """Matches a call with its mode and tier, or raises the ReplayError that says why it can't be replayed."""
        if forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active():
            raise StructureMismatch("forward-mode derivatives or a transform of torch.func (vmap, grad, jvp, ...) are taken "
                                    "around the call, and a replay knows neither; it runs eagerly. Use backward() or "
                                    "torch.autograd.grad, or call the block itself, graphed.block(...), where they are needed")
        return self._recall(args, kwargs) or self._look_up(args, kwargs)

    def _recall(self, args: tuple, kwargs: dict) -> Call | None:
        """A call like one before, matched by the ticket of that. Raises StaleAddress."""
        ticket = self._tickets.get(form_of(args, kwargs))
        call = ticket and ticket.admit(args, kwargs, self._watch, autocast_dtype(self.backend.device_type))
        if call is None or (self._max_padding is not None and self._is_padding(call.mode, call.rung, call.sizes[0])):
            return None
        self._watch.check()
        return call

    def _look_up(self, args: tuple, kwargs: dict) -> Call:
        key, mode, leaves, batch = self._match(args, kwargs)
        try:
            sizes = mode.layout.sizes(leaves)
            rung = mode.fit(*sizes)
            if rung is None:
                raise self._overflow(*sizes)
            if self._max_padding is not None and self._is_padding(mode, rung, sizes[0]):
                raise self._underflow(mode, rung, sizes[0])
        except ReplayError:
            self._decline(mode, leaves)
            raise
        call = new_call((key, mode, rung, leaves, sizes, batch))
        if mode.pairs and (ticket := Ticket.of(call, self.signature, args, kwargs)):
            self._tickets[form_of(args, kwargs)] = ticket
        return call

    def _decline(self, mode: Mode, leaves: Sequence[torch.Tensor]) -> None:
        """Tells the other ranks that this one can't capture a mode at this call. Of a captured mode they need not know."""
        if self._group is not None and not mode.pairs:
            with suppress(RanksDiffer):
                check_agreement(self._group, first_device(self.block, tuple(leaves), {}), (0, 0))

    def _match(self, args: tuple, kwargs: dict) -> tuple[Key, Mode, list[torch.Tensor], tuple[int, int] | None]:
        """The mode of a call, its key, the call's tensors, and the batch of a dense one. Raises StaleAddress."""
        if self._modes:
            self._watch.check()
        else:
            self._look_again(args, kwargs)
        signature = self.signature
        values = signature.bind(args, kwargs)
        if signature.builds_table:
            values[signature.chunks] = None
        batch = flatten_batch(values, signature, self._dims)
        leaves, structure = flatten(values)
        key = self._key(leaves, structure)
        return key, self._modes.get(key) or self._other_mode(Key(*key), leaves, structure), leaves, batch

    def _look_again(self, args: tuple, kwargs: dict) -> None:
        """Takes the block as it is now: before anything is captured it may be moved, cast and changed."""
        try:
            self._watch.check()
        except StaleAddress:
            self._watch = Watch(self.block)
            self._slots = []
            if self.backend is not self._given_backend:
                self.backend = get_backend(first_device(self.block, args, kwargs))

    def _key(self, leaves: list[torch.Tensor], structure: Structure) -> tuple:
        """The parts of a Key, which finds what a Key finds and is made in less time."""
        grad = torch.is_grad_enabled()
        return (structure,
                tuple([(t.dtype, t.get_device(), grad and t.requires_grad) for t in leaves]),
                grad,
                tuple(map(_training, self._watch.attributes)),
                tuple(map(_requires_grad, self._watch.params)) if grad else None,
                autocast_dtype(self.backend.device_type))

    def _overflow(self, tokens: int, seqs: int) -> TierOverflow:
        held = " or ".join(f"{tier.tokens} in {tier.seqs}" for tier in self.tiers)
        which = "the largest tier holds" if len(self.tiers) == 1 else "the tiers hold"
        return TierOverflow(f"the input has {tokens} tokens in {seqs} sequences, {which} {held}; capture a larger tier, or let "
                            "such inputs run eagerly")

    def _is_padding(self, mode: Mode, rung: int, tokens: int) -> bool:
        """Whether more of the tier's rows would be padding than may be."""
        rows = mode.tiers[rung].tokens
        return mode.layout.varies and rows - tokens > self._max_padding * rows

    def _underflow(self, mode: Mode, rung: int, tokens: int) -> TierUnderflow:
        return TierUnderflow(f"the input has {tokens} tokens, the smallest tier that it fits {mode.tiers[rung].tokens}: more "
                             f"than max_padding={self._max_padding} of its rows would be padding; add a smaller tier "
                             "(graphlin.ladder makes several), or let such inputs run eagerly")

    def _other_mode(self, key: Key, leaves: list[torch.Tensor], structure: Structure) -> Mode:
        """A mode that is new, or the one that is captured for lengths of the other integer dtype, if it takes both."""
        layout = make_layout(self.signature.names, structure, leaves, self._dims)
        other = None if layout.cu is None else key.with_other_integer(layout.cu)
        same = self._modes.get(other)
        if same is not None and same.takes_any_integer_lengths():
            self._modes[key] = same
            return same
        return self._new_mode(key, layout, leaves, structure)

    def _new_mode(self, key: Key, layout: Layout, leaves: list[torch.Tensor], structure: Structure) -> Mode:
        if not self._accepts_modes and key not in self._known:
            raise StructureMismatch("the call differs from the captured sample in structure, dtype, device, a "
                                    "constant, requires_grad, training, grad or autocast mode; capture without a sample "
                                    "takes each mode at its first call")
        if len(set(self._modes.values())) >= MAX_MODES:
            raise StructureMismatch(f"{MAX_MODES} modes are captured already; an argument that changes at each call "
                                    "should be a tensor")
        device = first_device(self.block, tuple(leaves), {})
        for leaf, tensor in zip(layout.leaves, leaves, strict=True):
            if tensor.device != device:
                raise ValueError(f"{leaf.name}: expected a tensor on {device}, found one on {tensor.device}; a graph reads "
                                 "nothing else")
            if tensor.layout is not torch.strided:
                raise ValueError(f"{leaf.name}: expected a dense tensor, found one of layout {tensor.layout}; call .to_dense()")
        grad = key.grad
        grad_leaves = tuple(i for i, leaf in enumerate(leaves) if grad and leaf.requires_grad)
        grad_params = tuple(p for p in self._watch.params if grad and p.requires_grad)
        tiers = self.tiers if layout.varies else self.tiers[:1]
        specimen = Specimen.of(self.block, *self.signature.arguments(rebuild(structure, leaves)), device)
        return Mode(layout, structure, tiers, bool(grad_leaves or grad_params), grad_leaves, grad_params, specimen)

    @contextmanager
    def acquired(self, args: tuple, kwargs: dict) -> Iterator[tuple[Call, Slot, Pair]]:
        """Holds a slot for a call: yields the call, the slot and the pair there, captured now if it was not before."""
        self.find_backend(args, kwargs)
        with self._turn, self._turn.kept():
            call = self._read(args, kwargs)
            slot, pair = self._acquire(call)
            try:
                yield call, slot, pair
            finally:
                slot.release()

    def capture_mode(self, args: tuple, kwargs: dict) -> None:
        """Captures the mode of a call of any size."""
        self.find_backend(args, kwargs)
        with self._turn:
            key, mode, leaves, batch = self._match(args, kwargs)
            slot, _ = self._acquire(Call(key, mode, 0, leaves, mode.layout.sizes(leaves), batch))
            slot.release()

    def _acquire(self, call: Call) -> tuple[Slot, Pair]:
        slot = self._free_slot(call)
        try:
            pairs = call.mode.pairs.get(slot) or self._capture(call, slot)
        except BaseException:
            slot.release()
            raise
        return slot, pairs[call.rung]

    def _free_slot(self, call: Call) -> Slot:
        if not self._slots:
            device = first_device(self.block, tuple(call.leaves), {})
            self._slots = [self._new_slot(device, i) for i in range(self._num_slots)]
        for slot in self._slots:
            # Ranks capture a mode together, once: in slots that were busy then it has no graphs.
            if not slot.busy and (self._group is None or not call.mode.pairs or slot in call.mode.pairs):
                slot.busy = True
                return slot
        self._decline(call.mode, call.leaves)
        raise SlotInUse(f"all {self._num_slots} slots hold a forward that waits for its backward; run the backward "
                        "first, drop the output, or capture with more slots")

    def _new_slot(self, device: torch.device, index: int) -> Slot:
        return Slot(self.backend, device, index, (max(t.tokens for t in self.tiers), max(t.seqs for t in self.tiers)))

    def _capture(self, call: Call, slot: Slot) -> tuple[Pair, ...]:
        """Captures the mode in this slot and in every other one that is free; after a failure in none.

        Of ranks that capture together all do, or each raises RanksDiffer: warm-up runs the block's collectives several times.
        """
        if self._budget is not None and call.mode not in self._modes.values():
            specimens = [*self._specimens(), call.mode.specimen]
            check_budget(self._budget, self.tiers, lambda tiers: self.quote(specimens, slot.device, tiers))
        pairs = call.mode.pairs
        slots = [slot, *[s for s in self._slots if not s.busy and s not in pairs]]
        if self._group is not None:
            check_agreement(self._group, slot.device, (len(slots), len(call.mode.tiers)))
        try:
            with self._turn.kept(), self._lent_data_kept(call):
                for each in slots:
                    pairs[each] = self._record(self, each, call, not pairs)
                    self.stats.captures += len(pairs[each])
        except BaseException:
            self._renew(slots, [call.mode, *self._modes.values()])
            raise
        self._modes[call.key] = call.mode
        return pairs[slot]

    @contextmanager
    def _lent_data_kept(self, call: Call) -> Iterator[None]:
        """Inside, static buffers are written; what the caller has written there for this call is afterwards as before."""
        lent = [(t, t.detach().clone()) for t in call.leaves if any(slot.holds(t) for slot in self._slots)]
        try:
            yield
        finally:
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(tuple(t for t, _ in lent)):
                for t, data in lent:
                    t.copy_(data)

    def _renew(self, slots: list[Slot], modes: list[Mode]) -> None:
        """Puts new slots for these, without graphs: a pool gives memory back only as a whole, so all its graphs go.

        The next call of each mode captures it again.
        """
        for mode in modes:
            mode.drop(slots)
        self._slots = [self._new_slot(slot.device, slot.index) if slot in slots else slot for slot in self._slots]

    def prepare(self, args: tuple, kwargs: dict) -> None:
        """Captures the mode of a sample call, and takes no further modes from then on."""
        with self.acquired(args, kwargs):
            pass
        self._accepts_modes = False

    def call_block(self, mode: Mode, tensors: Sequence[torch.Tensor], tokens: int) -> Any:
        """The block on packed tensors of at most `tokens` rows, with the chunk table built first if it takes one."""
        values = rebuild(mode.structure, tensors)
        if self.signature.builds_table and mode.layout.cu is not None:
            cu = tensors[mode.layout.cu]
            values[self.signature.chunks] = chunk_table(cu, tokens, self.tiers[0].chunk_size)
        return self.signature.call(self.block, values)

    def select(self, tokens: int, seqs: int) -> Tier | None:
        """The smallest tier that an input of these sizes fits, or None; decided from shapes alone."""
        return next((tier for tier in reversed(self.tiers) if tier.fits(tokens, seqs)), None)

    def static_inputs(self, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        """The static buffers that the next call like this one reads, by argument name, at the largest sizes of any tier.

        A caller that writes its data there in place, and passes parts that begin at the first row, pays no copy. Only rows
        that it passes are its own: those after them are zeroed, those within a part but past `cu_seqlens[-1]` are read as they
        are. With several slots the next call takes the first free one; another one's buffers are copied like any tensor.
        Captures the mode if need be; refresh(), reset() and a failed capture end the buffers' use.

        Raises the ReplayError that keeps the call from being replayed.

        >>> buffers = graphed.static_inputs(x, cu_seqlens=cu)
        >>> y = graphed(buffers["x"][:, :tokens], cu_seqlens=buffers["cu_seqlens"][:seqs + 1])
        """
        with self.acquired(args, kwargs) as (call, slot, pair):
            leaves, dtypes = call.mode.layout.leaves, [tensor.dtype for tensor in call.leaves]
            if pair.static_cu is not None:
                dtypes[pair.cu] = pair.static_cu.dtype
            return {leaf.name: slot.whole(leaf, dtype) for leaf, dtype in zip(leaves, dtypes, strict=True)}

    def check_addresses(self) -> None:
        """Raises StaleAddress where the block was changed since it was captured."""
        self._watch.check()

    @property
    def num_addresses(self) -> int:
        """Parameters and buffers whose addresses are checked at each call."""
        return self._watch.num_addresses

    def memory(self) -> list[Held]:
        """What each captured pair added to `held_bytes`, slot by slot in the order of capture."""
        return [held for slot in self._slots for held in slot.held]

    def held_bytes(self) -> int:
        """Bytes of the pools and static tensors that the captured graphs hold."""
        return sum(self.backend.pool_bytes(slot.pool, slot.device) + slot.static_bytes() for slot in self._slots)

    @property
    def price(self) -> Price:
        """What the captured modes were to hold, from a rehearsal of their captures; see `graphlin.price`."""
        if not self._slots:
            return Price((), self._num_slots)
        self.check_addresses()
        return self.quote(self._specimens(), self._slots[0].device)

    def quote_call(self, args: tuple, kwargs: dict) -> Price:
        """The price of capturing one call, in the current mode."""
        self.find_backend(args, kwargs)
        device = first_device(self.block, args, kwargs)
        return self.quote([Specimen.of(self.block, args, kwargs, device)], device)

    def quote(self, specimens: Sequence[Specimen], device: torch.device, tiers: Sequence[Tier] | None = None) -> Price:
        """The price of capturing these calls, at all tiers or at those given."""
        return Price(tuple(rehearse(self, specimens, device, self.tiers if tiers is None else tiers)), self._num_slots)

    def twin(self, block: nn.Module, tiers: Sequence[Tier], backend: GraphBackend,
             observe: Callable[[Callable[..., tuple[Pair, ...]]], Callable[..., tuple[Pair, ...]]]) -> "GraphedBlock":
        """What rehearses captures of this one: over another block and backend, in one slot, each capture observed."""
        return GraphedBlock(block, tiers, observe(partial(self._record, rehearsal=True)), dims=self._dims, slots=1,
                            fallback="raise", max_padding=None, budget=None, backend=backend)

    def _specimens(self) -> list[Specimen]:
        return [mode.specimen for mode in dict.fromkeys(self._modes.values())]

    def reset(self) -> None:
        """Gives back every graph, pool and static tensor; the next eligible call of each known mode captures again.

        A forward that still waits loses its backward, which raises ReplayError.
        """
        with self._turn:
            for mode in self._modes.values():
                mode.drop(self._slots)
            self._known |= self._modes.keys()
            self._modes.clear()
            self._tickets.clear()
            self._slots = []

    def refresh(self) -> None:
        """Takes the block as it is now, after a part of it was replaced, moved, cast or hooked; then as `reset`.

        Each mode is captured at its first call from then on, also where a sample was captured before.
        """
        with self._turn:
            self.reset()
            self._known.clear()
            self._accepts_modes = True
            self.backend = self._given_backend
            self.signature = Signature(self.block)
            self._watch = Watch(self.block)


def first_device(block: nn.Module, args: tuple, kwargs: dict) -> torch.device:
    """Where the block lives, or the first tensor of a call of a block without parameters."""
    tensors = [*block.parameters(), *block.buffers(), *flatten([args, kwargs])[0]]
    if not tensors:
        raise ValueError("capture: expected a block with parameters, or a tensor among its arguments; found neither")
    return tensors[0].device
