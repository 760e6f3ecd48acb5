"""Results that tests show, save and draw."""

from graphlin.bench.results import BOTH, FORWARD, OURS, REPLAY, Environment, Key, Row, Run, Sample

ENVIRONMENT = Environment(
    date="a date", commit="abc123", device="NVIDIA H200", clock="a clock", versions={"torch": "9.9", "fla-core": "0.6.0"},
    sizes={"H": 16, "HV": 32, "K": 128, "D": 8192, "W": 4, "hidden": 2048, "dtype": "bfloat16"},
    device_facts={"clocks.sm": "1980 MHz"}, command="python -m graphlin bench")


def sample(median: float, spread: float = 0.0) -> Sample:
    return Sample(median, median * (1 - spread), median * (1 + spread), 5)


def row(section: str, shape: tuple[int, int], median: float | None, who: str = OURS, direction: str = FORWARD, *,
        case: str = "", measure: str = REPLAY, **rest) -> Row:
    return Row(Key(section, case or section, *shape, direction), who, measure, None if median is None else sample(median, 0.02),
               **rest)


def example() -> Run:
    return Run(ENVIRONMENT, [
        row("gdn", (512, 1), None, "fla", error="PeerError: refuses to run"),
        row("gdn", (512, 1), 30.0), row("gdn", (4096, 32), 120.0), row("gdn", (4096, 32), 360.0, "fla"),
        row("gdn", (512, 1), 90.0, direction=BOTH), row("gdn", (512, 1), 45.5, measure="eager, host"),
        row("layers", (512, 1), 1000.0, case="GatedDeltaNet", measure="eager"),
        row("layers", (512, 1), 250.0, case="GatedDeltaNet", measure="captured"),
        row("layers", (512, 1), 2500.0, "fla", case="GatedDeltaNet", measure="eager"),
        row("cold", (512, 1), 12.3e6, case="GatedDeltaNet", measure="empty cache"),
        row("cold", (512, 1), 2e6, case="GatedDeltaNet", measure="warm cache"),
        row("stages", (512, 1), 30.0, "prep", case="gdn", measure="alone", note="4 programs; BK=64"),
        row("stages", (512, 1), 10.0, "finish", case="gdn", measure="alone", note="2 programs"),
    ])
