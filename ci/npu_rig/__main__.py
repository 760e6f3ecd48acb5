"""Runs a module on the rig: `python -m npu_rig graphlin demo`."""

import runpy
import sys

import npu_rig

npu_rig.load()
del sys.argv[0]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
