"""ACL graphs with typed errors. Importing this imports torch_npu, and so CANN."""

import torch
import torch_npu  # makes torch.npu

from graphlin.backends.diagnostics import failures_typed
from graphlin.backends.npu.failures import FAILURES

_typed = failures_typed(FAILURES)
alias = torch_npu._C._weak_ref_tensor  # keeps no memory, and has torch_npu's description of its storage, which operators ask for


class AclGraph(torch.npu.NPUGraph):
    """`torch.npu.NPUGraph` with typed errors."""

    capture_begin = _typed(torch.npu.NPUGraph.capture_begin)
    capture_end = _typed(torch.npu.NPUGraph.capture_end)
    replay = _typed(torch.npu.NPUGraph.replay)
    pool = _typed(torch.npu.NPUGraph.pool)
