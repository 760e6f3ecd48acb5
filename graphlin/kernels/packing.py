"""How the tokens of one call are laid out: what every launcher passes on to its kernel."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Packing:
    """Dense `[B, T]` or packed `[1, T]` tokens, cut into chunks of BT rows.

    cu `[N + 1]` and chunks `[NT, 2]` are None for dense input. T is the rows of one dense sequence, or of the whole pack;
    NTS the chunks of one dense sequence; NS the workspace slots (see `common.chunk_slot`); capture the kernels'
    GRAPH_CAPTURE flag.
    """

    cu: torch.Tensor | None
    chunks: torch.Tensor | None
    N: int
    T: int
    NT: int
    NTS: int
    BT: int
    capture: bool

    @property
    def varlen(self) -> bool:
        return self.cu is not None

    @property
    def rows(self) -> int:
        return self.T if self.varlen else self.N * self.T

    @property
    def NS(self) -> int:
        return self.rows // self.BT + self.N
