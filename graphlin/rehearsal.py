"""The capture of a block played through on tensors without memory, to know what its graphs will hold."""

import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from graphlin.backends import GraphBackend, PoolModel
from graphlin.backends.diagnostics import blame
from graphlin.errors import GraphlinError, HostSync, UnsupportedModule
from graphlin.replay import Pair
from graphlin.slots import Held, Slot
from graphlin.tier import Tier


@dataclass(frozen=True)
class Specimen:
    """One call of a block without its data, and the mode it was made in. Tensors are on the meta device.

    `training` has the flag of every module, `autocast` the dtype, None where it is off.
    """

    args: tuple
    kwargs: dict[str, Any]
    training: tuple[bool, ...]
    grad: bool
    autocast: torch.dtype | None

    @staticmethod
    def of(block: nn.Module, args: tuple, kwargs: dict[str, Any], device: torch.device) -> "Specimen":
        """A call in the current mode."""
        args, kwargs = tree_map_only(torch.Tensor, lambda t: _without_memory(t, torch.device("meta")), (args, kwargs))
        training = tuple(module.training for module in block.modules())
        return Specimen(args, kwargs, training, torch.is_grad_enabled(), autocast_dtype(device.type))

    @contextmanager
    def mode(self, block: nn.Module, device: torch.device) -> Iterator[None]:
        for module, training in zip(block.modules(), self.training, strict=True):
            module.training = training
        with (torch.set_grad_enabled(self.grad),
              torch.autocast(device.type, self.autocast) if self.autocast else nullcontext()):
            yield


@dataclass(frozen=True)
class TierPrice:
    """What the capture of one tier takes in one slot, in bytes.

    `inputs` are the static tensors that calls and gradients of outputs are copied into; `outputs`, `gradients` (of inputs and
    parameters) and, at the peak, `intermediates` lie in the pool. `static`, with 16 bytes for the slot's mailbox where it is the
    first to have one, and `pool` are what the slot grows by, which is less where a larger tier's memory is shared. `graphs`
    counts the graphs: one, or two with a backward.
    """

    tier: Tier
    inputs: int
    outputs: int
    intermediates: int
    gradients: int
    static: int
    pool: int
    graphs: int

    @property
    def total(self) -> int:
        return self.static + self.pool


def autocast_dtype(kind: str) -> torch.dtype | None:
    """What autocast casts to on devices of a type; None where it is off, or the type has none."""
    return torch.get_autocast_dtype(kind) if _has_autocast(kind) and torch.is_autocast_enabled(kind) else None


_has_autocast = cache(torch.amp.is_autocast_available)


def rehearse(graphed: Any, specimens: Sequence[Specimen], device: torch.device, tiers: Sequence[Tier]) -> list[TierPrice]:
    """What capturing these calls of a GraphedBlock at these tiers would take in a slot, in the order of capture.

    The capture's own code runs over a copy of the block whose tensors have shapes and no memory (PyTorch's fake tensors,
    which dispatch as those of the device do); kernels are not launched. A model of the backend's pool is told of every
    storage that comes and goes. Raises CaptureError as the capture would, and UnsupportedModule where the block needs memory.
    """
    stage = _Stage(graphed.backend, device)
    with stage.open():
        twin = graphed.twin(stage.copy(graphed.block), tiers, stage, stage.observing)
        for specimen in specimens:
            args, kwargs = tree_map_only(torch.Tensor, stage.fake, (specimen.args, specimen.kwargs))
            with specimen.mode(twin.block, device):
                twin.capture_mode(args, kwargs)
    return stage.prices


def _without_memory(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return empty.requires_grad_(tensor.requires_grad)


class _Stage:
    """The backend of a rehearsal: graphs that record nothing, and pools that are models of the real backend's."""

    def __init__(self, backend: GraphBackend, device: torch.device) -> None:
        self.device_type = backend.device_type
        self.prices: list[TierPrice] = []
        self._backend, self._device = backend, device
        self._addresses = _NoAddresses()

    @contextmanager
    def open(self) -> Iterator[None]:
        from torch._subclasses import fake_tensor  # half a second, which no import of graphlin should take
        mode = fake_tensor.FakeTensorMode(allow_non_fake_inputs=True)
        mode._allow_unsafe_data_ptr_access = False  # a kernel that is handed null pointers would bring the device down
        uncompiled = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
        caches = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)  # as in a capture
        try:
            with uncompiled, torch.inference_mode(False), self._addresses, mode:
                yield
        except GraphlinError:
            raise
        except (fake_tensor.DataDependentOutputException, fake_tensor.DynamicOutputShapeException) as error:
            raise HostSync(f"the block reads a tensor's value on the host at {_line(error)}: a graph cannot repeat that. Keep "
                           "the value on the device (masks, torch.where, bounded sizes) or compute it outside the "
                           f"block. ({error})") from error
        except RuntimeError as error:
            raise UnsupportedModule(f"the block can't be priced: at {_line(error)} it does what tensors without memory can't. A "
                                    "kernel of your own needs torch.library.custom_op with register_fake; or capture "
                                    f"without budget. ({error})") from error
        finally:
            torch.set_autocast_cache_enabled(caches)

    def copy(self, block: nn.Module) -> nn.Module:
        """The block with parameters and buffers of the same shapes, shared where the block shares them."""
        stand_ins = {id(p): nn.Parameter(self.fake(p.detach()), p.requires_grad) for p in block.parameters()}
        stand_ins |= {id(b): self.fake(b) for b in block.buffers()}
        with _disable_current_modes():  # other tensors, which PyTorch can't copy there, are copied with their memory
            return deepcopy(block, stand_ins)

    def fake(self, tensor: torch.Tensor) -> torch.Tensor:
        return _without_memory(tensor, self._device)

    def observing(self, record: Callable[..., tuple[Pair, ...]]) -> Callable[..., tuple[Pair, ...]]:
        """`record`, whose prices are noted."""
        def observed(graphed: Any, slot: Slot, *rest: Any) -> tuple[Pair, ...]:
            pairs = record(graphed, slot, *rest)
            captures = iter(slot.pool.captures)
            for pair, held in zip(pairs, slot.held[-len(pairs):], strict=True):
                rises = [next(captures) for _ in range(1 + (pair.backward is not None))]
                self.prices.append(_price(pair, held, rises))
            slot.pool.captures.clear()
            return pairs
        return observed

    def new_pool(self) -> "_Trace":
        return _Trace(self._backend.pool_model())

    def pool_bytes(self, pool: "_Trace", device: torch.device) -> int:
        return pool.model.nbytes()

    def unowned(self, tensors: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        return [t if t is None else self.fake(t.detach()) for t in tensors]

    def side_stream(self, device: torch.device) -> None:
        return None

    @contextmanager
    def stream(self, stream: None) -> Iterator[None]:
        with self._addresses.refused():
            yield

    def synchronize(self, device: torch.device) -> None:
        return None

    def syncs_refused(self) -> nullcontext:
        return nullcontext()

    def compiling(self) -> nullcontext:
        return nullcontext()

    def is_capturing(self) -> bool:
        return False

    @contextmanager
    def capture(self, *, pool: "_Trace", stream: None, error_mode: str = "thread_local") -> Iterator["_NoGraph"]:
        with self._addresses.refused(), pool.capture():
            yield _NoGraph()

    allocator = GraphBackend.allocator


class _NoGraph:
    def reset(self) -> None:
        return None


class _Trace(TorchDispatchMode):
    """Tells a pool's model of the storages that are made under it, and of their ends, whenever those come.

    `captures` has the bytes alive before each, and the most that were alive in it.
    """

    def __init__(self, model: PoolModel) -> None:
        super().__init__()
        self.model = model
        self.captures: list[tuple[int, int]] = []
        self._live = self._peak = 0
        self._blocks: dict[int, tuple[ref, Any]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        read = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in read:
                self._allocate(tensor.untyped_storage())
        return out

    @contextmanager
    def capture(self) -> Iterator[None]:
        before = self._peak = self._live
        with self:
            yield
        self.captures.append((before, self._peak))

    def _allocate(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._blocks or size == 0:
            return
        block = self.model.allocate(size)
        self._blocks[key] = ref(storage, lambda _: self._free(key, size)), block
        self._live += size
        self._peak = max(self._peak, self._live)

    def _free(self, key: int, size: int) -> None:
        _, block = self._blocks.pop(key)
        self.model.free(block)
        self._live -= size


def _price(pair: Pair, held: Held, captures: Sequence[tuple[int, int]]) -> TierPrice:
    inputs = [copy.static for _, copy, _ in pair.inputs] + [copy.static for copy in pair.grads] + [pair.static_cu]
    outputs = _nbytes(pair.static_outputs)
    gradients = _nbytes([*(grad for _, grad in pair.input_grads), *pair.param_grads])
    peak = max(peak for _, peak in captures) - captures[0][0]
    return TierPrice(held.tier, _nbytes(inputs), outputs, max(0, peak - outputs - gradients), gradients, held.static_bytes,
                     held.pool_bytes, len(captures))


def _nbytes(tensors: Sequence[torch.Tensor | None]) -> int:
    return sum(t.nbytes for t in tensors if t is not None)


class _NoAddresses(TorchFunctionMode):
    """The capture compares addresses of its own tensors, and gets 0 for all; the block's code gets PyTorch's error."""

    def __init__(self) -> None:
        super().__init__()
        self._refused = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.data_ptr and not self._refused:
            return 0
        return func(*args, **(kwargs or {}))

    @contextmanager
    def refused(self) -> Iterator[None]:
        self._refused += 1
        try:
            yield
        finally:
            self._refused -= 1


def _line(error: BaseException) -> str:
    return blame(frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__)
