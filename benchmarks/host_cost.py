"""Host time of one call of a captured Gated DeltaNet layer: `python benchmarks/host_cost.py [--device cuda] [--tokens 512]`.

Calls are timed one by one without waiting for the device, in bursts short enough that it never makes them wait, so that what is
measured is the thread that enqueues them: copy-in, checks and replay, beside the eager call and beside one autograd.Function of
as many parameters that only clones its input. On the CPU (`--device cpu`) graphs and kernels do nothing at all: what is left is
graphlin's own Python.
"""

import argparse
from collections.abc import Callable
from contextlib import contextmanager
from itertools import pairwise
from statistics import median
from time import perf_counter
from typing import Any

import torch

import graphlin
from graphlin.backends import get_backend

BURST, BURSTS, AWAKE = 4, 200, 1  # the first call of a burst finds caches cold; a device holds few graphs that wait


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


def host_time(run: Callable[[], Any], device: torch.device) -> float:
    """Microseconds of the host for one call: the median over bursts, each begun with an idle device."""
    wait = get_backend(device).synchronize
    times = []
    for _ in range(BURSTS):
        wait(device)
        stamps = [perf_counter()]
        for _ in range(BURST):
            run()
            stamps.append(perf_counter())
        times += [(end - start) * 1e6 for start, end in pairwise(stamps[AWAKE:])]
    wait(device)
    return median(times)


def host_cost(device: torch.device, tokens: int = 512, hidden_size: int = 1024, num_heads: int = 8) -> dict[str, float]:
    """Microseconds of the host by what is called, for a layer with heads of 128 and one sequence of `tokens`."""
    layer = graphlin.layers.GatedDeltaNet(hidden_size, head_dim=128, num_heads=num_heads, expand_v=1).to(device, torch.bfloat16)
    graphed = graphlin.capture(layer, graphlin.Tier(tokens, 8))
    x = torch.randn(1, tokens, hidden_size, device=device, dtype=torch.bfloat16)
    cu = torch.tensor([0, tokens], device=device, dtype=torch.int32)
    grad, params = torch.ones_like(x), list(layer.parameters())

    def trains(call: Callable[[], torch.Tensor]) -> Callable[[], None]:
        def step() -> None:
            call().backward(grad)
            for p in params:
                p.grad = None
        return step

    calls = {"captured": lambda: graphed(x, cu_seqlens=cu), "eager": lambda: layer(x, cu_seqlens=cu),
             "Function.apply": lambda: CloneOfMany.apply(x, *params)}
    costs = {}
    with torch.no_grad():
        for name in ("captured", "eager"):
            costs[f"{name}, no gradients"] = host_time(calls[name], device)
    for name, call in calls.items():
        costs[f"{name}, forward with gradients"] = host_time(call, device)
        costs[f"{name}, forward and backward"] = host_time(trains(call), device)
    with torch.no_grad(), graphed.acquired((x,), {"cu_seqlens": cu}) as (call, _, pair):
        pair.copy_in(call.leaves)  # and nothing to deliver
        pieces = {"memory for the output": lambda: pair.fresh(call.sizes[0]), "graph launch": pair.forward.replay,
                  "copy-in": lambda: pair.copy_in(call.leaves)}
        costs |= {f"of that, {name}": host_time(run, device) for name, run in pieces.items()}
    assert not graphed.stats.eager, graphed.stats
    return costs


def main() -> None:
    """Prints a line for each cost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--hidden-size", type=int, default=1024)
    options = parser.parse_args()
    device = torch.device(options.device)
    if device.type == "cpu":
        torch.set_num_threads(1)
        graphlin.register_backend(IdleBackend())
    print(f"PyTorch {torch.__version__}, {device}, T = {options.tokens}, hidden size {options.hidden_size}; microseconds a call")
    for name, cost in host_cost(device, options.tokens, options.hidden_size, max(1, options.hidden_size // 128)).items():
        print(f"{cost:9.1f}  {name}")


if __name__ == "__main__":
    main()
