"""Batches whose tokens are split over ranks, against one rank that holds them all: `--cp RANKS`."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

import torch
import torch.distributed as dist
from torch import nn

from graphlin.backends import get_backend
from graphlin.bench.clock import Clock, Work
from graphlin.bench.layers import LAYERS
from graphlin.bench.problems import OUR_OPS, PROBLEMS, Sizes, random_cuts
from graphlin.bench.results import BOTH, ONE_RANK, OURS, Key, Row, Sample
from graphlin.bench.setting import Job, Setting, Shape
from graphlin.parallel import ContextParallel, context_parallel
from graphlin.parallel.exchange import CAPTURABLE

COLLECTIVES = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}
OPS = ("gdn", "kda")

MakeContext = Callable[[], ContextParallel]


def jobs(setting: Setting) -> list[Job]:
    """One for all cases, since starting the processes takes longer than measuring; none unless ranks were asked for."""
    return [Job(f"{setting.ranks} ranks", partial(measure, setting))] if setting.ranks else []


def measure(setting: Setting) -> Iterator[Row]:
    """Forward and backward of ops and layers in a process for each rank, as graph replays where collectives can be captured."""
    with TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_rank, (setting.ranks, setting.device.type, setting.scale.sizes,
                                            setting.shapes_of("parallel"), setting.clock.rounds, Path(folder)),
                                    nprocs=setting.ranks)
        times = torch.load(Path(folder) / "times.pt")
    for (case, tokens, seqs), (alone, together) in times.items():
        key = Key("parallel", case, tokens, seqs, BOTH)
        yield Row(key, OURS, ONE_RANK, Sample.of(alone))
        yield Row(key, OURS, f"{setting.ranks} ranks", Sample.of(together))


def _rank(rank: int, ranks: int, kind: str, sizes: Sizes, shapes: Sequence[Shape], rounds: int, folder: Path) -> None:
    """One process: every case on rank 0 alone, then on all ranks; rank 0 leaves the times."""
    device = torch.device(kind) if kind == "cpu" else torch.device(kind, rank)
    if kind != "cpu":
        torch.get_device_module(kind).set_device(device)
    dist.init_process_group(COLLECTIVES[kind], init_method=f"file://{folder / 'store'}", rank=rank, world_size=ranks)
    times = {}
    for tokens, seqs in shapes:
        cu = random_cuts(tokens, seqs, device)
        offsets = torch.tensor([tokens * i // ranks for i in range(ranks + 1)], device=device)
        own = tokens * (rank + 1) // ranks - tokens * rank // ranks
        for case in (*OPS, *(kind.name for kind in LAYERS)):
            work = _work(case, tokens, sizes, device, {"cu_seqlens": cu}, None) if rank == 0 else None
            alone = _times(work, device, rounds)
            del work
            make = partial(context_parallel, None, cu, offsets)
            times[case, tokens, seqs] = alone, _times(_work(case, own, sizes, device, {}, make), device, rounds)
    if rank == 0:
        torch.save(times, folder / "times.pt")
    dist.barrier()
    dist.destroy_process_group()


def _work(case: str, tokens: int, sizes: Sizes, device: torch.device, packing: dict, make: MakeContext | None) -> Work:
    """One step of a case on so many tokens; the context of several ranks is part of it."""
    def context() -> dict:
        return packing if make is None else {"cp_context": make()}
    if case in OPS:
        problem = PROBLEMS[case](tokens, random_cuts(tokens, 1, device), sizes)
        options = {name: value for name, value in problem.options.items() if name != "cu_seqlens"}
        return replace(problem, options=options).work(lambda **arguments: OUR_OPS[case](**arguments, **context()), BOTH)
    layer = next(kind for kind in LAYERS if kind.name == case).build(sizes, device)
    hidden = torch.randn(1, tokens, sizes.hidden, device=device).to(sizes.dtype).requires_grad_()
    return partial(_layer_step, layer, hidden, context)


def _layer_step(layer: nn.Module, hidden: torch.Tensor, context: Callable[[], dict]) -> Sequence[torch.Tensor]:
    output = layer(hidden, **context())
    return torch.autograd.grad(output, [hidden, *layer.parameters()], torch.ones_like(output))


def _times(work: Work | None, device: torch.device, rounds: int) -> list[float]:
    """Microseconds of each round, of the slowest rank: all ranks begin together, those without work just wait."""
    backend = get_backend(device)
    if work is not None and COLLECTIVES[device.type] in CAPTURABLE:
        work = Clock(device, rounds).captured(work)
    times = torch.zeros(rounds, dtype=torch.float64)
    for i in range(rounds):
        dist.barrier()
        backend.synchronize(device)
        start = perf_counter()
        if work is not None:
            work()
            backend.synchronize(device)
            times[i] = (perf_counter() - start) * 1e6
    found = times.to(device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.tolist()


SECTIONS = {"parallel": jobs}
