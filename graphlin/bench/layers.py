"""Whole layers: eager, captured, and the sum of their kernels' times."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module

import torch
from torch import nn

import graphlin
from graphlin.bench.kernel_times import kernel_microseconds
from graphlin.bench.peers import PEERS, check_alike, describe
from graphlin.bench.problems import Sizes, random_cuts
from graphlin.bench.results import CAPTURED, DIRECTIONS, EAGER, FORWARD, KERNELS, OURS, REPLAY, Key, Row
from graphlin.bench.setting import Job, Setting


@dataclass(frozen=True)
class LayerKind:
    """A layer that graphlin and flash-linear-attention both have, by the same name and with the same parameters."""

    name: str
    arguments: Callable[[Sizes], dict]

    def build(self, sizes: Sizes, device: torch.device) -> nn.Module:
        torch.manual_seed(0)
        return getattr(graphlin.layers, self.name)(**self.arguments(sizes)).to(device, sizes.dtype)

    def build_peer(self, layer: nn.Module, sizes: Sizes, device: torch.device) -> nn.Module:
        """flash-linear-attention's layer with the parameters of `layer`."""
        peer = getattr(import_module("fla.layers"), self.name)(**self.arguments(sizes)).to(device, sizes.dtype)
        peer.load_state_dict(layer.state_dict())
        return peer


LAYERS = [
    LayerKind("GatedDeltaNet", lambda sizes: dict(hidden_size=sizes.hidden, expand_v=1, head_dim=sizes.K, num_heads=sizes.H,
                                                  num_v_heads=sizes.HV)),
    LayerKind("KimiDeltaAttention", lambda sizes: dict(hidden_size=sizes.hidden, expand_v=1, head_dim=sizes.K,
                                                       num_heads=sizes.HV, lower_bound=-5.0, safe_gate=True)),
]


def jobs(setting: Setting) -> list[Job]:
    """One for each kind of layer and shape."""
    return [Job(f"{kind.name} T={tokens} N={seqs}", partial(measure, setting, kind, tokens, seqs))
            for kind in LAYERS for tokens, seqs in setting.shapes_of("layers")]


def measure(setting: Setting, kind: LayerKind, tokens: int, seqs: int) -> Iterator[Row]:
    """Calls of the layer eagerly, through `graphlin.capture`, and as one graph replay, whose kernels are summed too.

    Times are those of the stream, calls being enqueued one behind the other; where the host is slower than the device,
    they are the host's.
    """
    sizes, device, clock = setting.scale.sizes, setting.device, setting.clock
    layer = kind.build(sizes, device)
    call = LayerCall(layer, tokens, seqs, sizes, device)
    graphed = graphlin.capture(layer, graphlin.Tier(tokens, seqs), fallback="raise")
    for direction in DIRECTIONS:
        key = Key("layers", kind.name, tokens, seqs, direction)
        eager = call.work(layer, direction)
        works = {(OURS, EAGER): eager, (OURS, CAPTURED): call.work(graphed, direction),
                 (OURS, REPLAY): clock.captured(eager)}
        try:
            works.update(_peer_work(setting, kind, layer, call, direction))
        except Exception as error:
            yield Row(key, "fla", EAGER, error=describe(error))
        for work in works.values():
            work()      # compiles, captures
        for (who, measured), sample in clock.on_stream(works).items():
            yield Row(key, who, measured, sample)
        if clock.on_device:
            yield _kernels(key, works[OURS, REPLAY], device)


class LayerCall:
    """A call of a layer on packed random hidden states."""

    def __init__(self, layer: nn.Module, tokens: int, seqs: int, sizes: Sizes, device: torch.device) -> None:
        self.cu_seqlens = random_cuts(tokens, seqs, device)
        self.hidden = torch.randn(1, tokens, sizes.hidden, device=device).to(sizes.dtype).requires_grad_()
        self.grad = torch.randn_like(self.hidden)

    def work(self, layer: nn.Module, direction: str) -> Callable[[], Sequence[torch.Tensor]]:
        """Forward without gradients, or forward and the gradients of input and parameters."""
        def forward() -> Sequence[torch.Tensor]:
            with torch.no_grad():
                return [_output(layer(self.hidden, cu_seqlens=self.cu_seqlens))]

        def both() -> Sequence[torch.Tensor]:
            output = _output(layer(self.hidden, cu_seqlens=self.cu_seqlens))
            return [output, *torch.autograd.grad(output, [self.hidden, *layer.parameters()], self.grad)]

        return forward if direction == FORWARD else both


def _output(returned: torch.Tensor | tuple) -> torch.Tensor:
    return returned if isinstance(returned, torch.Tensor) else returned[0]


def _peer_work(setting: Setting, kind: LayerKind, layer: nn.Module, call: LayerCall, direction: str) -> dict:
    if PEERS["fla"] not in setting.peers:
        return {}
    work = call.work(kind.build_peer(layer, setting.scale.sizes, setting.device), direction)
    found, expected = work(), call.work(layer, direction)()
    names = ["output", *(f"gradient of {name}" for name in ("hidden_states", *dict(layer.named_parameters())))]
    check_alike(names[:len(found)], found, expected)
    return {("fla", EAGER): work}


def _kernels(key: Key, replay: Callable, device: torch.device) -> Row:
    try:
        return Row(key, OURS, KERNELS, kernel_microseconds(replay, device))
    except Exception as error:
        return Row(key, OURS, KERNELS, error=describe(error))


SECTIONS = {"layers": jobs}
