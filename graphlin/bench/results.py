"""What a bench run found: one row for each measured number, and the run that it came from. Pure Python."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median, quantiles

FORWARD, BOTH = "forward", "forward+backward"
DIRECTIONS = (FORWARD, BOTH)
OURS = "graphlin"

# How a time was taken, in the columns of the tables.
REPLAY, EAGER_HOST, EAGER_DEVICE = "graph replay", "eager, host", "eager, device"
EAGER, CAPTURED, KERNELS = "eager", "captured", "sum of kernels"
EXACT, UNDERFILLED = "exact size", "under-filled"
COLD, WARM = "empty cache", "warm cache"
ONE_TIER, LADDER = "one tier", "ladder"
ONE_RANK = "one rank"


@dataclass(frozen=True)
class Sample:
    """Repeated measurements in microseconds: their median, quartiles and number."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Sample":
        """Raises ValueError without values.

        >>> Sample.of([3.0, 1.0, 2.0]).median
        2.0
        """
        if not values:
            raise ValueError("values: expected at least one measurement, found none")
        low, _, high = quantiles(values, n=4, method="inclusive") if len(values) > 1 else (values[0],) * 3
        return cls(median(values), low, high, len(values))

    @property
    def spread(self) -> float:
        """Half the distance of the quartiles, relative to the median."""
        return (self.high - self.low) / (2 * self.median) if self.median else 0.0


@dataclass(frozen=True)
class Key:
    """What was measured, in a section: a case (an op, a layer), its tokens and sequences, and the direction."""

    section: str
    case: str
    tokens: int
    seqs: int
    direction: str = BOTH


@dataclass(frozen=True)
class Row:
    """One number: who ran it, how it was measured, and the sample, or the error that stands in its place."""

    key: Key
    who: str
    measure: str
    sample: Sample | None = None
    error: str | None = None
    note: str = ""


@dataclass(frozen=True)
class Environment:
    """Where and when a run was made."""

    date: str
    commit: str
    device: str
    clock: str
    versions: dict[str, str]
    sizes: dict[str, int | str]
    device_facts: dict[str, str]
    command: str


@dataclass
class Run:
    """The rows of one process."""

    environment: Environment
    rows: list[Row] = field(default_factory=list)

    def section(self, name: str) -> list[Row]:
        return [row for row in self.rows if row.key.section == name]

    @property
    def sections(self) -> list[str]:
        """Names in the order of measuring."""
        return list(dict.fromkeys(row.key.section for row in self.rows))

    def save(self, path: Path) -> None:
        """Writes one JSON object: `environment`, and `rows` with the fields of `Row`."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")


def load(path: Path) -> Run:
    """Reads what `Run.save` wrote; raises ValueError naming the file if it is anything else."""
    try:
        content = json.loads(path.read_text())
        return Run(Environment(**content["environment"]), [_row(**row) for row in content["rows"]])
    except (OSError, UnicodeDecodeError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: expected a file that graphlin bench --json wrote, found {type(error).__name__}: {error}"
                         ) from error


def _row(key: dict, sample: dict | None, **rest: str) -> Row:
    return Row(Key(**key), sample=sample and Sample(**sample), **rest)


def find(rows: Iterable[Row], key: Key, who: str, measure: str) -> Row | None:
    """The row of this number, if it was measured."""
    return next((row for row in rows if (row.key, row.who, row.measure) == (key, who, measure)), None)
