"""CUDA only: kernels that Triton compiles in threads."""

import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import triton
import triton.language as tl

from graphlin.backends import LaunchRecord, get_backend
from graphlin.kernels.launch import launch
from tests.backends.kernel import add_one


@pytest.fixture
def cuda(request):
    if request.config.option.device != "cuda" or not hasattr(triton, "AsyncCompileMode"):
        pytest.skip("Triton compiles for CUDA in threads, from 3.5 on")
    return torch.device("cuda", torch.cuda.current_device())


@triton.jit
def broken(x, BLOCK: tl.constexpr):
    tl.static_assert(BLOCK > 16, "too small")
    tl.store(x, BLOCK)


def test_a_launch_takes_what_was_compiled_ahead(cuda, monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    seen = []
    monkeypatch.setattr(triton.knobs.compilation, "listener", lambda **told: seen.append(threading.current_thread().name))
    x = torch.arange(300.0, device=cuda)
    for first in (0, 1):                                            # aligned to 16 bytes, and not
        y, part = torch.zeros_like(x), x[first:]
        seen.clear()
        with get_backend(cuda).compiling() as compile_ahead:
            compile_ahead(add_one, (part, y, 299), {"BLOCK": 512}, LaunchRecord(num_warps=2))
            launch(add_one, 1, part, y, 299, record=LaunchRecord(num_warps=2), BLOCK=512)
        launch(add_one, 1, part, y, 299, record=LaunchRecord(num_warps=2), BLOCK=512)
        assert len(seen) == 1 and seen[0].startswith("graphlin-compiler")
        assert torch.equal(y[:299], part[:299] + 1)
    assert not [t for t in threading.enumerate() if t.name.startswith("graphlin-compiler")]


def test_the_launch_raises_what_compiling_ahead_did(cuda):
    x = torch.zeros(1, device=cuda)

    def launch_broken():
        with pytest.raises(triton.CompilationError, match="too small"):
            launch(broken, 1, x, record=LaunchRecord(), BLOCK=16)

    with get_backend(cuda).compiling() as compile_ahead:
        compile_ahead(broken, (x,), {"BLOCK": 16}, LaunchRecord())
        launch_broken()
    launch_broken()
    with get_backend(cuda).compiling() as compile_ahead:
        compile_ahead(broken, (x,), {"BLOCK": 16}, LaunchRecord())   # nobody launches it
    launch(broken, 1, x, record=LaunchRecord(), BLOCK=32)
    assert x.item() == 32


def test_the_callers_own_threads_serve_as_well(cuda):
    x, y = torch.arange(40.0, device=cuda), torch.zeros(40, device=cuda)
    with ThreadPoolExecutor(1) as threads, triton.AsyncCompileMode(threads):
        with get_backend(cuda).compiling() as compile_ahead:
            compile_ahead(add_one, (x, y, 40), {"BLOCK": 64}, LaunchRecord())
            launch(add_one, 1, x, y, 40, record=LaunchRecord(), BLOCK=64)
    assert torch.equal(y, x + 1)


FIRST_CAPTURE = """
import json, threading, torch, triton, graphlin
compiled = []
triton.knobs.compilation.listener = lambda *, src, metadata, cache_hit, **_: compiled.append(
    (src.name, metadata["hash"], cache_hit, threading.current_thread().name))
layer = graphlin.layers.KimiDeltaAttention(64, head_dim=16, num_heads=2, chunk_size=16, lower_bound=-5.0, safe_gate=True)
graphed = graphlin.capture(layer.to("cuda", torch.bfloat16), graphlin.Tier(64, 2, chunk_size=16), fallback="raise")
x = torch.randn(1, 40, 64, device="cuda", dtype=torch.bfloat16)
graphed(x, cu_seqlens=torch.tensor([0, 13, 40], device="cuda")).float().sum().backward()
torch.cuda.synchronize()
print(json.dumps([compiled, [thread.name for thread in threading.enumerate()]]), flush=True)
from tests.processes import end_process
end_process()
"""


def test_a_first_capture_compiles_each_kernel_once_and_those_of_its_ops_in_threads(cuda, tmp_path):
    paths = os.pathsep.join(map(os.path.abspath, sys.path))
    env = os.environ | {"PYTHONPATH": paths, "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", FIRST_CAPTURE], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    compiled, threads = json.loads(done.stdout)
    names, hashes, hits, where = zip(*compiled, strict=True)
    assert len(set(hashes)) == len(hashes) and not any(hits)
    assert sum("kda" in name for name in names) == 4 and "delta_two_recurrences" in names
    alone = [name for name, thread in zip(names, where, strict=True) if not thread.startswith("graphlin-compiler")]
    assert not [name for name in alone if name.startswith(("conv", "kda", "delta", "sum"))], alone
    assert not [name for name in threads if name.startswith("graphlin-compiler")]
