"""A pytest plugin: `pytest -p npu_rig.plugin` loads the rig before anything imports torch, in xdist's workers too."""

import npu_rig

npu_rig.load()
