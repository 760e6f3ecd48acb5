"""A bench setting small enough for the interpreter, on the device under test."""

from dataclasses import replace

import pytest

from graphlin.bench.setting import HOST, Setting

TINY = replace(HOST, rounds=1, shapes={section: [(20, 2)] for section in HOST.shapes}, underfilled=((17, 1), (36, 3)),
               ladder=(32, 2), cold=(20, 2))


@pytest.fixture
def setting(device):
    return Setting(device, TINY)
