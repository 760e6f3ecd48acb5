"""How long a fresh process takes to its first captured forward and backward, with an empty and with a full kernel cache."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from tempfile import TemporaryDirectory
from time import perf_counter

import torch

import graphlin
from graphlin.backends import get_backend
from graphlin.bench.layers import LAYERS, LayerCall, LayerKind
from graphlin.bench.results import BOTH, COLD, OURS, WARM, Key, Row, Sample
from graphlin.bench.setting import Job, Setting, scale_of


def jobs(setting: Setting) -> list[Job]:
    """One for each kind of layer."""
    return [Job(f"cold start, {kind.name}", partial(measure, setting, kind)) for kind in LAYERS]


def measure(setting: Setting, kind: LayerKind) -> Iterator[Row]:
    """Two processes one after the other, over one cache folder that is empty before the first."""
    key = Key("cold", kind.name, *setting.scale.cold, BOTH)
    with TemporaryDirectory() as cache:
        for measured in (COLD, WARM):
            yield Row(key, OURS, measured, Sample.of([_seconds_of_process(kind, setting.device, cache) * 1e6]))


def _seconds_of_process(kind: LayerKind, device: torch.device, cache: str) -> float:
    command = [sys.executable, "-m", "graphlin.bench.cold", kind.name, str(device)]
    done = subprocess.run(command, env={**os.environ, "TRITON_CACHE_DIR": cache}, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the fresh process failed: {done.stderr.strip().splitlines()[-1:]}")
    return json.loads(done.stdout)["seconds"]


def first_replay(kind: LayerKind, device: torch.device) -> float:
    """Seconds from now until a new layer's first captured forward and backward has run."""
    start = perf_counter()
    scale = scale_of(device)
    tokens, seqs = scale.cold
    layer = kind.build(scale.sizes, device)
    graphed = graphlin.capture(layer, graphlin.Tier(tokens, seqs), fallback="raise")
    LayerCall(layer, tokens, seqs, scale.sizes, device).work(graphed, BOTH)()
    get_backend(device).synchronize(device)
    if graphed.stats.replays != 1 or graphed.stats.backward_replays != 1:
        raise RuntimeError(f"expected one replay forward and one backward, found {graphed.stats}")
    return perf_counter() - start


SECTIONS = {"cold": jobs}

if __name__ == "__main__":
    _kind = next(kind for kind in LAYERS if kind.name == sys.argv[1])
    print(json.dumps({"seconds": first_replay(_kind, torch.device(sys.argv[2]))}))
