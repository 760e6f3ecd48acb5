"""Compiles what a run will launch before it is timed, in parallel processes that share the packages' caches on disk."""

import os
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain
from multiprocessing import get_context
from typing import Any

import torch

from graphlin.bench.layers import LAYERS, LayerCall
from graphlin.bench.model import random_batch, small_model, training_step
from graphlin.bench.peers import PEERS
from graphlin.bench.problems import OUR_OPS, PROBLEMS, random_cuts
from graphlin.bench.results import BOTH, DIRECTIONS
from graphlin.bench.setting import Scale, Setting, Shape
from graphlin.demo.model import MIXERS

_FORMS = ("eager", "graphed")
_SMALL = (64, 1)  # of layers; forms of long sequences or many of them are compiled where they are measured


def compilations(setting: Setting, sections: Collection[str]) -> list[Callable[[], None]]:
    """Calls that compile what the sections launch, each to be made in a process of its own; none for a CPU."""
    if not setting.clock.on_device:
        return []
    where = setting.scale, str(setting.device)
    ops = [op for op in PROBLEMS if {op, "stages", "underfilled"} & set(sections)]
    calls = [partial(_compile_op, op, None, "eager", tuple(dict.fromkeys(chain(*map(setting.shapes_of, (op, "stages"))))), *where)
             for op in ops]
    calls += [partial(_compile_op, op, peer.name, form, tuple(setting.shapes_of(op)), *where)
              for op in ops if op in sections for peer in setting.peers if op in peer.ops
              for form in (_FORMS if op in peer.tiered else _FORMS[:1])]
    if {"layers", "ladder"} & set(sections):
        calls += [partial(_compile_layer, kind, None, *where) for kind in range(len(LAYERS))]
    if "layers" in sections and PEERS["fla"] in setting.peers:
        calls += [partial(_compile_layer, kind, "fla", *where) for kind in range(len(LAYERS))]
    if "model" in sections:
        calls += [partial(_compile_model, mixer, *where) for mixer in MIXERS]
    return calls


def in_parallel(calls: list[Callable[[], object]]) -> Iterator[Future]:
    """Runs calls in as many processes as there are cores, and yields each as it ends."""
    workers = min(len(calls), os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        yield from as_completed([pool.submit(call) for call in calls])


def _compile_op(op: str, peer: str | None, form: str, shapes: tuple[Shape, ...], scale: Scale,
                device: str) -> None:
    """Runs an op at every shape. What fails here fails again where it is measured, and is reported there."""
    _keep_no_timings()
    where = torch.device(device)
    with suppress(Exception), candidates_compiled():
        call = OUR_OPS[op] if peer is None else PEERS[peer].load(op)[_FORMS.index(form)]
        for tokens, seqs in shapes:
            problem = PROBLEMS[op](tokens, random_cuts(tokens, seqs, where), scale.sizes)
            for direction in DIRECTIONS:
                with suppress(Exception):
                    problem.work(call, direction)()


def _compile_layer(index: int, peer: str | None, scale: Scale, device: str) -> None:
    _keep_no_timings()
    where, kind = torch.device(device), LAYERS[index]
    with suppress(Exception), candidates_compiled():
        layer = kind.build(scale.sizes, where)
        layer = layer if peer is None else kind.build_peer(layer, scale.sizes, where)
        LayerCall(layer, *_SMALL, scale.sizes, where).work(layer, BOTH)()


def _compile_model(mixer: str, scale: Scale, device: str) -> None:
    where = torch.device(device)
    with suppress(Exception):
        model = small_model(mixer, scale.model, where)
        training_step(model, scale.model.learning_rate, *random_batch(_SMALL, where))()


@contextmanager
def candidates_compiled(threads: int = 4) -> Iterator[None]:
    """Inside, Triton's autotuner compiles all candidates for a launch, in threads, and makes it by the first that fits; timing
    them, alone on the device, is left to the process that measures. Nothing where Triton, before 3.5, compiles in no threads."""
    import triton
    if not hasattr(triton, "AsyncCompileMode"):
        yield
        return
    from triton.runtime.autotuner import Autotuner
    compiled, own = set(), Autotuner.run

    def run(tuner: Autotuner, *args: Any, **kwargs: Any) -> Any:
        tuner.nargs = dict(zip(tuner.arg_names, args, strict=False))
        given = tuner.nargs | kwargs
        key = id(tuner), *(str(given.get(name)) for name in tuner.keys), *(str(getattr(x, "dtype", "")) for x in given.values())
        configs = tuner.prune_configs(kwargs)
        if key not in compiled:
            compiled.add(key)
            with triton.AsyncCompileMode(pool, ignore_errors=True):
                for config in configs:
                    with suppress(Exception):
                        tuner.fn.warmup(*args, **{k: v for k, v in kwargs.items() if k != "warmup"}, **config.all_kwargs())
        for config in configs[:-1]:
            with suppress(Exception):
                return tuner.fn.run(*args, **kwargs, **config.all_kwargs())
        return tuner.fn.run(*args, **kwargs, **configs[-1].all_kwargs())

    with ThreadPoolExecutor(threads) as pool:
        Autotuner.run = run
        try:
            yield
        finally:
            Autotuner.run = own


def _keep_no_timings() -> None:
    """Beside other processes flash-linear-attention would time its candidates wrongly: it may not keep what it finds."""
    os.environ["FLA_CACHE_RESULTS"] = "0"
