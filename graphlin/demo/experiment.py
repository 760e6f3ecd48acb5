"""The demo's experiment: the same training twice, eager and captured, and what tells the two apart."""

from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import nn

import graphlin
from graphlin.demo.data import Batch, make_batches, read_paragraphs
from graphlin.demo.model import MIXERS
from graphlin.demo.report import Comparison, Launches, Packing, Result, Series
from graphlin.demo.train import ACCELERATOR, CPU, PaddedBlocks, Run, Settings, best_device, train
from graphlin.verify import Report


def compare(mixer: str, text: Path | None, steps: int, small: bool, console: Console) -> Result:
    """Trains a model of `mixer` layers (a name of MIXERS) for `steps` steps on `text` (None: the text shipped), eager and
    captured, at the sizes of the device, or of a CPU if `small`; progress goes to `console`.

    Raises TextError where the text can't be used.
    """
    device = best_device()
    settings = CPU if small or device.type == "cpu" else ACCELERATOR
    batches = [batch.to(device) for batch in make_batches(read_paragraphs(text), settings.tier, steps)]
    last_within = next(b for b in reversed(batches) if settings.tier.fits(b.tokens, b.seqs))

    columns = TextColumn("{task.description:<9}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console) as progress:
        def train_with(name: str, wrap: Callable[[nn.Module], nn.Module]) -> Run:
            task = progress.add_task(name, total=steps)
            return train(mixer, settings, batches, device, wrap, lambda: progress.advance(task))

        eager = train_with("eager", lambda blocks: PaddedBlocks(blocks, settings.tier))
        captured = train_with("captured", lambda blocks: graphlin.capture(
            blocks, settings.tier, num_warmup_iters=settings.num_warmup_iters))
        stats = captured.model.blocks.stats
        counts = {"replays": stats.replays, "backward_replays": stats.backward_replays, "eager_calls": dict(stats.eager)}
        task = progress.add_task("verify", total=1)
        report = _verify(captured.model, last_within)
        progress.advance(task)

    return Result(
        device=_device_name(device), clock=_clock(device), dtype=str(settings.dtype).removeprefix("torch."),
        text="the text that comes with graphlin" if text is None else str(text),
        parameters=sum(p.numel() for p in captured.model.parameters()), layers=settings.num_blocks,
        mixer=MIXERS[mixer].__name__, tier=settings.tier, tier_bytes=captured.model.blocks.held_bytes(),
        packings=[Packing(b.cu_seqlens.diff().tolist(), not settings.tier.fits(b.tokens, b.seqs)) for b in batches],
        losses=Series(eager.losses, captured.losses), seconds=Series(eager.seconds, captured.seconds),
        comparison=_comparison(eager, captured, report), launches=_launches(report, settings), **counts)


def _verify(model: nn.Module, batch: Batch) -> Report:
    """One more replay of the trained blocks, over outputs filled with NaN, against eager at both kinds of shapes."""
    return graphlin.verify(model.blocks, model.embedding(batch.inputs).detach().requires_grad_(), batch.cu_seqlens)


def _comparison(eager: Run, captured: Run, report: Report) -> Comparison:
    a, b = eager.state(), captured.state()
    return Comparison(bitwise=torch.equal(a, b), largest_difference=(a - b).abs().max().item(),
                      exact_shapes=max(report.errors.values()), mismatches=report.mismatches)


def _launches(report: Report, settings: Settings) -> Launches:
    def per_layer(path: str) -> float:
        return sum(n for (p, _), n in report.launches.items() if p == path) / settings.num_blocks

    return Launches(eager=per_layer("eager"), replayed=per_layer("graph"))


def _device_name(device: torch.device) -> str:
    if device.type == "cpu":
        return "CPU, kernels run by Triton's interpreter"
    return torch.get_device_module(device).get_device_name(device)


def _clock(device: torch.device) -> str:
    return "wall time on a CPU, no measure of an accelerator" if device.type == "cpu" else "wall time, device synchronised"
