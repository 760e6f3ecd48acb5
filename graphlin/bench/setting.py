"""What a bench run measures with: device, sizes, shapes, peers."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from graphlin.bench.clock import Clock
from graphlin.bench.peers import Peer
from graphlin.bench.problems import PROBLEMS, Problem, Sizes, random_cuts
from graphlin.bench.results import Row
from graphlin.demo.train import ACCELERATOR, CPU, Settings

Shape = tuple[int, int]  # tokens, sequences


@dataclass(frozen=True)
class Scale:
    """Sizes and shapes for one kind of device.

    `shapes` are the default ones by section; `underfilled` the active shape and the tier's; `cold` and `ladder` the (largest)
    tier there; `model` what the demo trains.
    """

    sizes: Sizes
    shapes: dict[str, list[Shape]]
    underfilled: tuple[Shape, Shape]
    cold: Shape
    ladder: Shape
    model: Settings
    rounds: int


_DELTA_RULE = [(512, 1), (512, 8), (2048, 1), (2048, 16), (4096, 1), (4096, 32), (8192, 1), (32768, 1)]
DEVICE = Scale(Sizes(), rounds=20, underfilled=((512, 1), (4096, 32)), cold=(4096, 32), ladder=(4096, 32), model=ACCELERATOR,
               shapes={"gdn": _DELTA_RULE, "kda": _DELTA_RULE, "conv": [(512, 8), (2048, 16), (4096, 32), (32768, 1)],
                       "stages": [(512, 1), (4096, 1), (4096, 32)],
                       "layers": [(256, 1), (512, 1), (1024, 8), (2048, 16), (4096, 32), (8192, 1)],
                       "parallel": [(4096, 1), (32768, 1), (131072, 1), (131072, 8)]})
# An interpreted Triton program takes tens of milliseconds.
HOST = Scale(Sizes(H=1, HV=2, K=16, D=32, W=4, hidden=32, dtype=torch.float32), rounds=3, underfilled=((20, 1), (40, 2)),
             cold=(40, 2), ladder=(40, 2), model=CPU,
             shapes={section: [(40, 2)] for section in ("gdn", "kda", "conv", "stages", "layers", "parallel")})


def scale_of(device: torch.device) -> Scale:
    """HOST for a CPU, DEVICE for anything else."""
    return HOST if device.type == "cpu" else DEVICE


@dataclass(frozen=True)
class Setting:
    """One run's device and choices; `shapes` replaces the default ones of every section that has any."""

    device: torch.device
    scale: Scale
    quick: bool = False
    shapes: tuple[Shape, ...] = ()
    peers: tuple[Peer, ...] = ()
    ranks: int = 0  # of context parallelism; 0: none
    clock: Clock = field(init=False)

    def __post_init__(self) -> None:
        rounds = max(3, self.scale.rounds // 2) if self.quick else self.scale.rounds
        object.__setattr__(self, "clock", Clock(self.device, rounds))

    def shapes_of(self, section: str) -> list[Shape]:
        """The given shapes, or the section's; with --quick its first, and its last below 8192 tokens."""
        if self.shapes:
            return list(self.shapes)
        usual = self.scale.shapes[section]
        return list(dict.fromkeys([usual[0], [s for s in usual if s[0] < 8192][-1]])) if self.quick else usual

    def problem(self, op: str, tokens: int, seqs: int) -> Problem:
        """An op's problem whose every row is active."""
        return PROBLEMS[op](tokens, random_cuts(tokens, seqs, self.device), self.scale.sizes)


@dataclass(frozen=True)
class Job:
    """A part of a section that the progress bar counts as one."""

    label: str
    measure: Callable[[], Iterable[Row]]
