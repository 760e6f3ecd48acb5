"""CUDA captures that fail, and what they leave."""

import gc
import os
import subprocess
import sys

import pytest
import torch

from graphlin.backends import get_backend
from graphlin.capture import capture
from graphlin.errors import CaptureError, ColdKernel, HostSync
from graphlin.tier import Tier
from tests.backends.kernel import launch_cold, record


@pytest.fixture
def cuda(request):
    if request.config.option.device != "cuda":
        pytest.skip("needs a CUDA device")
    return torch.device("cuda", torch.cuda.current_device())


FAILURES = {
    "sync": (lambda x: (x * 2).sum().item(), HostSync),
    "sync at once": (lambda x: x.cpu(), HostSync),
    "cold kernel": (launch_cold, ColdKernel),
    "invalidated": (lambda x: (x * 2, torch.cuda.synchronize()), CaptureError),
    "of the body": (lambda x: (torch.randn_like(x), {}["key"]), KeyError),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_a_failed_capture_leaves_stream_pool_and_generator_usable(cuda, failure):
    body, error = FAILURES[failure]
    x = torch.randn(5, device=cuda)
    pool = get_backend(cuda).new_pool()
    mode, hook = torch.cuda.get_sync_debug_mode(), hook_of_triton()
    with pytest.raises(error):
        record(cuda, lambda: body(x), pool)
    assert torch.cuda.get_sync_debug_mode() == mode and hook_of_triton() is hook
    assert not get_backend(cuda).is_capturing()
    assert torch.randn(3, device=cuda).isfinite().all()
    graph, out = record(cuda, lambda: x * 2 + torch.zeros_like(x).uniform_())
    graph.replay()
    assert ((out - x * 2) >= 0).all() and ((out - x * 2) <= 1).all()


def hook_of_triton():
    import triton
    return triton.knobs.runtime.jit_cache_hook if hasattr(triton, "knobs") else triton.runtime.jit.JITFunction.cache_hook


@pytest.mark.parametrize("failure", FAILURES)
def test_a_failed_capture_gives_its_memory_back(cuda, failure):
    body, error = FAILURES[failure]
    x = torch.randn(5, device=cuda)

    def reserved():
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved(cuda)
    before = reserved()
    with pytest.raises(error):
        record(cuda, lambda: (torch.zeros(64 << 20, device=cuda), body(x)))
    assert reserved() <= before + (4 << 20)


FORK = """
import os, graphlin, torch
child = os.fork()
if child == 0:
    print(torch.ones(3, device="cuda").sum().item())
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""


def test_a_process_that_has_imported_graphlin_may_fork(cuda):
    paths = os.pathsep.join(map(os.path.abspath, sys.path))
    subprocess.run([sys.executable, "-W", "ignore", "-c", FORK], check=True, env=os.environ | {"PYTHONPATH": paths})


def test_modes_of_a_slot_use_the_same_memory(cuda):
    class Wide(torch.nn.Module):
        def forward(self, x):
            return x.expand(4 << 20, 8).exp().sum()                      # 128 MiB that no output holds
    block = Wide()
    graphed = capture(block, Tier(8, 2))
    x = torch.ones(8, device=cuda)
    with torch.no_grad():
        graphed(x)
        held = graphed.held_bytes()
        assert held >= 128 << 20
        graphed.eval()(x)
    assert graphed.held_bytes() < held + (32 << 20)
    assert (graphed.stats.replays, graphed.stats.captures) == (2, 2)


def test_device_facts(cuda):
    backend = get_backend(cuda)
    major, minor = torch.cuda.get_device_capability(cuda)
    assert backend.arch(cuda) == f"sm_{major}{minor}"
    assert backend.num_cores(torch.device("cuda")) == torch.cuda.get_device_properties(cuda).multi_processor_count


CACHED = """
import torch
from tests.backends.kernel import record
cuda = torch.device("cuda")
cached = torch.empty(1 << 28, device=cuda)
del cached
assert torch.cuda.memory_reserved() >= 1 << 30
seen = []
record(cuda, lambda: seen.append(torch.cuda.memory_reserved()))
assert seen[0] < 1 << 30, seen
"""


def test_a_capture_may_use_what_was_cached_before_it(cuda):
    """In a process of its own: an allocator that some capture was not taken out of frees nothing."""
    paths = os.pathsep.join(map(os.path.abspath, sys.path))
    subprocess.run([sys.executable, "-W", "ignore", "-c", CACHED], check=True, env=os.environ | {"PYTHONPATH": paths})
