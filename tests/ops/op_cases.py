"""The ops that the contract binds, in one form: an op joins the contract's tests by one entry of OP_CASES."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import pytest
import torch

from graphlin.ops.causal_conv1d import causal_conv1d
from graphlin.ops.gated_delta_rule import chunk_gated_delta_rule
from graphlin.ops.kda import chunk_kda
from tests.inputs import cu_of, run

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class OpCase:
    """A packed op `(o, final_state) = op(**inputs, cu_seqlens=, **options)` and its arguments by kind."""

    name: str
    op: Callable
    tokens: Mapping[str, tuple[int, ...]]     # arguments [1, T, *shape]; the first has o's dtype
    output: tuple[int, ...]                   # o is [1, T, *output]
    state: tuple[int, ...]                    # initial_state and final state are [N, *state]
    parameters: Mapping[str, tuple[int, ...]]
    options: Mapping[str, object] = field(default_factory=dict)
    log_decay: str | None = None              # the token argument, if any, that is float32 in all dtypes and at most 0

    def draw(self, tokens: int, seqs: int, device: torch.device, dtype: torch.dtype = torch.float32,
             seed: int = 0) -> Tensors:
        """Random values of every argument, and of the gradients of o and the final state, `do` and `dht`."""
        random = torch.Generator().manual_seed(seed)

        def normal(*shape, dtype=torch.float32):
            return torch.randn(*shape, generator=random).to(device, dtype)

        by_token = {**self.tokens, "do": self.output}
        drawn = {name: normal(1, tokens, *shape, dtype=dtype) for name, shape in by_token.items()}
        if self.log_decay:
            drawn[self.log_decay] = -drawn[self.log_decay].float().abs()
        drawn |= {name: normal(seqs, *self.state) for name in ("initial_state", "dht")}
        return drawn | {name: normal(*shape) for name, shape in self.parameters.items()}

    def run(self, drawn: Tensors, cu_seqlens: torch.Tensor, **options) -> Tensors:
        """Forward and backward on `drawn` arguments; see `tests.inputs.run`."""
        inputs = {name: x for name, x in drawn.items() if name not in ("do", "dht")}
        return run(self.op, {**inputs, "cu_seqlens": cu_seqlens}, {"o": drawn["do"], "ht": drawn["dht"]},
                   output_final_state=True, **self.options, **options)

    def by_token(self, name: str) -> bool:
        """Whether an argument, a result or its gradient is `[1, T, ...]`."""
        return name in ("o", "do") or name.removeprefix("d") in self.tokens or name in self.tokens

    def by_sequence(self, name: str) -> bool:
        """Whether an argument, a result or its gradient is `[N, ...]`."""
        return name in ("initial_state", "ht", "dht", "dh0")


def arrange(case: OpCase, drawn: Tensors, lengths: Sequence[int], order: Sequence[int], tokens: int, seqs: int,
            fill: float = float("nan")) -> tuple[Tensors, torch.Tensor]:
    """The sequences `order` of a pack of `lengths`, packed in that order into `tokens` rows and `seqs` sequences.

    Rows and sequences that are left over hold `fill`; the latter have length 0. Returns the arguments and cu_seqlens.
    """
    cuts = cu_of(tuple(lengths), torch.device("cpu")).tolist()
    rows = torch.tensor([row for i in order for row in range(cuts[i], cuts[i + 1])], dtype=torch.long)
    arranged = dict(drawn)
    for name, x in drawn.items():
        if case.by_token(name):
            arranged[name] = x.new_full((1, tokens, *x.shape[2:]), fill)
            arranged[name][:, :len(rows)] = x[:, rows.to(x.device)]
        elif case.by_sequence(name):
            arranged[name] = x.new_full((seqs, *x.shape[1:]), fill)
            arranged[name][:len(order)] = x[list(order)]
    packed = [lengths[i] for i in order] + [0] * (seqs - len(order))
    return arranged, cu_of(tuple(packed), drawn["do"].device)


def sequence_results(case: OpCase, results: Tensors, cu_seqlens: torch.Tensor, i: int) -> Tensors:
    """The part of each result that belongs to sequence i; parameter gradients belong to none."""
    first, last = cu_seqlens[i:i + 2].tolist()
    rows = {name: x[:, first:last] for name, x in results.items() if case.by_token(name)}
    return rows | {name: x[i] for name, x in results.items() if case.by_sequence(name)}


def assert_bitwise(actual: Tensors, expected: Tensors, what: str) -> None:
    """Asserts that two sets of results are finite and equal to the bit."""
    assert actual.keys() == expected.keys()
    for name, x in expected.items():
        assert x.isfinite().all(), f"{name} is not finite"
        same = torch.equal(_bits(actual[name]), _bits(x))
        assert same, (f"{name} differs {what}: {_count_differing(actual[name], x)} of {x.numel()} values, by at most "
                      f"{(actual[name].double() - x.double()).abs().max():.1e}")


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.int16 if x.element_size() == 2 else torch.int32)


def _count_differing(a: torch.Tensor, b: torch.Tensor) -> int:
    return int((_bits(a) != _bits(b)).sum())


OP_CASES = [
    OpCase("conv", causal_conv1d, tokens={"x": (24,), "residual": (24,)}, output=(24,), state=(24, 4),
           parameters={"weight": (24, 4), "bias": (24,)}, options={"activation": "silu", "chunk_size": 16}),
    OpCase("gdn_gate", chunk_gated_delta_rule,
           tokens={"q": (1, 16), "k": (1, 16), "v": (2, 16), "beta": (2,), "g": (2,)},
           output=(2, 16), state=(2, 16, 16), parameters={"A_log": (2,), "dt_bias": (2,)},
           options={"use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True,
                    "allow_neg_eigval": True, "chunk_size": 16}),
    OpCase("gdn", chunk_gated_delta_rule,
           tokens={"q": (1, 16), "k": (1, 16), "v": (1, 16), "beta": (1,), "g": (1,)}, log_decay="g",
           output=(1, 16), state=(1, 16, 16), parameters={},
           options={"use_beta_sigmoid_in_kernel": True, "chunk_size": 16, "scale": 0.1}),
    OpCase("kda_gate", chunk_kda,
           tokens={"q": (1, 16), "k": (1, 16), "v": (2, 16), "beta": (2,), "g": (2, 16)},
           output=(2, 16), state=(2, 16, 16), parameters={"A_log": (2,), "dt_bias": (32,)},
           options={"use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True,
                    "allow_neg_eigval": True, "chunk_size": 16}),
    OpCase("kda_bounded", chunk_kda,
           tokens={"q": (1, 16), "k": (1, 16), "v": (1, 16), "beta": (1,), "g": (1, 16)},
           output=(1, 16), state=(1, 16, 16), parameters={"dt_bias": (16,)},
           options={"use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "lower_bound": -5.0, "safe_gate": True,
                    "use_beta_sigmoid_in_kernel": True, "chunk_size": 16}),
    OpCase("kda", chunk_kda,
           tokens={"q": (1, 16), "k": (1, 16), "v": (1, 16), "beta": (1,), "g": (1, 16)}, log_decay="g",
           output=(1, 16), state=(1, 16, 16), parameters={},
           options={"use_beta_sigmoid_in_kernel": True, "chunk_size": 16, "scale": 0.1}),
]

# A branch of the gate that no other case has, for tests of the gate.
RAW_GATE = OpCase("gdn_raw_gate", chunk_gated_delta_rule,
                  tokens={"q": (1, 16), "k": (1, 16), "v": (1, 16), "beta": (1,), "g": (1,)},
                  output=(1, 16), state=(1, 16, 16), parameters={"A_log": (1,)},
                  options={"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "chunk_size": 16, "scale": 0.1})

# Chunks of 64 of a bounded gate have kernels of their own.
BOUNDED_64 = OpCase("kda_bounded_64", chunk_kda,
                    tokens={"q": (1, 16), "k": (1, 16), "v": (1, 16), "beta": (1,), "g": (1, 16)},
                    output=(1, 16), state=(1, 16, 16), parameters={"A_log": (1,), "dt_bias": (16,)},
                    options={"use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "lower_bound": -5.0, "safe_gate": True,
                             "use_beta_sigmoid_in_kernel": True, "chunk_size": 64})

each_op = pytest.mark.parametrize("case", OP_CASES, ids=lambda case: case.name)

# Between them they launch every kernel, those that add up gradients of parameters too.
each_full_op = pytest.mark.parametrize("case", [case for case in OP_CASES if case.parameters.keys() & {"A_log", "weight"}],
                                       ids=lambda case: case.name)
