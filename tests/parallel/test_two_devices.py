"""Context parallelism on two accelerators, captured over their own collectives."""

import pytest

from tests.parallel.device_checks import WORLD, checks
from tests.parallel.world import assert_fine, run_world


@pytest.fixture(scope="module")
def told(devices, tmp_path_factory):
    return run_world(WORLD, checks, tmp_path_factory.mktemp("world"), *devices)


@pytest.mark.device_only
@pytest.mark.parametrize("name", checks(WORLD))
def test_two_devices(told, name):
    assert_fine(told, name)
