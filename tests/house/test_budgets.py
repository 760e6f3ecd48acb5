"""Files and functions stay short enough to be read."""

import ast

import pytest

from tests.house.source import PACKAGE, ROOT, functions, is_kernel, tree

FILE, HOST_FUNCTION, KERNEL = 600, 60, 120
FILES = PACKAGE + sorted(path for folder in ("ci", "examples", "tests") for path in (ROOT / folder).rglob("*.py"))


def body_lines(function: ast.FunctionDef) -> int:
    """Lines of a function below its signature and docstring."""
    body = function.body[ast.get_docstring(function) is not None:]
    return function.end_lineno - body[0].lineno + 1 if body else 0


def name(path):
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", FILES, ids=name)
def test_file(path):
    lines = len(path.read_text().splitlines())
    assert lines <= FILE, f"{name(path)} has {lines} lines, at most {FILE}: split it by subject"


@pytest.mark.parametrize("path", FILES, ids=name)
def test_functions(path):
    for function in functions(tree(path)):
        allowed = KERNEL if is_kernel(function) else HOST_FUNCTION
        lines = body_lines(function)
        assert lines <= allowed, f"{name(path)}: {function.name} has {lines} lines, at most {allowed}: split it"


def test_body_lines_counts_what_is_below_the_docstring():
    text = 'def f(a,\n      b):\n    """One.\n\n    Two.\n    """\n    x = (a,\n         b)\n    return x\n'
    function, = ast.parse(text).body
    assert body_lines(function) == 3
