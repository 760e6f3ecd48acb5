"""The documents tell of things that exist."""

import inspect
import re

import pytest

import graphlin
from tests.house.source import PACKAGE, ROOT, functions, is_kernel, tree

DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])

STAGES = {
    "kda_gate_chunk_cumsum", "chunk_local_cumsum", "chunk_kda_fwd_intra", "chunk_gated_delta_rule_fwd_intra",
    "recompute_w_u_fwd", "chunk_gated_delta_rule_fwd_h", "chunk_gla_fwd_o_gk", "chunk_fwd_o",
    "prepare_wy_repr_bwd", "chunk_bwd_dqkwg", "chunk_bwd_dv_local", "chunk_gated_delta_rule_bwd_dhu",
    "chunk_kda_bwd_intra", "chunk_kda_bwd_wy_dqkg_fused", "kda_gate_bwd", "causal_conv1d_fwd",
    "causal_conv1d_states_fwd", "causal_conv1d_bwd", "compute_dh0", "layer_norm_gated_fwd", "layer_norm_gated_bwd",
}


def stage_rows() -> dict[str, str]:
    """Stage name -> the cell that says where it lives here, from docs/kernels.md."""
    return dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", (ROOT / "docs" / "kernels.md").read_text(), re.MULTILINE))


def kernels() -> set[str]:
    return {function.name for path in PACKAGE for function in functions(tree(path)) if is_kernel(function)}


def test_every_stage_has_a_row():
    assert set(stage_rows()) >= STAGES


def test_stage_table_names_kernels_that_exist():
    for stage, cell in stage_rows().items():
        names = re.findall(r"`(\w+)`", cell)
        assert names or "not yet" in cell, f"{stage}: neither a kernel nor 'not yet'"
        missing = set(names) - kernels()
        assert not missing, f"{stage}: {', '.join(missing)} is no kernel of graphlin.kernels"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document):
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", document.read_text()):
        assert (document.parent / target).exists(), f"{document.name} links to {target}"


def test_code_paths_in_documents_exist():
    """Backquoted paths such as `graphlin/kernels/launch.py`."""
    for document in DOCUMENTS:
        for path in re.findall(r"`((?:graphlin|tests|ci|docs|examples)/[\w./-]+)`", document.read_text()):
            assert (ROOT / path).exists(), f"{document.name} names {path}"


def public_functions() -> list[str]:
    return [name for name in graphlin.__all__ if inspect.isroutine(getattr(graphlin, name))]


@pytest.mark.parametrize("name", getattr(graphlin, "__all__", []))
def test_public_name_is_documented(name):
    assert len(inspect.getdoc(getattr(graphlin, name)) or "") > 20


@pytest.mark.parametrize("name", public_functions() if hasattr(graphlin, "__all__") else [])
def test_public_function_is_documented_with_an_example(name):
    text = inspect.getdoc(getattr(graphlin, name))
    assert ">>> " in text, f"{name}: a two-line example"
    for argument in inspect.signature(getattr(graphlin, name)).parameters:
        assert re.search(rf"\b{argument}\b", text), f"{name}: nothing about {argument}"
    assert re.search(r"\bRaises\b", text), f"{name}: which errors it raises"


def tensor_arguments(function) -> list[str]:
    return [name for name, argument in inspect.signature(function).parameters.items()
            if "Tensor" in str(argument.annotation)]


@pytest.mark.parametrize("name", [name for name in public_functions() if tensor_arguments(getattr(graphlin, name))])
def test_public_function_gives_the_shape_of_each_tensor(name):
    """In the line of its own under Args, as `[B, T]` or by the name of a function that says more, or behind its name."""
    text = inspect.getdoc(getattr(graphlin, name))
    arguments, returned = re.search(r"^Args:\n(.*?)^Returns:\n(.*?)^Raises:\n", text, re.DOTALL | re.MULTILINE).groups()
    for argument in tensor_arguments(getattr(graphlin, name)):
        told = rf"^ {{4}}(?:\w+, )*{argument}(?:, \w+)*: .*?`[\[a-z]|\b{argument} `\["
        assert re.search(told, arguments, re.MULTILINE), f"{name}: no shape of {argument}"
    assert re.search(r"`\[|\blike\b", returned), f"{name}: no shape of what it returns"
