"""Times the ops as CUDA graph replays: `python benchmarks/ops.py`, a line a shape, median microseconds of 30 replays.

Random bf16 inputs, packed `[1, T, ...]` with N sequences at random cuts; forward alone without gradients, and forward plus
backward with the gradients of every input.
"""

from collections.abc import Callable

import torch
import triton

import graphlin

DEVICE, DTYPE = "cuda", torch.bfloat16
SHAPES = [(512, 1), (512, 8), (2048, 1), (2048, 16), (4096, 1), (4096, 32), (8192, 1), (32768, 1)]


def cuts(tokens: int, seqs: int) -> torch.Tensor:
    """cu_seqlens of `seqs` sequences with random ends."""
    torch.manual_seed(tokens + seqs)
    inner = torch.randint(1, tokens, (seqs - 1,)).sort().values.tolist()
    return torch.tensor([0, *inner, tokens], device=DEVICE, dtype=torch.int32)


def leaf(*shape: int, dtype: torch.dtype = DTYPE) -> torch.Tensor:
    """A random tensor that takes a gradient."""
    return torch.randn(*shape, device=DEVICE).to(dtype).requires_grad_()


def replay_time(run: Callable[[], object], repeats: int = 30) -> float:
    """Median time of a graph replay of `run`, in microseconds."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for i in range(repeats + 5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        if i >= 5:
            times.append(begin.elapsed_time(end) * 1e3)
    return sorted(times)[repeats // 2]


def both_ways(op: Callable[[], tuple], leaves: list[torch.Tensor], grad: torch.Tensor) -> tuple[float, float]:
    """Forward alone, and forward plus backward."""
    def forward():
        with torch.no_grad():
            return op()

    return replay_time(forward), replay_time(lambda: torch.autograd.grad(op()[0], leaves, grad))


def gdn(tokens: int, seqs: int, H: int = 16, HV: int = 32, D: int = 128) -> tuple[float, float]:
    """Gated DeltaNet, l2norm in the kernel, log decays and write strengths given."""
    cu = cuts(tokens, seqs)
    decay, beta = torch.rand(2, 1, tokens, HV, device=DEVICE).unbind()
    leaves = [leaf(1, tokens, H, D), leaf(1, tokens, H, D), leaf(1, tokens, HV, D),
              (-0.1 * decay).requires_grad_(), beta.clone().requires_grad_()]
    return both_ways(lambda: graphlin.chunk_gated_delta_rule(*leaves, use_qk_l2norm_in_kernel=True, cu_seqlens=cu), leaves,
                     torch.randn_like(leaves[2]))


def kda(tokens: int, seqs: int, H: int = 32, D: int = 128) -> tuple[float, float]:
    """Kimi Delta Attention, gate with lower bound -5, l2norm and sigmoid in the kernel."""
    cu = cuts(tokens, seqs)
    leaves = [*(leaf(1, tokens, H, D) for _ in range(4)), leaf(1, tokens, H)]
    A_log, dt_bias = torch.zeros(H, device=DEVICE).requires_grad_(), leaf(H * D, dtype=torch.float32)
    options = {"use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "lower_bound": -5., "safe_gate": True,
               "A_log": A_log, "dt_bias": dt_bias, "use_beta_sigmoid_in_kernel": True, "cu_seqlens": cu}
    return both_ways(lambda: graphlin.chunk_kda(*leaves, **options), [*leaves, A_log, dt_bias], torch.randn_like(leaves[2]))


def conv(tokens: int, seqs: int, D: int = 8192, W: int = 4) -> tuple[float, float]:
    """The convolution with silu."""
    cu = cuts(tokens, seqs)
    x, weight = leaf(1, tokens, D), leaf(D, W)
    return both_ways(lambda: graphlin.causal_conv1d(x, weight, activation="silu", cu_seqlens=cu), [x, weight],
                     torch.randn_like(x))


def main() -> None:
    """Prints a line for each op and shape."""
    print(f"graphlin {graphlin.__version__}, torch {torch.__version__}, Triton {triton.__version__}",
          torch.cuda.get_device_name(), sep=", ")
    for op, shapes in ((gdn, SHAPES), (kda, SHAPES), (conv, [(512, 8), (2048, 16), (4096, 32), (32768, 1)])):
        for tokens, seqs in shapes:
            forward, forward_backward = op(tokens, seqs)
            print(f"{op.__name__:<5}T={tokens:<6}N={seqs:<3}", f"forward {forward:8.1f} us", f"both {forward_backward:8.1f} us",
                  flush=True)


if __name__ == "__main__":
    main()
