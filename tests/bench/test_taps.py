import pytest
import torch

from graphlin.backends import LaunchRecord, get_backend
from graphlin.bench.peers import ours
from graphlin.bench.results import FORWARD
from graphlin.bench.taps import tapped


@pytest.fixture
def work(setting):
    return ours(setting.problem("conv", 20, 2), FORWARD).eager


def test_launches_are_noted_in_order_and_made(setting, work):
    expected, = work()
    with tapped(setting.device) as tap:
        found, = work()
    assert torch.equal(found, expected)
    assert [launch.name for launch in tap.launches] == ["chunk_table_rows", "conv_forward"]


def test_a_launch_can_be_repeated(setting, work):
    with tapped(setting.device) as tap:
        found, = work()
    expected = found.clone()
    found.zero_()
    tap.launches[-1].again()
    assert torch.equal(found, expected)


def test_the_grid_follows_a_replaced_record(setting, work):
    device = setting.device
    with tapped(device) as tap:
        expected, = work()
    usual = tap.launches[-1]
    narrow = LaunchRecord({**usual.record.tiles, "BD": 16}, num_warps=2, waves=1000)
    with tapped(device, {"conv_forward": narrow}) as tap:
        found, = work()
    assert tap.launches[-1].record == narrow
    assert tap.launches[-1].grid == min(2 * 2, 1000 * get_backend(device).num_cores(device))
    assert tap.launches[0].record != narrow
    assert tap.launches[-1].form != usual.form
    assert torch.equal(found, expected)


def test_the_backend_is_as_before_also_after_an_error(setting):
    backend = get_backend(setting.device)
    with pytest.raises(RuntimeError, match="inside"), tapped(setting.device):
        assert get_backend(setting.device) is not backend
        raise RuntimeError("inside")
    assert get_backend(setting.device) is backend
