"""Who may import whom; docs/architecture.md draws it."""

import ast
import sys

import pytest

from tests.house.source import PACKAGE, ROOT, functions, is_kernel, module_name, tree

BASE = {"graphlin.errors", "graphlin.chunking", "graphlin.agreement"}
MODEL = {*BASE, "graphlin.backends"}
CAPTURE = {*MODEL, "graphlin.tier", "graphlin.packing", "graphlin.replay", "graphlin.slots", "graphlin.watch",
           "graphlin.turn", "graphlin.modes", "graphlin.ticket", "graphlin.graphed", "graphlin.refusals", "graphlin.recording",
           "graphlin.capture", "graphlin.rehearsal", "graphlin.price", "graphlin.verify"}
DEVICE = {*BASE, "graphlin.backends.protocol", "graphlin.backends.accelerator", "graphlin.backends.diagnostics",
          "graphlin.backends.interpreter", "graphlin.backends.memory", "graphlin.backends.caching_pool"}
ANYTHING = None

# The parts of the package and what each may import beside itself: other parts, or single modules of them.
MAY_IMPORT = {
    "graphlin": ANYTHING,
    "graphlin.commands": ANYTHING,
    "graphlin.demo": ANYTHING,
    "graphlin.bench": ANYTHING,
    "graphlin.errors": set(),
    "graphlin.chunking": set(),
    "graphlin.agreement": {"graphlin.errors"},
    "graphlin.tier": BASE,
    "graphlin.packing": {*BASE, "graphlin.tier"},
    "graphlin.replay": {*MODEL, "graphlin.tier", "graphlin.packing"},
    "graphlin.slots": {*MODEL, "graphlin.tier", "graphlin.packing", "graphlin.replay", "graphlin.kernels.copy_rows"},
    "graphlin.watch": BASE,
    "graphlin.turn": BASE,
    "graphlin.modes": CAPTURE,
    "graphlin.ticket": {*BASE, "graphlin.modes", "graphlin.packing", "graphlin.watch"},
    "graphlin.refusals": {*BASE, "graphlin.watch"},
    "graphlin.recording": {*CAPTURE, "graphlin.kernels.ahead"},
    "graphlin.capture": CAPTURE,
    "graphlin.graphed": {*CAPTURE, "graphlin.kernels.chunk_table"},
    "graphlin.rehearsal": CAPTURE,
    "graphlin.price": CAPTURE,
    "graphlin.verify": CAPTURE,
    "graphlin.backends": BASE,
    "graphlin.backends.cuda": DEVICE,
    "graphlin.backends.host": DEVICE,
    "graphlin.backends.meta": {*DEVICE, "graphlin.backends.cuda"},
    "graphlin.backends.npu": DEVICE,
    "graphlin.kernels": MODEL,
    "graphlin.ops": {*MODEL, "graphlin.kernels"},
    "graphlin.layers": {*MODEL, "graphlin.kernels", "graphlin.ops"},
    "graphlin.parallel": {*MODEL, "graphlin.kernels", "graphlin.ops"},
}
OUTSIDE = {"torch", "triton"}
MORE_OUTSIDE = {
    "graphlin": {"rich"},
    "graphlin.commands": {"rich"},
    "graphlin.price": {"rich"},
    "graphlin.demo": {"rich", "matplotlib"},
    "graphlin.bench": {"rich", "matplotlib"},
    "graphlin.backends.npu": {"torch_npu"},
}


def imports(module: ast.Module) -> list[str]:
    """Full names of what a module imports, wherever in it the import stands."""
    found = []
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            dots = "." * node.level
            found += [f"{dots}{node.module or ''}.{alias.name}" for alias in node.names]
    return found


def within(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def part_of(name: str) -> str:
    return max((part for part in MAY_IMPORT if within(name, part)), key=len)


def allowed(importer: str, target: str) -> bool:
    part = part_of(importer)
    top = target.split(".")[0]
    if top != "graphlin":
        return top in OUTSIDE | MORE_OUTSIDE.get(part, set()) or top in sys.stdlib_module_names
    if MAY_IMPORT[part] is ANYTHING or part_of(target) == part:
        return True
    modules = MAY_IMPORT[part] - MAY_IMPORT.keys()
    return part_of(target) in MAY_IMPORT[part] or any(within(target, module) for module in modules)


def test_imports_follow_the_layers():
    bad = [f"{module_name(path)} may not import {target}" for path in PACKAGE for target in imports(tree(path))
           if not allowed(module_name(path), target)]
    assert not bad, "\n".join([*bad, f"see MAY_IMPORT in {__file__}"])


@pytest.mark.parametrize("importer, target", [
    ("graphlin.backends.cuda.graph", "torch_npu"),
    ("graphlin.backends.cuda.graph", "graphlin.backends.host.graph"),
    ("graphlin.graphed", "graphlin.kernels.copy_rows.RowCopy"),
    ("graphlin.backends", "graphlin.kernels.launch"),
    ("graphlin.kernels.conv", "graphlin.ops.chunks"),
    ("graphlin.kernels.conv", "graphlin.backends.cuda.tiles"),
    ("graphlin.ops.chunks", "graphlin.tier.Tier"),
    ("graphlin.ops.chunks", "tests.inputs"),
    ("graphlin.ops.chunks", "fla.ops"),
    ("graphlin.ops.chunks", ".kernels.conv"),
    ("graphlin.capture", "graphlin.ops.chunk_gated_delta_rule"),
    ("graphlin.graphed", "graphlin.kernels.conv"),
    ("graphlin.tier", "graphlin.backends"),
    ("graphlin.ops.delta_rule", "graphlin.parallel.states"),
])
def test_rule_refuses(importer, target):
    assert not allowed(importer, target)


@pytest.mark.parametrize("importer, target", [
    ("graphlin.backends.npu.graph", "torch_npu.npu"),
    ("graphlin.kernels", "graphlin.backends.interpreter.choose_interpreter"),
    ("graphlin.kernels.launch", "graphlin.backends.get_backend"),
    ("graphlin.slots", "graphlin.kernels.copy_rows.RowCopy"),
    ("graphlin.tier", "math"),
    ("graphlin.demo.train", "graphlin.ops"),
])
def test_rule_lets_pass(importer, target):
    assert allowed(importer, target)


def test_kernels_stand_in_kernels_alone():
    strays = [f"{module_name(path)}.{function.name}" for path in PACKAGE for function in functions(tree(path))
              if is_kernel(function) and not within(module_name(path), "graphlin.kernels")]
    assert not strays, f"Triton kernels belong in graphlin/kernels: {', '.join(strays)}"


def test_kernels_are_launched_by_backends_alone():
    """Anywhere else a launch would miss the host's recording and the launch records."""
    def is_launch(node: ast.AST) -> bool:
        call = isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript)
        return call and isinstance(node.func.slice, ast.Tuple)

    strays = [f"{module_name(path)}:{node.lineno}" for path in PACKAGE for node in ast.walk(tree(path))
              if is_launch(node) and not within(module_name(path), "graphlin.backends")]
    assert not strays, f"launch through graphlin.kernels.launch.launch: {', '.join(strays)}"


def test_nothing_outside_the_repository_is_named():
    words = ("../" + "shared", "/" + "work/")
    bad = [str(path.relative_to(ROOT)) for folder in ("graphlin", "tests", "ci", "docs", "examples")
           for path in (ROOT / folder).rglob("*") if path.suffix in {".py", ".md", ".txt"}
           and any(word in path.read_text() for word in words)]
    assert not bad
