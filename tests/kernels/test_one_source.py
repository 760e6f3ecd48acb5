"""One source for all devices: no kernel has a twin of its own for a device, and none asks which device it is on."""

import ast
import re

from graphlin.backends.cuda import tiles as cuda_tiles
from graphlin.backends.host import tiles as host_tiles
from graphlin.backends.npu import tiles as npu_tiles
from tests.house.source import PACKAGE, ROOT, functions, is_kernel, tree

DEVICE_WORDS = re.compile(r"(?i)(^|_)(npu|ascend|cuda|nvidia|gpu|hip|host|cpu|910b?|sm_?\d+)(_|\d|$)")
KERNELS = [path for path in PACKAGE if path.parent == ROOT / "graphlin" / "kernels"]


def kernel_source() -> dict[str, str]:
    """Every Triton function of the package: file:name -> its body without names of its own."""
    return {f"{path.stem}.{function.name}": ast.unparse(function) for path in PACKAGE for function in functions(tree(path))
            if is_kernel(function)}


def twins(sources: dict[str, str]) -> list[tuple[str, str]]:
    """Pairs of kernels whose bodies agree in nearly all of their lines: one made from the other."""
    lines = {name: set(source.splitlines()[2:]) for name, source in sources.items()}
    names = [name for name in sources if len(lines[name]) >= 8]
    return [(a, b) for i, a in enumerate(names) for b in names[i + 1:]
            if len(lines[a] & lines[b]) > 0.85 * min(len(lines[a]), len(lines[b]))]


def test_no_kernel_file_or_function_is_named_for_a_device():
    named = [path.name for path in KERNELS if DEVICE_WORDS.search(path.stem)]
    named += [name for name in kernel_source() if DEVICE_WORDS.search(name.split(".")[1])]
    assert not named, f"one source serves all devices: {named}"


def test_no_kernel_is_a_copy_of_another():
    assert not twins(kernel_source())


def test_a_copy_is_noticed():
    sources = kernel_source()
    body = sources["conv.conv_forward"].replace("def conv_forward", "def conv_forward_npu").replace("SILU", "ACT")
    assert twins({"conv.conv_forward": sources["conv.conv_forward"], "conv_npu.conv_forward_npu": body})
    assert DEVICE_WORDS.search("conv_npu") and DEVICE_WORDS.search("prep_sm90") and not DEVICE_WORDS.search("chunk_table")


def test_every_device_has_a_record_of_every_kernel_with_the_same_constexprs():
    assert cuda_tiles._RECORDS.keys() == host_tiles._TILES.keys() == npu_tiles._TILES.keys()


def test_no_kernel_asks_for_its_device():
    asking = [name for name, source in kernel_source().items() if re.search(r"(?i)\b(is_npu|is_cuda|is_hip|target)\b", source)]
    assert not asking
