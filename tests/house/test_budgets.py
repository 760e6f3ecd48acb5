"""Files and functions stay short enough to be read."""

import ast

from tests.house.source import PACKAGE, ROOT, functions, is_kernel, tree

FILE, HOST_FUNCTION, KERNEL = 600, 60, 120
FILES = PACKAGE + sorted(path for folder in ("ci", "examples", "tests") for path in (ROOT / folder).rglob("*.py"))


def body_lines(function: ast.FunctionDef) -> int:
    """Lines of a function below its signature and docstring."""
    body = function.body[ast.get_docstring(function) is not None:]
    return function.end_lineno - body[0].lineno + 1 if body else 0


def test_files_are_short():
    sizes = {path.relative_to(ROOT): len(path.read_text().splitlines()) for path in FILES}
    long = [f"{path} has {lines} lines" for path, lines in sizes.items() if lines > FILE]
    assert not long, f"at most {FILE} lines, split by subject: {'; '.join(long)}"


def test_functions_are_short():
    long = [f"{path.relative_to(ROOT)}: {function.name} has {body_lines(function)} lines" for path in FILES
            for function in functions(tree(path))
            if body_lines(function) > (KERNEL if is_kernel(function) else HOST_FUNCTION)]
    assert not long, f"at most {HOST_FUNCTION} lines, {KERNEL} in a kernel: {'; '.join(long)}"


def test_body_lines_counts_what_is_below_the_docstring():
    text = 'def f(a,\n      b):\n    """One.\n\n    Two.\n    """\n    x = (a,\n         b)\n    return x\n'
    function, = ast.parse(text).body
    assert body_lines(function) == 3
