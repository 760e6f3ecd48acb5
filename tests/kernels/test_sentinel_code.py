"""With GRAPH_CAPTURE off, a kernel is the one whose guarded lines were never written."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FLAG = "GRAPH_CAPTURE"


class Unguarded(ast.NodeTransformer):
    """Deletes what stands under `if GRAPH_CAPTURE:`; an else branch stays."""

    def visit_If(self, node):
        self.generic_visit(node)
        return (node.orelse or ast.Pass()) if _is_flag(node.test) else node

    def visit_IfExp(self, node):
        self.generic_visit(node)
        return node.orelse if _is_flag(node.test) else node


def _is_flag(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == FLAG


def without_guards(source: str) -> str:
    tree = ast.fix_missing_locations(Unguarded().visit(ast.parse(source)))
    passed_on = {id(value) for call in ast.walk(tree) if isinstance(call, ast.Call)
                 for value in [*call.args, *(keyword.value for keyword in call.keywords)]}
    left = [node.lineno for node in ast.walk(tree) if _is_flag(node) and id(node) not in passed_on]
    assert not left, f"{FLAG} is used at lines {left} other than as `if {FLAG}:` or as an argument"
    return ast.unparse(tree)


@pytest.fixture(scope="module")
def stripped(tmp_path_factory) -> Path:
    """A folder with a copy of graphlin whose guarded lines are deleted."""
    folder = tmp_path_factory.mktemp("stripped")
    for path in (ROOT / "graphlin").rglob("*.py"):
        copy = folder / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        source = path.read_text()
        copy.write_text(without_guards(source) if path.parent.name == "kernels" else source)
    return folder


def launches(folder: Path, switch: str, cache: Path) -> dict[str, dict]:
    """PTX of all launches of the ops, with the kernels of the `graphlin` in `folder`; comments are dropped."""
    pytest.importorskip("triton.backends.nvidia", reason="compares PTX")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)]), "TRITON_INTERPRET": "0",
                   "TRITON_DISABLE_LINE_INFO": "1", "TRITON_CACHE_DIR": str(cache)}
    done = subprocess.run([sys.executable, str(Path(__file__).with_name("ptx_of_launches.py")), switch],
                          env=environment, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    for launch in found.values():
        launch["ptx"] = re.sub(r"\s*//.*", "", launch["ptx"])
    return {name: launch for name, launch in found.items() if launch["chunks"] and name != "chunk_table_rows"}


@pytest.fixture(scope="module")
def switched_off(tmp_path_factory) -> dict[str, dict]:
    return launches(ROOT, "off", tmp_path_factory.mktemp("off"))


def test_every_kernel_that_reads_the_chunk_table_has_the_switch(switched_off):
    assert len(switched_off) >= 4
    assert [name for name, launch in switched_off.items() if not launch["flag"]] == []


def test_switched_off_the_sentinel_code_is_gone(switched_off, stripped, tmp_path):
    deleted = launches(stripped, "off", tmp_path)
    assert deleted.keys() == switched_off.keys()
    for name, launch in switched_off.items():
        assert launch["ptx"] == deleted[name]["ptx"], f"{name}: the PTX still holds guarded code"


def test_switched_on_the_sentinel_code_is_there(switched_off, tmp_path):
    on = launches(ROOT, "on", tmp_path)
    assert [name for name, launch in switched_off.items() if launch["ptx"] == on[name]["ptx"]] == []
