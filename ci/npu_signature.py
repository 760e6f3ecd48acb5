"""Binds every call that the npu backend makes of torch_npu against the signatures in torch_npu's own wheels.

    python ci/npu_signature.py [VERSION...]                   # 2.13.0 2.10.0.post7; downloads them, runs none

The wheels are read, not installed. The exit status is 1 if a call names what a version does not have, or passes arguments
that it does not take.
"""

import argparse
import ast
import inspect
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from zipfile import ZipFile

ROOT = Path(__file__).resolve().parent.parent
BACKENDS = ROOT / "graphlin" / "backends"
FILES = [BACKENDS / "accelerator.py", *sorted((BACKENDS / "npu").glob("*.py"))]
WHEELS = ROOT / "build" / "npu-wheels"
VERSIONS = ("2.13.0", "2.10.0.post7")
GRAPH = "NPUGraph"
# Where the backend finds what it calls, and what stands for that in `Call.name`; its base class has torch.npu as `self._module`.
OWNERS = {"torch.npu.": "", "self._module.": "", f"torch.npu.{GRAPH}.": f"{GRAPH}.", "graph.": f"{GRAPH}.",
          "torch_npu._C.": "_C."}


@dataclass(frozen=True)
class Call:
    """One call of the backend: a name of `torch.npu`, a method of its graph as `NPUGraph.method`, or C++ as `_C.name`."""

    where: str
    name: str
    positional: int
    keywords: tuple[str, ...]

    def fault(self, signatures: dict[str, list[inspect.Signature]]) -> str:
        """Why the call would fail, or an empty string."""
        if self.name not in signatures:
            return "there is no such name"
        for signature in signatures[self.name]:
            try:
                signature.bind(*[None] * self.positional, **dict.fromkeys(self.keywords))
            except TypeError as error:
                return f"{error}; it takes {signature}"
        return ""


def backend_calls(files: list[Path]) -> list[Call]:
    """Every call of torch.npu and of its graph in these files."""
    return [call for path in files for node in ast.walk(ast.parse(path.read_text())) for call in _calls(path, node)]


def _calls(path: Path, node: ast.AST) -> Iterator[Call]:
    """The call at one node; what is handed on there, to a decorator or in an assignment, counts as called without arguments."""
    if isinstance(node, ast.Call):
        yield from _call(path, node.func, len(node.args), tuple(keyword.arg for keyword in node.keywords))
    handed_on = node.args if isinstance(node, ast.Call) else [node.value] if isinstance(node, ast.Assign) else []
    for function in handed_on:
        yield from _call(path, function)


def _call(path: Path, function: ast.expr, positional: int = 0, keywords: tuple[str, ...] = ()) -> Iterator[Call]:
    text = ast.unparse(function)
    for prefix, owner in OWNERS.items():
        if isinstance(function, ast.Attribute) and text.startswith(prefix) and text.count(".") == prefix.count("."):
            yield Call(f"{path.name}:{function.lineno}", owner + text.removeprefix(prefix), positional, keywords)


def wheel_signatures(wheel: Path) -> dict[str, list[inspect.Signature]]:
    """Signatures of what torch_npu.npu defines in Python: functions, classes by their constructors, methods of NPUGraph; and the
    names of C++ that it imports."""
    found: dict[str, list[inspect.Signature]] = {}
    with ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.startswith("torch_npu/npu/") and name.count("/") == 2 and name.endswith(".py"):
                for node in ast.parse(archive.read(name)).body:
                    _add(found, node)
    return found


def _add(found: dict, node: ast.stmt) -> None:
    if isinstance(node, ast.FunctionDef):
        found[node.name] = [_signature(node, bound=False)]
    elif isinstance(node, ast.ImportFrom) and node.module == "torch_npu._C":
        found |= {f"_C.{alias.name}": [] for alias in node.names}       # C++: the wheel tells no signature
    elif isinstance(node, ast.ClassDef):
        methods = {item.name: _signature(item, bound=True) for item in node.body if isinstance(item, ast.FunctionDef)}
        found[node.name] = [methods[name] for name in ("__new__", "__init__") if name in methods]
        if node.name == GRAPH:
            found |= {f"{GRAPH}.{name}": [signature] for name, signature in methods.items()}


def _signature(function: ast.FunctionDef, bound: bool) -> inspect.Signature:
    """As inspect would give it, without what the instance fills; the values of defaults are of no interest."""
    kind, a = inspect.Parameter, function.args
    plain = a.posonlyargs + a.args
    required = len(plain) - len(a.defaults)
    parameters = [kind(arg.arg, kind.POSITIONAL_OR_KEYWORD, default=kind.empty if i < required else None)
                  for i, arg in enumerate(plain)][int(bound):]
    parameters += [kind(a.vararg.arg, kind.VAR_POSITIONAL)] if a.vararg else []
    parameters += [kind(arg.arg, kind.KEYWORD_ONLY, default=kind.empty if default is None else None)
                   for arg, default in zip(a.kwonlyargs, a.kw_defaults, strict=True)]
    parameters += [kind(a.kwarg.arg, kind.VAR_KEYWORD)] if a.kwarg else []
    return inspect.Signature(parameters)


def fetch(version: str) -> Path:
    """The wheel of a version, downloaded once."""
    pattern = f"torch_npu-{version}-cp311-*x86_64.whl"
    if not list(WHEELS.glob(pattern)):
        subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps",
                        "--only-binary", ":all:", "--python-version", "3.11", "--platform", "manylinux_2_28_x86_64",
                        "-d", str(WHEELS), f"torch_npu=={version}"], check=True)
    return next(WHEELS.glob(pattern))


def main() -> int:
    """Checks the versions that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", metavar="VERSION", default=VERSIONS)
    calls, faults = backend_calls(FILES), 0
    for version in parser.parse_args().versions:
        signatures = wheel_signatures(fetch(version))
        for call in calls:
            wrong = call.fault(signatures)
            faults += bool(wrong)
            print(f"torch_npu {version:<14}{call.where:<20}{call.name:<32}{'FAULT ' + wrong if wrong else 'binds'}")
    print(f"npu-signature: {len(calls) * len(parser.parse_args().versions) - faults} passed, {faults} failed")
    return 1 if faults or not calls else 0


if __name__ == "__main__":
    sys.exit(main())
