"""Compiles what a run will launch before it is timed, in parallel processes that share the packages' caches on disk."""

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from contextlib import suppress
from functools import partial
from multiprocessing import get_context

import torch

from graphlin.bench.peers import PEERS
from graphlin.bench.problems import OUR_OPS, PROBLEMS, Sizes, random_cuts
from graphlin.bench.results import DIRECTIONS
from graphlin.bench.setting import Setting, Shape

_FORMS = ("eager", "graphed")


def compilations(setting: Setting, ops: Iterable[str]) -> list[Callable[[], None]]:
    """One for each op and form of a contestant; each can be sent to another process.

    Nothing for a CPU, where nothing is compiled.
    """
    if not setting.clock.on_device:
        return []
    contestants = [(None, "eager"), *((peer.name, form) for peer in setting.peers for form in _FORMS)]
    return [partial(_compile, op, peer, form, setting.shapes_of(op), setting.scale.sizes, str(setting.device))
            for op in ops for peer, form in contestants if peer is None or op in PEERS[peer].ops]


def in_parallel(calls: list[Callable[[], object]]) -> Iterator[Future]:
    """Runs calls in as many processes as there are cores, and yields each as it ends."""
    if not calls:
        return
    workers = min(len(calls), os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        yield from as_completed([pool.submit(call) for call in calls])


def _compile(op: str, peer: str | None, form: str, shapes: list[Shape], sizes: Sizes, device: str) -> None:
    """Runs an op at every shape. What fails here fails again where it is measured, and is reported there."""
    # Beside other processes flash-linear-attention would time its candidates wrongly: it may not keep what it finds.
    os.environ["FLA_CACHE_RESULTS"] = "0"
    with suppress(Exception):
        call = OUR_OPS[op] if peer is None else PEERS[peer].load(op)[_FORMS.index(form)]
        for tokens, seqs in shapes:
            problem = PROBLEMS[op](tokens, random_cuts(tokens, seqs, torch.device(device)), sizes)
            for direction in DIRECTIONS:
                with suppress(Exception):
                    problem.work(call, direction)()
