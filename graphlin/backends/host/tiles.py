"""Launch records of the host: tiles large enough that few programs run in the slow interpreter, small enough that tests
meet more than one tile a row."""

import torch

from graphlin.backends.protocol import LaunchRecord, block_size

_DOT = dict(PREC="ieee", COPY_LHS=False)
_TILES = {
    "chunk_table_rows": lambda K, V: dict(BR=64, BN=64, ROWWISE=False),
    "chunk_local_cumsum": lambda K, V: dict(BX=64),
    "copy_active_rows": lambda K, V: dict(BLOCK=4096, BN=64),
    "deliver_rows": lambda K, V: dict(BLOCK=1024),
    "conv_forward": lambda K, V: dict(BR=16, BD=block_size(V, 128), UNROLL=1, ROWWISE=False),
    "conv_backward": lambda K, V: dict(BR=16, BD=block_size(V, 128), UNROLL=1, ROWWISE=False),
    "norm_forward": lambda K, V: dict(BR=16, BD=block_size(V, 4096)),
    "norm_backward": lambda K, V: dict(ROWS=32, BR=16, BD=block_size(V, 4096)),
    "gdn_prep": lambda K, V: dict(_DOT, BK=block_size(K, 64), PREC_INV="ieee", BI=16, DOT_BLOCKS=False),
    "delta_recurrence": lambda K, V: dict(_DOT, BK=block_size(K, 256), BV=block_size(V, 64), PERSISTENT=False),
    "delta_recurrence_halves": lambda K, V: dict(_DOT, BK=block_size(K, 256), BV=block_size(V, 64), PERSISTENT=False, SEGMENT=4,
                                                 LEAST=5),
    "delta_recurrence_channel_halves": lambda K, V: dict(_DOT, BK=block_size(K, 256), BV=block_size(V, 64), PERSISTENT=False,
                                                         SEGMENT=2, LEAST=5),
    "delta_recurrence_quarters": lambda K, V: dict(_DOT, BK=block_size(K, 256), BV=block_size(V, 64), PERSISTENT=False, SEGMENT=4,
                                                   LEAST=12),
    "delta_two_recurrences": lambda K, V: dict(_DOT, BK=block_size(K, 256), BV=block_size(V, 64), PERSISTENT=False,
                                               INTERLEAVED=True),
    "delta_state_map": lambda K, V: dict(PREC="ieee", BK=block_size(K, 256), BV=block_size(V, 64)),
    "delta_gradient_map": lambda K, V: dict(_DOT, BK=block_size(K, 256), BV=block_size(V, 64)),
    "gdn_pair_gradients": lambda K, V: dict(_DOT, BK=block_size(K, 64), BV=block_size(V, 64)),
    "gdn_state_gradients": lambda K, V: dict(PREC="ieee", BK=block_size(K, 64), BV=block_size(V, 64), SPLIT=True),
    "gdn_finish_gradients": lambda K, V: dict(REV_SCAN=True),
    "kda_prep": lambda K, V: dict(_DOT, BK=block_size(K, 64), PREC_INV="ieee", BI=16, DOT_BLOCKS=False, PAIRWISE=False, SUMS=1,
                                  FAST=False, PERSISTENT=False),
    "kda_inter_gradients": lambda K, V: dict(_DOT, BK=block_size(K, 64), BV=block_size(V, 64)),
    "kda_intra_gradients": lambda K, V: dict(_DOT, BK=block_size(K, 64), REV_SCAN=True, PAIRWISE=False, UNROLLED=True,
                                              FAST=False, PERSISTENT=False),
    "kda_finish_gradients": lambda K, V: dict(BD=block_size(K, 128)),
    "sum_chunks": lambda K, V: dict(BR=32, BX=block_size(V, 512)),
}


def launch_record(kernel: str, *, arch: str, K: int, V: int, R: int, BT: int, dtype: torch.dtype) -> LaunchRecord:
    """The host's record of a kernel; every architecture, chunk size and dtype shares it."""
    return LaunchRecord(tiles=_TILES[kernel](K, V), waves=1)
