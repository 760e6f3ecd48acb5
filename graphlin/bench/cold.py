"""How long a fresh process takes to its first captured forward and backward, with an empty and with a full kernel cache."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from tempfile import TemporaryDirectory
from time import perf_counter

import torch

import graphlin
from graphlin.backends import get_backend
from graphlin.bench.layers import LAYERS, LayerCall, LayerKind
from graphlin.bench.problems import Sizes
from graphlin.bench.results import BOTH, COLD, OURS, WARM, Key, Row, Sample
from graphlin.bench.setting import Job, Setting, Shape, scale_of


def jobs(setting: Setting) -> list[Job]:
    """One for each kind of layer."""
    return [Job(f"cold start, {kind.name}", partial(measure, setting, kind)) for kind in LAYERS]


def measure(setting: Setting, kind: LayerKind) -> Iterator[Row]:
    """Two processes one after the other, over one cache folder that is empty before the first."""
    key = Key("cold", kind.name, *setting.scale.cold, BOTH)
    with TemporaryDirectory() as cache:
        for measured in (COLD, WARM):
            yield Row(key, OURS, measured, Sample.of([_seconds_of_process(kind, setting, cache) * 1e6]))


def _seconds_of_process(kind: LayerKind, setting: Setting, cache: str) -> float:
    sizes = {name: value for name, value in asdict(setting.scale.sizes).items() if isinstance(value, int)}
    command = [sys.executable, "-m", "graphlin.bench.cold", kind.name, str(setting.device), json.dumps(setting.scale.cold),
               json.dumps(sizes)]
    done = subprocess.run(command, env={**os.environ, "TRITON_CACHE_DIR": cache}, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the fresh process failed: {done.stderr.strip().splitlines()[-1:]}")
    return json.loads(done.stdout)["seconds"]


def first_replay(kind: LayerKind, device: torch.device, shape: Shape, sizes: Sizes) -> float:
    """Seconds from now until a new layer's first captured forward and backward has run, from a loss as in training.

    A gradient handed to the backward, in the loss's place, lets PyTorch import SymPy to check its shape.
    """
    start = perf_counter()
    layer = kind.build(sizes, device)
    graphed = graphlin.capture(layer, graphlin.Tier(*shape), fallback="raise")
    call = LayerCall(layer, *shape, sizes, device)
    graphed(call.hidden, cu_seqlens=call.cu_seqlens).sum().backward()
    get_backend(device).synchronize(device)
    if graphed.stats.replays != 1 or graphed.stats.backward_replays != 1:
        raise RuntimeError(f"expected one replay forward and one backward, found {graphed.stats}")
    return perf_counter() - start


def main(name: str, device_name: str, shape: str, sizes: str) -> None:
    """What the fresh process does; its imports are done."""
    kind, device = next(kind for kind in LAYERS if kind.name == name), torch.device(device_name)
    seconds = first_replay(kind, device, tuple(json.loads(shape)), replace(scale_of(device).sizes, **json.loads(sizes)))
    print(json.dumps({"seconds": seconds}), flush=True)


SECTIONS = {"cold": jobs}

if __name__ == "__main__":
    main(*sys.argv[1:])
    os._exit(0)  # a thread of autograd that still lets go of the backward would want the interpreter's lock while that ends
