"""A whole small model: a training step and a prefill, eager and with its blocks captured."""

from collections.abc import Callable, Iterator
from functools import partial

import torch

import graphlin
from graphlin.bench.problems import random_cuts
from graphlin.bench.results import BOTH, CAPTURED, EAGER, FORWARD, OURS, Key, Row
from graphlin.bench.setting import Job, Setting, Shape
from graphlin.demo.model import BYTES, MIXERS, ByteModel
from graphlin.demo.train import Settings


def jobs(setting: Setting) -> list[Job]:
    """One for each kind of layer that the model may hold."""
    return [Job(f"model of {MIXERS[mixer].__name__}", partial(measure, setting, mixer)) for mixer in MIXERS]


def measure(setting: Setting, mixer: str) -> Iterator[Row]:
    """The demo's model on one packed batch that fills its tier; times until the device is done."""
    tier = setting.scale.model.tier
    batch = random_batch((tier.tokens, tier.seqs), setting.device)
    steps, prefills = {}, {}
    for measured in (EAGER, CAPTURED):
        model = small_model(mixer, setting.scale.model, setting.device)
        if measured == CAPTURED:
            model.blocks = graphlin.capture(model.blocks, tier, fallback="raise")
        steps[measured] = training_step(model, setting.scale.model.learning_rate, *batch)
        prefills[measured] = _prefill(model, *batch)
    for case, direction, works in (("training step", BOTH, steps), ("prefill", FORWARD, prefills)):
        key = Key("model", f"{MIXERS[mixer].__name__}, {case}", tier.tokens, tier.seqs, direction)
        for work in works.values():
            work()      # compiles, captures, makes the optimiser's state
        for measured, sample in setting.clock.until_done(works).items():
            yield Row(key, OURS, measured, sample)


def small_model(mixer: str, settings: Settings, device: torch.device) -> ByteModel:
    """The demo's model, always with the same weights."""
    torch.manual_seed(0)
    return ByteModel([mixer] * settings.num_blocks, settings.hidden_size, settings.num_heads, settings.head_dim,
                     settings.tier.chunk_size).to(device, settings.dtype)


def random_batch(shape: Shape, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inputs `[1, T]`, targets `[T]` and cu_seqlens of random bytes."""
    inputs = torch.randint(BYTES, (1, shape[0]), device=device)
    return inputs, inputs[0].roll(-1), random_cuts(*shape, device)


def training_step(model: ByteModel, learning_rate: float, inputs: torch.Tensor, targets: torch.Tensor,
                  cu_seqlens: torch.Tensor) -> Callable[[], None]:
    """Loss, gradients and optimiser step on one batch."""
    optimizer = torch.optim.AdamW(model.parameters(), learning_rate)

    def step() -> None:
        model.loss(inputs, targets, cu_seqlens).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _prefill(model: ByteModel, inputs: torch.Tensor, targets: torch.Tensor,
             cu_seqlens: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Logits of the last token of every sequence."""
    last = cu_seqlens[1:].long() - 1

    @torch.no_grad()
    def prefill() -> torch.Tensor:
        hidden = model.blocks(model.embedding(inputs), cu_seqlens)
        return model.head(model.norm(hidden[0, last]))

    return prefill


SECTIONS = {"model": jobs}
