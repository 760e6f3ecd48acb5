"""Errors of torch_npu whose meaning is known (acl/error_codes/rt_error_codes.h, NPUGraph.cpp)."""

from graphlin.backends.diagnostics import WAITS
from graphlin.errors import CaptureError, HostSync, ReplayError, Resource

_CODE = r"error code(?: is |:)"
FAILURES = (
    (_CODE + r"(107027|107028|107030)\b|called a synchronizing NPU operation", HostSync, WAITS),
    (r"captured on a non-default stream", CaptureError, "a capture on the default stream, at {line}: pass a stream of "
     "side_stream(), and do the warm-up there too."),
    (r"without a preceding successful capture", ReplayError, "a graph that holds no capture was used at {line}: capture first; "
     "after reset() or a failed capture, capture again."),
    (r"already owns a captured graph", CaptureError, "a second capture into one graph, at {line}: reset() it first."),
    (_CODE + r"(207005|20700[789]|207010)\b", Resource, "the device has no stream, event or model left for a graph: each "
     "keeps a stream or more, of which a 910B has 1,984. Capture fewer tiers, slots and modes, or reset() blocks that are done."),
    (_CODE + r"(10702[59]|10703\d|507903)\b", CaptureError, "the capture broke at {line}: the block does there what an ACL graph "
     "cannot hold, such as work on a stream that is not joined again."),
)
