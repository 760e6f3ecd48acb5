"""Ops over a batch split over processes: all results as those of one process, token by token in float64."""

from functools import partial

import pytest
import torch

from tests.ops.op_cases import OP_CASES, RAW_GATE, OpCase
from tests.parallel.layouts import THREE, TWO, Layout, check_part, expected_results, own_part, run_part
from tests.parallel.world import assert_fine, run_world

CASES = {case.name: case for case in [*OP_CASES, RAW_GATE]}
EVERYWHERE = ("conv", "gdn_gate")          # the other ops and gates differ from the latter inside a rank alone
ELSEWHERE = {2: ("crossing",), 3: ("whole",)}
LAYOUTS = {2: TWO, 3: THREE}


def checks_of(world: int) -> dict:
    """A check for each op and layout."""
    return {f"{case}, {layout}": partial(check, CASES[case], layout) for layout in LAYOUTS[world] for case in CASES
            if case in EVERYWHERE or str(layout) in ELSEWHERE[world]}


def check(case: OpCase, layout: Layout, rank: int, device: torch.device) -> None:
    drawn = case.draw(sum(layout.lengths), len(layout.lengths), device)
    results = run_part(case, own_part(case, layout, drawn, rank), layout.context(device))
    check_part(case, layout, results, expected_results(case, layout, drawn), rank)


@pytest.fixture(scope="module")
def told(devices, tmp_path_factory):
    """What went wrong in each world, by check."""
    worlds = {}

    def of(world: int):
        if world not in worlds:
            worlds[world] = run_world(world, checks_of, tmp_path_factory.mktemp("world"), *devices)
        return worlds[world]
    return of


@pytest.mark.parametrize(("world", "name"), [(world, name) for world in LAYOUTS for name in checks_of(world)],
                         ids=lambda value: str(value))
def test_parts_equal_the_whole(told, world, name):
    assert_fine(told(world), name)
