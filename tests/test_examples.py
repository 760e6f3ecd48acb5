"""The examples run and hold what they say."""

import importlib.util
from pathlib import Path

import torch.distributed as dist

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def load(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_raw_capture(device, capsys):
    raw_capture = load("raw_capture")
    equal = raw_capture.main(device)
    assert equal == [True] * len(raw_capture.PACKS) and len(equal) >= 5
    assert capsys.readouterr().out.count("bitwise equal to eager") == len(equal)


def test_context_parallel_on_one_rank(device, capsys, tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        example = load("context_parallel")
        differences = example.main(device)
    finally:
        dist.destroy_process_group()
    assert len(differences) == len(example.BATCHES) and max(differences) < 1e-5
    assert capsys.readouterr().out.count("rank 0 of 1, 64 of 64 tokens") == len(differences)
