"""What a device's error texts are taken for."""

import pytest
import torch

from graphlin.backends.diagnostics import failures_typed
from graphlin.errors import CaptureError, HostSync, ReplayError

MEANINGS = ((r"code 1\d\b", HostSync, "waits at {line}"), (r"code", CaptureError, "broke: {error}"))


@pytest.mark.parametrize("text, kind, told", [
    ("error code 12", HostSync, "waits at .*test_diagnostics.py:[0-9]+ in test_a_known_failure"),
    ("error code 123", CaptureError, "broke: error code 123"),
    ("code {line}", CaptureError, "broke: code {line}"),
])
def test_a_known_failure_is_the_first_meaning_that_fits(text, kind, told):
    error = RuntimeError(text)
    with pytest.raises(kind, match=told) as caught, failures_typed(MEANINGS):
        raise error
    assert type(caught.value) is kind and caught.value.__cause__ is error


@pytest.mark.parametrize("error", [RuntimeError("else"), KeyError("code 12"), ReplayError("code 12"),
                                   torch.OutOfMemoryError("code 12")])
def test_others_pass_as_they_are(error):
    with pytest.raises(type(error)) as caught, failures_typed(MEANINGS):
        raise error
    assert caught.value is error


def test_a_function_may_be_decorated_and_called_again():
    @failures_typed(MEANINGS)
    def half(x):
        if x % 2:
            raise RuntimeError("code 12")
        return x // 2
    for _ in range(2):
        assert half(4) == 2
        with pytest.raises(HostSync):
            half(3)
