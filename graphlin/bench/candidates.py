"""Launch records that `python -m graphlin tune` tries, by kernel: the values of tiles and of the record's own fields."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from graphlin.backends import LaunchRecord

Search = Mapping[str, Sequence[Any]]

FIELDS = ("num_warps", "num_stages", "waves")
_USUAL = {"num_warps": (2, 4, 8), "num_stages": (1, 2, 3), "waves": (2, 4, 8)}
_RECURRENCE = {"BV": (16, 32, 64), "num_warps": (2, 4, 8), "num_stages": (1, 2, 3, 4)}
_PRODUCTS = {"BK": (32, 64, 128), "BV": (32, 64, 128), "num_warps": (4, 8), "num_stages": (1, 2, 3), "waves": (2, 4)}
# Their BK is the columns of products. Triton 3.6 gets those of fewer than 64 by four warps wrong on Hopper, without a word.
_COLUMNS = {**_PRODUCTS, "BK": (64, 128)}
_FINISH = {"num_warps": (2, 4, 8), "waves": (4, 8, 16)}

# The recurrences hold a whole row of the state, so BK is not theirs to choose; precisions are a matter of accuracy.
SEARCH: dict[str, Search] = {
    "chunk_table_rows": {"BR": (32, 64, 128), "BN": (32, 64, 128), "num_warps": (1, 2, 4)},
    "gdn_prep": {"BK": (32, 64, 128), "BI": (8, 16), "num_warps": (1, 2, 4, 8), "num_stages": (1, 2), "waves": (2, 4, 8, 16)},
    "delta_recurrence": _RECURRENCE,
    **dict.fromkeys(("delta_recurrence_halves", "delta_recurrence_quarters", "delta_recurrence_channel_halves"),
                    {**_RECURRENCE, "BV": (64, 128), "num_warps": (4, 8)}),
    "delta_two_recurrences": _RECURRENCE,
    "gdn_pair_gradients": _PRODUCTS,
    "gdn_state_gradients": _COLUMNS,
    "gdn_finish_gradients": _FINISH,
    "kda_prep": {"BK": (16, 32, 64, 128), "BI": (8, 16), "num_warps": (2, 4, 8), "num_stages": (1, 2, 3), "waves": (2, 4, 8)},
    "kda_inter_gradients": _COLUMNS,
    "kda_intra_gradients": {"BK": (16, 32, 64), "num_warps": (2, 4), "num_stages": (1, 2, 3), "waves": (2, 4, 8)},
    "kda_finish_gradients": _FINISH,
    "conv_forward": {"BR": (1, 2, 4), "BD": (64, 128, 256), "UNROLL": (4, 8), "num_warps": (1, 2, 4), "waves": (16, 32, 64)},
    "conv_backward": {"BR": (1, 2, 4), "BD": (64, 128, 256), "UNROLL": (2, 4, 8), "num_warps": (1, 2, 4),
                      "waves": (16, 32, 64)},
    "sum_chunks": {"BR": (16, 64, 256, 1024), "BX": (8, 16, 32, 64), "num_warps": (1, 2, 4, 8)},
}


def candidates(kernel: str, present: LaunchRecord, search: Search) -> list[LaunchRecord]:
    """Every combination of the searched values, the present record first; what is not searched stays as it is.

    `search` names tiles and fields; the kernel's own table is taken where it is empty. Names that the record lacks are
    left out.

    >>> [r.num_warps for r in candidates("a_kernel", LaunchRecord(num_warps=4), {"num_warps": (2, 4, 8)})]
    [4, 2, 8]
    """
    values = search or SEARCH.get(kernel, _USUAL)
    names = [name for name in values if name in FIELDS or name in present.tiles]
    found = [present]
    for chosen in product(*(values[name] for name in names)):
        given = dict(zip(names, chosen, strict=True))
        fields = {name: given.pop(name) for name in FIELDS if name in given}
        record = replace(present, tiles={**present.tiles, **given}, **fields)
        if record not in found:
            found.append(record)
    return found
