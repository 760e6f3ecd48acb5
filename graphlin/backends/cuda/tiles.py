"""Launch records of NVIDIA devices. Registers and shared memory per record: the cuda-compile lane prints them."""

from dataclasses import replace

import torch

from graphlin.backends.protocol import LaunchRecord, block_size

_ALL = 1000     # waves: a program for every task, in all but the largest grids


def _dot(dtype: torch.dtype) -> dict:
    return dict(_precision(dtype), COPY_LHS=False)


def _precision(dtype: torch.dtype) -> dict:
    """Products of float32 operands must be float32: three tf32 products, since plain ieee ones leave the tensor cores."""
    return dict(PREC="tf32x3" if dtype == torch.float32 else "tf32")


def _prep(arch: str, K: int, V: int, R: int, dtype: torch.dtype) -> LaunchRecord:
    """float32 results need the inverse's merges in three tf32 products, which take twice the time of three bf16 ones."""
    exact = dtype == torch.float32
    return LaunchRecord(dict(_dot(dtype), BK=block_size(K, 64), PREC_INV="tf32x3" if exact else "bf16x3", BI=16 if exact else 8,
                             DOT_BLOCKS=False), num_warps=2 if arch == "sm_90" else 4)


def _recurrence(arch: str, K: int, V: int, R: int, dtype: torch.dtype) -> LaunchRecord:
    if K > 128 or dtype == torch.float32:
        rows = 16 if dtype == torch.float32 else 32
        return LaunchRecord(dict(_dot(dtype), BK=block_size(K, 256), BV=block_size(V, rows), PERSISTENT=False), num_warps=8)
    return LaunchRecord(dict(_dot(dtype), BK=block_size(K, 128), BV=block_size(V, 32), PERSISTENT=False), num_stages=2)


def _state_map(arch: str, K: int, V: int, R: int, dtype: torch.dtype) -> LaunchRecord:
    record = _gradient_map(arch, K, V, R, dtype)
    return replace(record, tiles={name: tile for name, tile in record.tiles.items() if name != "COPY_LHS"})


def _gradient_map(arch: str, K: int, V: int, R: int, dtype: torch.dtype) -> LaunchRecord:
    """Tiles of 32 rows, for one sequence more programs than Hopper's recurrence has, so that more cores share a long one."""
    record = _recurrence(arch, K, V, R, dtype)
    return replace(record, tiles={name: tile for name, tile in record.tiles.items() if name != "PERSISTENT"})


def _hopper_recurrence(arch: str, K: int, V: int, R: int, dtype: torch.dtype) -> LaunchRecord:
    """On Hopper products of 64 rows, which take the state from registers, and loads that are two chunks ahead."""
    if arch != "sm_90" or dtype == torch.float32 or not 32 < K <= 128 or V <= 32:
        return _recurrence(arch, K, V, R, dtype)
    return LaunchRecord(dict(_dot(dtype), BK=block_size(K, 128), BV=64, PERSISTENT=False), num_stages=3)


def _halves(arch: str, K: int, V: int, R: int, dtype: torch.dtype) -> LaunchRecord:
    """A long sequence alone is split on Hopper, with operands of two bytes: measured on an H200 alone."""
    if arch != "sm_90" or dtype == torch.float32:
        return LaunchRecord(dict(LEAST=0))
    record = _hopper_recurrence(arch, K, V, R, dtype)
    return replace(record, tiles=dict(record.tiles, SEGMENT=32, LEAST=40))


def _channel_halves(arch: str, K: int, V: int, R: int, dtype: torch.dtype) -> LaunchRecord:
    """Where channels have decays of their own, they are mostly fast: those of a bounded gate forget in a chunk or two."""
    record = _halves(arch, K, V, R, dtype)
    return replace(record, tiles=dict(record.tiles, SEGMENT=8, LEAST=20)) if record.tiles["LEAST"] else record


def _quarters(arch: str, K: int, V: int, R: int, dtype: torch.dtype) -> LaunchRecord:
    """All of V in a program of twice the warps: a step takes half as long again, but there are four at once. Rows that are not
    whole vectors take more shared memory than there is."""
    if arch != "sm_90" or dtype == torch.float32 or not (32 < K <= 128 and 64 < V <= 128) or K % 8 or V % 8:
        return LaunchRecord(dict(LEAST=0))
    return LaunchRecord(dict(_dot(dtype), BK=128, BV=128, PERSISTENT=False, SEGMENT=32, LEAST=160), num_warps=8, num_stages=3)


def _two_recurrences(arch: str, K: int, V: int, R: int, dtype: torch.dtype) -> LaunchRecord:
    """Both of a sequence side by side: in a tier that is not full the second would wait for programs without work."""
    record = _hopper_recurrence(arch, K, V, R, dtype)
    return replace(record, tiles=dict(record.tiles, INTERLEAVED=True))


def _pairs(arch: str, K: int, V: int, R: int, dtype: torch.dtype) -> LaunchRecord:
    if dtype == torch.float32 or arch != "sm_90":
        columns = 16 if arch == "sm_80" else 32
        return LaunchRecord(dict(_dot(dtype), BK=block_size(K, 32), BV=block_size(V, columns)), num_warps=8, num_stages=2)
    return LaunchRecord(dict(_dot(dtype), BK=block_size(K, 64), BV=block_size(V, 64)), num_stages=3)


def _states(arch: str, K: int, V: int, R: int, dtype: torch.dtype) -> LaunchRecord:
    """On Hopper one tile of all of K up to 128, dk and dq apart, so that a core has room for two programs. Products of fewer
    than 64 columns are doubtful there (Triton 3.6), so that a small K or V fills its tiles with zeros."""
    if dtype == torch.float32 or arch != "sm_90":
        rows = 32 if dtype == torch.float32 else 64
        return LaunchRecord(dict(_precision(dtype), BK=block_size(K, 32), BV=block_size(V, rows), SPLIT=False), num_warps=8,
                            num_stages=2)
    return LaunchRecord(dict(_precision(dtype), BK=128 if K > 64 else 64, BV=64, SPLIT=True), num_stages=3)


def _finish(arch: str, K: int, V: int, R: int, dtype: torch.dtype) -> LaunchRecord:
    """Vectors of a chunk alone where the states' tiles have all of K, else tiles of K too."""
    alone = _states(arch, K, V, R, dtype).tiles["BK"] >= K
    return LaunchRecord(dict(REV_SCAN=True), num_warps=2 if alone else 8, waves=32 if alone else 8)


def _kda_prep(arch: str, K: int, V: int, R: int, dtype: torch.dtype) -> LaunchRecord:
    """The sums by products (SUMS) and the short exponentials (FAST) are measured on an H200 alone."""
    if arch != "sm_90" or dtype == torch.float32:
        return LaunchRecord(dict(_dot(dtype), BK=16, PREC_INV="tf32x3", BI=16, DOT_BLOCKS=False, PAIRWISE=False, SUMS=0,
                                 FAST=False, PERSISTENT=True), num_warps=2 if arch == "sm_90" else 4)
    return LaunchRecord(dict(_dot(dtype), BK=16, PREC_INV="bf16x3", BI=16, DOT_BLOCKS=False, PAIRWISE=False, SUMS=2, FAST=True,
                             PERSISTENT=False), num_warps=2, num_stages=3)


def _kda_inter(arch: str, K: int, V: int, R: int, dtype: torch.dtype) -> LaunchRecord:
    """Tiles of 16 channels in three stages, compiled by Triton 3.6, gave a wrong dk on an H200."""
    if arch == "sm_90" and dtype != torch.float32 and K > 32:
        return LaunchRecord(dict(_dot(dtype), BK=block_size(K, 64), BV=block_size(V, 64)), num_stages=3)
    rows = 32 if dtype == torch.float32 else 64
    return LaunchRecord(dict(_dot(dtype), BK=block_size(K, 32 if arch == "sm_80" else rows), BV=block_size(V, rows)), num_warps=8,
                        num_stages=2)


def _kda_intra(arch: str, K: int, V: int, R: int, dtype: torch.dtype) -> LaunchRecord:
    """A bounded gate's blocks are written out (UNROLLED), which takes all registers of two warps. Run on an H200 alone."""
    fast = arch == "sm_90" and dtype != torch.float32
    return LaunchRecord(dict(_dot(dtype), BK=block_size(K, 32), REV_SCAN=True, PAIRWISE=False, UNROLLED=fast, FAST=fast,
                             PERSISTENT=not fast), num_warps=2 if fast else 4)


def _conv_forward(arch: str, K: int, V: int, R: int, dtype: torch.dtype) -> LaunchRecord:
    """Two warps walk down four strands of 64 channels, UNROLL rows a turn: with up to four taps there are registers for 32 warps
    a core. Strands are short, so that a task that waits for another costs more than a program that finds none (H200, D=8192,
    T=32768: 276 us, and 290 with 64 waves)."""
    BD = block_size(V, 64)
    return LaunchRecord(dict(BR=256 // BD, BD=BD, UNROLL=8, ROWWISE=False), num_warps=2, waves=_ALL)


def _conv_backward(arch: str, K: int, V: int, R: int, dtype: torch.dtype) -> LaunchRecord:
    """Two channels a thread, whose rows of x and dz, weights and gradients of weights take few registers: more warps a core gain
    more than wider loads (H200, D=8192, T=4096: 63 us, and 76 with four channels)."""
    BD = block_size(V, 128)
    return LaunchRecord(dict(BR=128 // BD, BD=BD, UNROLL=8, ROWWISE=False), num_warps=2, waves=_ALL)


def _norm_forward(arch: str, K: int, V: int, R: int, dtype: torch.dtype) -> LaunchRecord:
    """Whole rows, 16 values of one a thread."""
    BD = block_size(V, 4096)
    return LaunchRecord(dict(BR=max(1, 2048 // BD), BD=BD), num_warps=max(4, BD // 512), waves=16)


def _norm_backward(arch: str, K: int, V: int, R: int, dtype: torch.dtype) -> LaunchRecord:
    """Partial sums over so many rows that they are little beside x, and so few that a short batch still has many tasks."""
    BD = block_size(V, 4096)
    return LaunchRecord(dict(ROWS=max(16, 8192 // BD), BR=max(1, 2048 // BD), BD=BD), num_warps=max(4, BD // 512), waves=16)


def _sum(arch: str, K: int, V: int, R: int, dtype: torch.dtype) -> LaunchRecord:
    """Few columns are few programs, each of which has many rows on their way at once: the norm has thousands of partial sums."""
    if V <= 512:
        return LaunchRecord(dict(BR=1024, BX=8), num_warps=8)
    return LaunchRecord(dict(BR=16, BX=32), num_warps=1)


_RECORDS = {
    "chunk_table_rows": lambda arch, K, V, R, dtype: LaunchRecord(dict(BR=16, BN=32, ROWWISE=False)),
    "chunk_local_cumsum": lambda arch, K, V, R, dtype: LaunchRecord(dict(BX=64)),
    "copy_active_rows": lambda arch, K, V, R, dtype: LaunchRecord(dict(BLOCK=2048, BN=256), waves=8),
    "deliver_rows": lambda arch, K, V, R, dtype: LaunchRecord(dict(BLOCK=8192), waves=8),
    "conv_forward": _conv_forward,
    "conv_backward": _conv_backward,
    "norm_forward": _norm_forward,
    "norm_backward": _norm_backward,
    "gdn_prep": _prep,
    "delta_recurrence": _hopper_recurrence,
    "delta_recurrence_halves": _halves,
    "delta_recurrence_quarters": _quarters,
    "delta_recurrence_channel_halves": _channel_halves,
    "delta_two_recurrences": _two_recurrences,
    "delta_state_map": _state_map,
    "delta_gradient_map": _gradient_map,
    "gdn_pair_gradients": _pairs,
    "gdn_state_gradients": _states,
    "gdn_finish_gradients": _finish,
    "kda_prep": _kda_prep,
    "kda_inter_gradients": _kda_inter,
    "kda_intra_gradients": _kda_intra,
    "kda_finish_gradients": lambda arch, K, V, R, dtype: LaunchRecord(dict(BD=block_size(K, 128)), waves=8),
    "sum_chunks": _sum,
}


def launch_record(kernel: str, *, arch: str, K: int, V: int, R: int, BT: int, dtype: torch.dtype) -> LaunchRecord:
    """The record of a kernel for an architecture (`sm_80`, `sm_90`, `sm_100`), head sizes, value heads a key head and dtype."""
    return _RECORDS[kernel](arch, K, V, R, dtype)
