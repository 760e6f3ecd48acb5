"""Every name that a loop changes is carried round it, compiled as much as interpreted.

Triton 3.6 to 3.9 carry a name if the body leaves it another value than it came with. Where `a` and `b` start as one tile,
`b` after `a, b = f(a), a` is still that tile in this comparison, so it is taken for a constant. The interpreter runs
the loop as written and shows nothing.
"""

import ast
from collections import defaultdict
from pathlib import Path

import pytest

KERNELS = sorted((Path(__file__).resolve().parents[2] / "graphlin" / "kernels").glob("*.py"))


def _pairs(node: ast.Assign):
    """(name, what it is given) for each name that is assigned to."""
    for target in node.targets:
        both_tuples = isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
        pairs = zip(target.elts, node.value.elts, strict=True) if both_tuples else [(target, node.value)]
        yield from ((name.id, value) for name, value in pairs if isinstance(name, ast.Name))


def lost_names(source: str) -> set[str]:
    """Names that start as the same tile and that a loop passes on to one another."""
    lost = set()
    for function in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)):
        same, passed_on = defaultdict(set), set()
        for node in (node for node in ast.walk(function) if isinstance(node, ast.Assign)):
            for name, value in _pairs(node):
                same[value.id if isinstance(value, ast.Name) else id(value)].add(name)
        for loop in (node for node in ast.walk(function) if isinstance(node, ast.For | ast.While)):
            passed_on |= {value.id for node in ast.walk(loop) if isinstance(node, ast.Assign)
                          for _, value in _pairs(node) if isinstance(value, ast.Name)}
        for names in same.values():
            lost |= names & passed_on if len(names) > 1 else set()
    return lost


@pytest.mark.parametrize("path", KERNELS, ids=lambda path: path.stem)
def test_names_that_a_loop_passes_on_start_as_tiles_of_their_own(path):
    assert lost_names(path.read_text()) == set()


@pytest.mark.parametrize("start", ["a, b, c = zero, zero, zero", "a = b = c = tl.zeros([4], tl.float32)", "a = b = c = zero"])
def test_a_shared_first_tile_is_found(start):
    source = "def kernel(x, zero):\n    {}\n    for i in range(9):\n        a, b, c = tl.load(x + i), a, b\n"
    assert lost_names(source.format(start)) == {"a", "b"}
    assert lost_names(source.format("a, b, c = f(x), f(x), f(x)")) == set()
