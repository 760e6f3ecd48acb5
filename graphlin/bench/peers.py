"""Other packages that compute the same: how each is called, and whether it computes what graphlin does."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module

import torch

from graphlin.bench.problems import OUR_OPS, Op, Problem

# Relative root mean square of the difference of two bfloat16 results, outputs and gradients; what sums over all tokens, or
# is small by cancellation, has more.
TOLERANCE = 3e-2
LOOSER = {"gradient of g": 6e-2, "gradient of beta": 6e-2, "gradient of dt_bias": 1e-1, "gradient of A_log": 2e-1}


class PeerError(RuntimeError):
    """A peer that can't be compared, with the reason."""


@dataclass(frozen=True)
class Peer:
    """A package: the distributions whose versions are told, and for each op a loader of its eager and its capturable form.

    Graphs of the ops in `tiered` may be replayed with other lengths than they were captured with.
    """

    name: str
    distributions: tuple[str, ...]
    ops: Mapping[str, Callable[[], tuple[Op, Op]]]
    tiered: tuple[str, ...] = ()

    def load(self, op: str) -> tuple[Op, Op]:
        """Raises PeerError where the package lacks the op or can't be imported."""
        if op not in self.ops:
            raise PeerError(f"{self.name} has no such op")
        try:
            return self.ops[op]()
        except Exception as error:  # a peer may fail in any way, and is then reported with it
            raise PeerError(f"cannot be imported: {describe(error)}") from error


def _outputs(call: Callable) -> Op:
    return lambda **arguments: call(**arguments)[0]


def _fla(module: str, name: str) -> Callable:
    # flash-linear-attention hands Gated DeltaNet to FlashQLA where that is installed; here each is measured by itself.
    os.environ["FLA_FLASH_QLA"] = "0"
    return getattr(import_module(module), name)


def _fla_gdn() -> tuple[Op, Op]:
    op = _outputs(_fla("fla.ops.gated_delta_rule", "chunk_gated_delta_rule"))
    return op, op


def _fla_kda() -> tuple[Op, Op]:
    """Its graph mode reads the lengths on the device, as graphlin does; its usual mode needs them on the host."""
    call = _fla("fla.ops.kda", "chunk_kda")
    return _outputs(call), lambda **arguments: call(use_graph=True, **arguments)[0]


def _fla_conv() -> tuple[Op, Op]:
    op = _outputs(_fla("fla.modules.causal_conv1d", "causal_conv1d"))
    return op, op


def _flash_qla_gdn() -> tuple[Op, Op]:
    op = _outputs(import_module("flash_qla").chunk_gated_delta_rule)
    return op, op


PEERS = {
    "fla": Peer("fla", ("flash-linear-attention", "fla-core", "tilelang"), {"gdn": _fla_gdn, "kda": _fla_kda, "conv": _fla_conv},
                tiered=("kda",)),
    "flash_qla": Peer("flash_qla", ("flash-qla", "tilelang"), {"gdn": _flash_qla_gdn}),
}


@dataclass(frozen=True)
class Contestant:
    """One package's work on one problem: as an eager call, and as what a graph captures. Both return the results."""

    name: str
    eager: Callable
    graphed: Callable


def ours(problem: Problem, direction: str) -> Contestant:
    """graphlin's own work, the same eager and captured."""
    work = problem.work(OUR_OPS[problem.op], direction)
    return Contestant("graphlin", work, work)


def contender(peer: Peer, problem: Problem, direction: str, expected: Sequence[torch.Tensor], *,
              active: int | None = None) -> Contestant:
    """A peer's work, if both its forms give the `expected` results within tolerance; raises PeerError otherwise.

    Rows from `active` on are not compared: peers leave them undefined.
    """
    eager, graphed = peer.load(problem.op)
    works = [problem.work(op, direction) for op in (eager, graphed)]
    for work in works if eager is not graphed else works[:1]:
        try:
            found = work()
        except Exception as error:
            raise PeerError(describe(error)) from error
        check_alike(problem.names(direction), *(_active_rows(results, active) for results in (found, expected)))
    return Contestant(peer.name, *works)


def _active_rows(results: Sequence[torch.Tensor], active: int | None) -> list[torch.Tensor]:
    """What is `[1, T, ...]` cut to its first rows; the rest as it is."""
    return [t[:, :active] if t.ndim > 2 else t for t in results]


def check_alike(names: Sequence[str], found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    """Raises PeerError naming the first result that differs by more than its tolerance."""
    for name, a, b in zip(names, found, expected, strict=True):
        difference = relative_difference(a, b)
        tolerance = LOOSER.get(name, TOLERANCE)
        if not difference <= tolerance:
            raise PeerError(f"computes something else: {name} differs by {difference:.1e} (relative RMS), expected at most "
                            f"{tolerance:.0e}")


def relative_difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Root mean square of the difference over that of `expected`."""
    return ((found.float() - expected.float()).norm() / expected.float().norm().clamp(min=1e-30)).item()


def describe(error: BaseException) -> str:
    """An error in one line of a table: its beginning, and its end, which is what a traceback of another process comes to."""
    text = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return text if len(text) <= 300 else f"{text[:99]} ... {text[-196:]}"
