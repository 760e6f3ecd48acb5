"""How far a result may be from the float64 reference, and the one comparison that uses it."""

import torch

HALF = {
    "o": 6e-3, "ht": 6e-3, "dq": 8e-3, "dk": 8e-3, "dv": 8e-3, "dh0": 5e-3,
    "dg": 2e-2, "dbeta": 2e-2, "ddt_bias": 5e-2, "dA_log": 1e-1,
    "y": 6e-3, "final": 6e-3, "dx": 8e-3, "dresidual": 8e-3, "dweight": 8e-3, "dbias": 8e-3,
}
FULL = dict.fromkeys(HALF, 2e-5) | dict.fromkeys(("dg", "dA_log", "ddt_bias"), 1e-4)      # the latter are sums over dg

# RMS(actual - expected) / RMS(expected); the largest error over the largest value may be twice that.
TOLERANCES = {torch.float32: FULL, torch.float16: HALF, torch.bfloat16: HALF}

# Keys that are alike and hardly decay: rounding A and dE to bfloat16 is amplified by |A||dE| / |dV| = 10 (1.3e-2 in dv in
# a float64 emulation that rounds these two alone).
ALIKE_KEYS_BF16 = 2.5

# A result smaller than this decayed to nothing and is held to its tolerance of this size.
FLOORS = {torch.float32: 1e-6, torch.float16: 1e-5, torch.bfloat16: 1e-6}      # float16 underflows


def assert_close_rms(name: str, actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype,
                     amplified: float = 1.) -> None:
    """Asserts that result `name` (a key of TOLERANCES) of an op run in `dtype` is the float64 `expected`.

    `amplified`: by how much the problem itself amplifies the rounding of its operands.
    """
    assert actual.shape == expected.shape, f"{name}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    tolerance = TOLERANCES[dtype][name] * amplified
    if expected.numel() == 0:
        return
    actual, expected = actual.detach().double(), expected.detach().double().to(actual.device)
    finite = actual.isfinite()
    assert finite.all(), (f"{name} ({dtype}): {int((~finite).sum())} of {actual.numel()} values are not finite, "
                          f"the first at {_first(~finite)}")
    error = (actual - expected).abs()
    for measure, norm, allowed in (("RMS", _rms, tolerance), ("largest", torch.max, 2 * tolerance)):
        ratio = float(norm(error) / norm(expected.abs()).clamp(min=FLOORS[dtype]))
        worst = _first(error == error.max())
        assert ratio <= allowed, (f"{name} ({dtype}): {measure} error is {ratio:.2e} of the {measure} value, allowed "
                                  f"{allowed:.0e}; worst at {worst}: {float(actual[worst])!r}, "
                                  f"expected {float(expected[worst])!r}")


def relative_rms(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """RMS(actual - expected) / RMS(expected)."""
    actual, expected = actual.detach().double(), expected.detach().double()
    return float(_rms(actual - expected) / _rms(expected))


def _rms(x: torch.Tensor) -> torch.Tensor:
    return x.square().mean().sqrt()


def _first(mask: torch.Tensor) -> tuple[int, ...]:
    return tuple(mask.nonzero()[0].tolist())
