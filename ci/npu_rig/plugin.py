"""A pytest plugin: `pytest -p npu_rig.plugin` loads the rig before anything imports torch, in xdist's workers too."""

import os

import npu_rig

npu_rig.load()

from graphlin.backends import diagnostics  # noqa: E402

# An error names the innermost line that is no machinery's; on a device the rig's lines would not be there.
diagnostics._MACHINERY += (os.path.dirname(npu_rig.__file__) + os.sep,)
