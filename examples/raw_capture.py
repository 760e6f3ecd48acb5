"""Captures the ops forward and backward under a bare `torch.cuda.graph`, for callers who own their buffers.

    python examples/raw_capture.py

Everything that varies from batch to batch lies in buffers of fixed size: the packed rows and `cu_seqlens`. They are
changed in place, then the graph is replayed. Without a GPU graphlin's host recorder stands in for the CUDA graph.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

import graphlin
from graphlin.backends import get_backend

TOKENS, SEQS, HEADS, WIDTH, CHUNK = 64, 4, 1, 16, 32
PACKS = [[20, 25, 19], [64], [1, 0, 40, 5], [32, 32], [7, 7, 7, 7]]


class Buffers:
    """What the graph reads; the caller owns it."""

    def __init__(self, device: torch.device) -> None:
        def normal(*shape):
            return torch.randn(*shape).to(device)
        self.x = normal(1, TOKENS, 3 * HEADS * WIDTH).requires_grad_()
        self.weight = normal(3 * HEADS * WIDTH, 4).requires_grad_()
        self.g, self.beta = -normal(1, TOKENS, HEADS).abs(), normal(1, TOKENS, HEADS).sigmoid()
        self.do = normal(1, TOKENS, HEADS, WIDTH)
        self.cu_seqlens = torch.zeros(SEQS + 1, dtype=torch.int32, device=device)

    def load(self, lengths: list[int]) -> None:
        """A new batch into the same memory; sequences that it lacks are empty."""
        ends = torch.tensor([0, *lengths] + [0] * (SEQS - len(lengths))).cumsum(0)
        self.cu_seqlens.copy_(ends)
        with torch.no_grad():
            self.x.normal_()
            self.x[:, int(ends[-1]):] = float("nan")        # inactive rows are never read


def step(b: Buffers) -> list[torch.Tensor]:
    """Convolution and gated delta rule, forward and backward. One chunk table serves both ops."""
    table = graphlin.prepare_chunk_indices(b.cu_seqlens, TOKENS, CHUNK)
    packing = {"cu_seqlens": b.cu_seqlens, "chunk_indices": table, "chunk_size": CHUNK}
    y, _ = graphlin.causal_conv1d(b.x, b.weight, activation="silu", **packing)
    q, k, v = y.unflatten(-1, (3 * HEADS, WIDTH)).split(HEADS, dim=2)
    o, state = graphlin.chunk_gated_delta_rule(q, k, v, b.g, b.beta, output_final_state=True,
                                               use_qk_l2norm_in_kernel=True, **packing)
    grads = torch.autograd.grad(o, (b.x, b.weight), b.do)
    return [o.detach(), state.detach(), *grads]     # a graph that stays alive would bind its leaves to the capture's stream


@contextmanager
def open_graph(device: torch.device) -> Iterator:
    """A CUDA graph that records the body, or the host's stand-in."""
    if device.type == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            yield graph
    else:
        backend = get_backend(device)
        with backend.capture(pool=backend.new_pool(), stream=backend.side_stream(device)) as graph:
            yield graph


def main(device: torch.device | None = None) -> list[bool]:
    """Replays every pack and says whether all results equal eager's, bit for bit."""
    device = device or torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    backend = get_backend(device)
    buffers = Buffers(device)
    buffers.load(PACKS[0])

    backend.synchronize(device)
    with backend.stream(backend.side_stream(device)):       # warm up: kernels must be compiled before the capture
        step(buffers)
    backend.synchronize(device)
    with open_graph(device) as graph:
        static = step(buffers)

    equal = []
    for lengths in PACKS:
        buffers.load(lengths)
        graph.replay()
        replayed = [t.clone() for t in static]
        equal.append(all(map(torch.equal, replayed, step(buffers))))
        print(f"{device.type} {str(lengths):>20}: {'bitwise equal to eager' if equal[-1] else 'DIFFERENT from eager'}")
    return equal


if __name__ == "__main__":
    raise SystemExit(not all(main()))
