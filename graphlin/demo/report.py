"""What the demo found: the numbers, whether they are right, and how they are shown."""

from dataclasses import asdict, dataclass
from statistics import median

from rich.console import Console
from rich.table import Table

from graphlin.tier import Tier

REQUIRED_FALL = 0.2


@dataclass(frozen=True)
class Packing:
    """The sequence lengths of one step's batch, and whether it is larger than the tier."""

    lengths: list[int]
    over_tier: bool


@dataclass(frozen=True)
class Series:
    """One number a step, of both runs."""

    eager: list[float]
    captured: list[float]


@dataclass(frozen=True)
class Comparison:
    """How the two runs differ.

    `bitwise` and `largest_difference` compare all losses and final parameters, with the eager run padded to the tier's
    shapes. `exact_shapes` is the largest relative RMS difference between a replay and eager at the input's own shapes,
    over outputs and gradients; `mismatches` are what `graphlin.verify` found wrong.
    """

    bitwise: bool
    largest_difference: float
    exact_shapes: float
    mismatches: list[str]


@dataclass(frozen=True)
class Launches:
    """Host launches per layer for one forward and backward, without copying inputs in and outputs out."""

    eager: float
    replayed: float


@dataclass(frozen=True)
class Result:
    """Everything the demo reports; losses in nats a byte, times in seconds, memory in bytes."""

    device: str
    dtype: str
    clock: str
    text: str
    parameters: int
    mixer: str
    layers: int
    tier: Tier
    tier_bytes: int
    packings: list[Packing]
    losses: Series
    seconds: Series
    comparison: Comparison
    launches: Launches
    replays: int
    backward_replays: int
    eager_calls: dict[str, int]

    @property
    def loss_fall(self) -> float:
        """Part of the first loss that is gone at the end, in the run where it fell less."""
        return min(1 - losses[-1] / losses[0] for losses in (self.losses.eager, self.losses.captured))

    @property
    def problems(self) -> list[str]:
        """One line for each thing that is wrong; empty if the run shows what it should."""
        problems = list(self.comparison.mismatches)
        if not self.comparison.bitwise:
            problems.append("losses and parameters of the captured run differ from the eager run's by up to "
                            f"{self.comparison.largest_difference:.3g}")
        within = sum(not packing.over_tier for packing in self.packings)
        if self.replays != within or self.backward_replays != within:
            problems.append(f"{self.replays} forward and {self.backward_replays} backward replays, expected {within} each")
        if not self.loss_fall >= REQUIRED_FALL:
            problems.append(f"the loss fell by {self.loss_fall:.0%}, expected at least {REQUIRED_FALL:.0%}")
        return problems

    def usual(self, seconds: list[float]) -> float:
        """Median over the steps within the tier, without the first, which compiles, or captures."""
        within = [s for s, packing in zip(seconds, self.packings, strict=True) if not packing.over_tier]
        return median(within[1:])

    def as_json(self) -> dict:
        """Plain values, with what is derived from them."""
        derived = {"usual_seconds": {"eager": self.usual(self.seconds.eager), "captured": self.usual(self.seconds.captured)},
                   "loss_fall": self.loss_fall, "problems": self.problems, "ok": not self.problems}
        return asdict(self) | derived


def show(result: Result, console: Console) -> None:
    """Prints the result for people."""
    console.print(_steps(result))
    console.print(_summary(result))
    for problem in result.problems:
        console.print(f"[bold red]wrong[/]  {problem}")
    if not result.problems:
        console.print("[bold green]right[/]  the captured run did what the eager run did, and both learned")


def _steps(result: Result) -> Table:
    table = Table("step", "tokens", "seqs", "loss\neager", "\ncaptured", "ms\neager", "\ncaptured", "captured\nrun",
                  title=f"Training on {result.text}", caption="A step over the tier runs eagerly in the captured model.")
    for column in table.columns:
        column.justify = "right"
    rows = zip(result.packings, result.losses.eager, result.losses.captured, result.seconds.eager,
               result.seconds.captured, strict=True)
    for step, (packing, *losses, eager_seconds, captured_seconds) in enumerate(rows, 1):
        table.add_row(str(step), str(sum(packing.lengths)), str(len(packing.lengths)), *(f"{loss:.6f}" for loss in losses),
                      f"{1e3 * eager_seconds:.1f}", f"{1e3 * captured_seconds:.1f}",
                      "over tier" if packing.over_tier else "replayed")
    return table


def _summary(result: Result) -> Table:
    tier, comparison, launches, losses = result.tier, result.comparison, result.launches, result.losses.captured
    difference = "equal bit for bit" if comparison.bitwise else f"differ by up to {comparison.largest_difference:.3g}"
    eager, captured = (1e3 * result.usual(seconds) for seconds in (result.seconds.eager, result.seconds.captured))
    rows = {
        "device": f"{result.device}; {result.dtype}",
        "model": f"{result.parameters:,} parameters, {result.mixer} layers: {result.layers}",
        "packings": f"{len({tuple(p.lengths) for p in result.packings})} different ones in {len(result.packings)} steps",
        "tier": f"{tier.tokens} tokens in {tier.seqs} sequences, chunks of {tier.chunk_size}; holds "
                f"{result.tier_bytes / 2**20:.2f} MiB",
        "loss": f"{losses[0]:.3f} to {losses[-1]:.3f} nats a byte, {result.loss_fall:.0%} less",
        "eager, captured": f"losses and final parameters {difference} (eager padded to the tier)",
        "exact shapes": f"without padding, eager differs from a replay by {comparison.exact_shapes:.1g} (relative RMS)",
        "calls": f"{result.replays} forward and {result.backward_replays} backward replays; eager: "
                 + (", ".join(f"{n} by {reason}" for reason, n in result.eager_calls.items()) or "none"),
        "host launches": f"{launches.eager:.1f} a layer eager, {launches.replayed:.1f} replayed, forward and backward",
        "time of a step": f"{eager:.1f} ms eager, {captured:.1f} ms captured, median; {result.clock}",
    }
    table = Table.grid(padding=(0, 2))
    for name, value in rows.items():
        table.add_row(f"[bold]{name}[/]", value)
    return table
