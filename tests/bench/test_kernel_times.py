import pytest
import torch

from graphlin.backends import LaunchRecord
from graphlin.bench import kernel_times
from graphlin.bench.kernel_times import describe_record, kernel_microseconds, launches_of, measure, time_alone
from graphlin.bench.peers import ours
from graphlin.bench.results import BOTH, Sample


def test_every_launch_of_the_call_has_a_row(setting):
    rows = list(measure(setting, "conv", 20, 2))
    assert [row.who for row in rows] == ["chunk_table_rows", "conv_forward", "conv_backward", "sum_chunks"]
    assert all(row.sample.median > 0 for row in rows)
    assert {row.key.case for row in rows} == {"conv"} and {row.key.section for row in rows} == {"stages"}
    assert "programs; BR=" in rows[1].note and "warps" in rows[1].note


def test_the_time_is_that_of_one_launch(setting, monkeypatch):
    launch = launches_of(ours(setting.problem("conv", 20, 2), BOTH).eager, setting.device)[0]
    monkeypatch.setattr(type(setting.clock), "on_stream", lambda clock, works: {name: Sample(40, 36, 44, 3) for name in works})
    assert time_alone(launch, setting.clock) == Sample(10, 9, 11, 3)


def test_a_record_in_one_line():
    record = LaunchRecord({"BK": 64, "PREC": "tf32"}, num_warps=2, num_stages=3, waves=8)
    assert describe_record(record) == "BK=64 PREC=tf32, 2 warps, 3 stages, 8 waves"
    assert describe_record(LaunchRecord()) == "4 warps, 1 stages, 4 waves"


def test_kernel_times_add_up_to_less_than_the_call_takes(setting):
    """On a device; a CPU's profiler knows no kernels."""
    x = torch.randn(256, 256, device=setting.device)
    if setting.clock.on_device:
        one, two = (kernel_microseconds(lambda n=n: [x @ x for _ in range(n)], setting.device).median for n in (1, 8))
        assert 0 < 4 * one < two < 16 * one
    else:
        with pytest.raises(RuntimeError, match="reports no kernel of this device"):
            kernel_microseconds(lambda: x @ x, setting.device)


def test_the_profiled_sum_is_that_of_one_call(setting, monkeypatch):
    """Device events of all calls, without annotations and what the host did."""
    from types import SimpleNamespace

    def event(device_type, microseconds, annotation=False):
        return SimpleNamespace(device_type=device_type, is_user_annotation=annotation,
                               time_range=SimpleNamespace(elapsed_us=lambda: microseconds))

    kinds = kernel_times.DeviceType
    events = [event(kinds.CUDA, 30), event(kinds.CPU, 1000), event(kinds.CUDA, 20), event(kinds.CUDA, 500, annotation=True)]
    calls = []

    class Profile:
        def __init__(self, **options):
            pass

        def __enter__(self):
            return SimpleNamespace(events=lambda: events * (len(calls) - 1))

        def __exit__(self, *error):
            pass

    monkeypatch.setattr(kernel_times.torch.profiler, "profile", Profile)
    assert kernel_microseconds(lambda: calls.append(1), setting.device).median == 50
