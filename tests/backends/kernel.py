"""A kernel for the backends' tests, and how a device's backend records something."""

import torch
import triton
import triton.language as tl

from graphlin.backends import LaunchRecord, get_backend
from graphlin.kernels.launch import launch


@triton.jit
def add_one(x, y, n, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    tl.store(y + o, tl.load(x + o, mask=o < n, other=0.0) + 1.0, mask=o < n)


def record(device, body, pool=None):
    backend = get_backend(device)
    stream = backend.side_stream(device)
    backend.synchronize(device)
    with backend.capture(pool=pool or backend.new_pool(), stream=stream) as graph:
        out = body()
    return graph, out


def launch_cold(x):
    y = torch.zeros_like(x)
    launch(add_one, 1, x, y, x.numel(), record=LaunchRecord(), BLOCK=8192)
    return y
