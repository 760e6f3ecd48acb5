"""Graph replay times to reach on an H200 (bf16, K = V = 128), microseconds: forward, and forward+backward."""

from graphlin.bench.results import BOTH, FORWARD, Environment, Key

_GDN = {(512, 1): (24, 90), (512, 8): (24, 95), (2048, 1): (70, 200), (2048, 16): (70, 220), (4096, 1): (125, 340),
        (4096, 32): (125, 380), (8192, 1): (245, 670), (32768, 1): (950, 2600)}
_KDA = {(512, 1): (34, 130), (512, 8): (36, 140), (2048, 1): (90, 330), (2048, 16): (95, 350), (4096, 1): (165, 600),
        (4096, 32): (175, 650), (8192, 1): (320, 1200), (32768, 1): (1250, 4700)}
_CONV = {(512, 8): (8, 20), (2048, 16): (22, 55), (4096, 32): (40, 100), (32768, 1): (290, 750)}
TARGETS = {"gdn": _GDN, "kda": _KDA, "conv": _CONV}


_SIZES = {"H": 16, "HV": 32, "K": 128, "D": 8192, "W": 4, "dtype": "bfloat16"}


def target(environment: Environment, key: Key) -> float | None:
    """The target of an op's replay there, where there is one.

    >>> target(run.environment, Key("gdn", "gdn", 512, 1, FORWARD))
    24
    """
    found = TARGETS.get(key.section, {}).get((key.tokens, key.seqs))
    if found is None or "H200" not in environment.device or not _SIZES.items() <= environment.sizes.items():
        return None
    return found[{FORWARD: 0, BOTH: 1}[key.direction]]
