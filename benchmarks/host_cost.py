"""Host time of one call of a captured Gated DeltaNet layer: `python benchmarks/host_cost.py [--device cuda] [--tokens 512]`.

Calls are timed one by one without waiting for the device, in bursts short enough that it never makes them wait, so that what is
measured is the thread that enqueues them: copy-in, checks and replay, beside the eager call and beside one autograd.Function of
as many parameters that only clones its input. On the CPU (`--device cpu`) graphs and kernels do nothing at all: what is left is
graphlin's own Python.

The same call was seen to take up to twice as long on some cores and at some times (docs/benchmarks.md has what was observed). So
all contestants take turns, a burst each in every round, after a warm-up in which none is timed, and meet the same phases. The
figure is the median over all calls but the first of each burst, which finds caches full of what the others left there; beside it
stand the quartiles, the least median of any round, and the median of those first calls. `quiet` is the median over the rounds in
which the yardstick, a loop of plain Python that does always the same, was within a tenth of its fastest. Python's garbage
collection stays on, as a user has it. No profiler must have run in the process: after PyTorch's each launch took several times as
long.
"""

import argparse
import resource
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain, compress, pairwise
from statistics import median, quantiles
from time import perf_counter
from typing import Any

import torch

import graphlin
from graphlin.backends import get_backend

ROUNDS, BURST = 200, 12  # a device holds few graphs that wait
WARM_UP = 2.0            # seconds
YARDSTICK = "the yardstick"


class IdleBackend:
    """The host backend, whose kernels are not run and whose graphs replay nothing."""

    def __init__(self) -> None:
        self._host = get_backend("cpu")
        self.device_type = "cpu"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._host, name)

    def launch(self, *args: Any) -> None:
        return None

    def prepare(self, *args: Any) -> Callable[..., None]:
        return self.launch

    @contextmanager
    def capture(self, **options: Any):
        with self._host.capture(**options) as graph:
            graph.replay = lambda: None
            yield graph


class CloneOfMany(torch.autograd.Function):
    """What any replay with gradients pays to autograd: all parameters in, a gradient for each of them out."""

    @staticmethod
    def forward(ctx, x, *params):
        ctx.grads = [torch.empty_like(p) for p in params]
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad, *ctx.grads


@dataclass(frozen=True)
class Contestant:
    """What is timed, in which grad mode, and what is done before each burst of it, untimed."""

    run: Callable[[], Any]
    grad: bool = False
    before: Callable[[], Any] = lambda: None

    def burst(self, device: torch.device) -> list[float]:
        """Microseconds of the host for each call of a burst that begins with an idle device."""
        with torch.set_grad_enabled(self.grad):
            self.before()
            get_backend(device).synchronize(device)
            stamps = [perf_counter()]
            for _ in range(BURST):
                self.run()
                stamps.append(perf_counter())
        return [(end - start) * 1e6 for start, end in pairwise(stamps)]


@dataclass(frozen=True)
class Cost:
    """Microseconds of a call: of those that follow another in their burst the median, the quartiles, the least median of a round
    and the median of quiet rounds; and the median of the first ones of bursts."""

    median: float
    quartiles: tuple[float, float]
    least: float
    quiet: float
    first: float

    @staticmethod
    def of(bursts: list[list[float]], is_quiet: list[bool]) -> "Cost":
        """From one burst of every round."""
        later = [burst[1:] for burst in bursts]
        lower, middle, upper = quantiles(chain.from_iterable(later), n=4)
        quiet = chain.from_iterable(compress(later, is_quiet))
        return Cost(middle, (lower, upper), min(map(median, later)), median(quiet), median(burst[0] for burst in bursts))

    def __str__(self) -> str:
        return "".join(f"{time:9.1f}" for time in (self.median, *self.quartiles, self.least, self.quiet, self.first))


def play_round(contestants: Mapping[str, Contestant], first: int, device: torch.device) -> dict[str, list[float]]:
    """One burst of each contestant, the given one first, the others in turn."""
    names = [*contestants][first:] + [*contestants][:first]
    return {name: contestants[name].burst(device) for name in names}


def quiet_rounds(rounds: list[dict[str, list[float]]]) -> list[bool]:
    """In which rounds the yardstick was within a tenth of its fastest."""
    speeds = [median(times[YARDSTICK][1:]) for times in rounds]
    return [speed <= 1.1 * min(speeds) for speed in speeds]


def play(contestants: Mapping[str, Contestant], device: torch.device, rounds: int,
         warm_up: float) -> list[dict[str, list[float]]]:
    """The rounds after a warm-up of some seconds; each contestant is the first in turn."""
    end = perf_counter() + warm_up
    while perf_counter() < end:
        play_round(contestants, 0, device)
    return [play_round(contestants, i % len(contestants), device) for i in range(rounds)]


def contestants_for(device: torch.device, tokens: int, hidden_size: int) -> dict[str, Contestant]:
    """What is compared, for a layer with heads of 128 and one sequence of `tokens`."""
    layer = graphlin.layers.GatedDeltaNet(hidden_size, head_dim=128, num_heads=max(1, hidden_size // 128), expand_v=1)
    layer.to(device, torch.bfloat16)
    graphed = graphlin.capture(layer, graphlin.Tier(tokens, 8), fallback="raise")
    x = torch.randn(1, tokens, hidden_size, device=device, dtype=torch.bfloat16)
    cu = torch.tensor([0, tokens], device=device, dtype=torch.int32)
    grad, params = torch.ones_like(x), list(layer.parameters())
    calls = {"captured": lambda: graphed(x, cu_seqlens=cu), "eager": lambda: layer(x, cu_seqlens=cu),
             "Function.apply": lambda: CloneOfMany.apply(x, *params)}

    def trains(call: Callable[[], torch.Tensor]) -> Callable[[], None]:
        def step() -> None:
            call().backward(grad)
            for p in params:
                p.grad = None
        return step

    with torch.no_grad(), graphed.acquired((x,), {"cu_seqlens": cu}) as (call, _, pair):
        copy_in, memory = partial(pair.copy_in, call.leaves, None, pair.entry), partial(pair.fresh, call.sizes[0])
    return {YARDSTICK: Contestant(lambda: sum(i * i for i in range(256))),
            "captured, no gradients": Contestant(calls["captured"]),
            "of that, memory for the output": Contestant(memory),
            "of that, copy-in": Contestant(copy_in),
            # after a copy-in that the graph does not repeat, and that has told it to deliver nowhere
            "of that, graph launch": Contestant(pair.forward.replay, before=partial(pair.copy_in, call.leaves)),
            "eager, no gradients": Contestant(calls["eager"]),
            **{f"{name}, forward with gradients": Contestant(call, grad=True) for name, call in calls.items()},
            **{f"{name}, forward and backward": Contestant(trains(call), grad=True) for name, call in calls.items()}}


def main() -> None:
    """Prints a line for each cost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--hidden-size", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--warm-up", type=float, default=WARM_UP, help="seconds (default: %(default)s)")
    options = parser.parse_args()
    device = torch.device(options.device)
    if device.type == "cpu":
        torch.set_num_threads(1)
        graphlin.register_backend(IdleBackend())
    print(f"PyTorch {torch.__version__}, {device}, T = {options.tokens}, hidden size {options.hidden_size}; microseconds a call")
    contestants = contestants_for(device, options.tokens, options.hidden_size)
    lost = _preemptions()
    rounds = play(contestants, device, options.rounds, options.warm_up)
    is_quiet = quiet_rounds(rounds)
    print(f"{'median':>9}{'quartiles':>18}{'least':>9}{'quiet':>9}{'first':>9}")
    for name in contestants:
        print(f"{Cost.of([times[name] for times in rounds], is_quiet)}  {name}")
    print(f"{len(rounds)} rounds, {sum(is_quiet)} of them quiet; lost the core to other threads {_preemptions() - lost} times")


def _preemptions() -> int:
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw


if __name__ == "__main__":
    main()
