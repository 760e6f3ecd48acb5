"""Launch records of Ascend 910B3: tiles that fit its Unified Buffer. What each takes of the buffers: the npu-compile lane
prints it."""

import torch

from graphlin.backends.protocol import LaunchRecord, block_size

_DOT = dict(PREC="ieee", COPY_LHS=True)
_TILES = {
    "chunk_table_rows": lambda K, V: dict(BR=16, BN=64, ROWWISE=True),
    "chunk_local_cumsum": lambda K, V: dict(BX=64),
    "copy_active_rows": lambda K, V: dict(BLOCK=2048, BN=64),
    "deliver_rows": lambda K, V: dict(BLOCK=8192),
    "conv_forward": lambda K, V: dict(BR=16, BD=block_size(V, 128 if K <= 4 else 64), UNROLL=1, ROWWISE=True),
    "conv_backward": lambda K, V: dict(BR=16, BD=block_size(V, 64 if K <= 4 else 32), UNROLL=1, ROWWISE=True),
    "norm_forward": lambda K, V: dict(BR=max(1, 2048 // block_size(V, 4096)), BD=block_size(V, 4096)),
    "norm_backward": lambda K, V: dict(ROWS=128, BR=max(1, 2048 // block_size(V, 4096)), BD=block_size(V, 4096)),
    "gdn_prep": lambda K, V: dict(_DOT, BK=block_size(K, 64), PREC_INV="ieee", BI=16, DOT_BLOCKS=True),
    "delta_recurrence": lambda K, V: dict(_DOT, BK=block_size(K, 256), BV=block_size(V, 64), PERSISTENT=True),
    "delta_recurrence_halves": lambda K, V: dict(LEAST=0),
    "delta_recurrence_quarters": lambda K, V: dict(LEAST=0),
    "delta_recurrence_channel_halves": lambda K, V: dict(LEAST=0),
    "delta_two_recurrences": lambda K, V: dict(_DOT, BK=block_size(K, 256), BV=block_size(V, 64), PERSISTENT=True,
                                               INTERLEAVED=False),
    "delta_state_map": lambda K, V: dict(PREC="ieee", BK=block_size(K, 256), BV=block_size(V, 64)),
    "delta_gradient_map": lambda K, V: dict(_DOT, BK=block_size(K, 256), BV=block_size(V, 64)),
    "gdn_pair_gradients": lambda K, V: dict(_DOT, BK=block_size(K, 64), BV=block_size(V, 64)),
    "gdn_state_gradients": lambda K, V: dict(PREC="ieee", BK=block_size(K, 64), BV=block_size(V, 64), SPLIT=False),
    "gdn_finish_gradients": lambda K, V: dict(REV_SCAN=True),
    "kda_prep": lambda K, V: dict(_DOT, BK=block_size(K, 32), PREC_INV="ieee", BI=16, DOT_BLOCKS=True, PAIRWISE=True, SUMS=0,
                                  FAST=False, PERSISTENT=True),
    "kda_inter_gradients": lambda K, V: dict(_DOT, BK=block_size(K, 64), BV=block_size(V, 64)),
    "kda_intra_gradients": lambda K, V: dict(_DOT, BK=block_size(K, 32), REV_SCAN=True, PAIRWISE=True, UNROLLED=False,
                                              FAST=False, PERSISTENT=True),
    "kda_finish_gradients": lambda K, V: dict(BD=block_size(K, 32)),
    "sum_chunks": lambda K, V: dict(BR=32, BX=64),
}


def launch_record(kernel: str, *, arch: str, K: int, V: int, R: int, BT: int, dtype: torch.dtype) -> LaunchRecord:
    """The record of a kernel for head sizes; every chunk size and dtype shares it."""
    return LaunchRecord(tiles=_TILES[kernel](K, V), waves=1)
