"""The examples run and hold what they say."""

import importlib.util
from pathlib import Path

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
