"""A pytest plugin: `pytest -p npu_rig.plugin` loads the rig before anything imports torch, in xdist's workers too."""

import os

import pytest

import npu_rig

npu_rig.load()

from graphlin.backends import diagnostics  # noqa: E402
from npu_rig.not_emulated import NOT_EMULATED  # noqa: E402

# An error names the innermost line that is no machinery's; on a device the rig's lines would not be there.
diagnostics._MACHINERY += (os.path.dirname(npu_rig.__file__) + os.sep,)


def pytest_collection_modifyitems(items):
    """Marks what is not run here with its reason."""
    for item in items:
        for beginning, reason in NOT_EMULATED.items():
            if item.nodeid.startswith(beginning):
                item.add_marker(pytest.mark.xfail(run=False, reason=f"not on the emulated device: {reason}"))
