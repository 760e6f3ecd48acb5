"""What the first capture of a process loads, and what it leaves."""

import json
import os
import subprocess
import sys
from weakref import ref

from graphlin.backends import get_backend
from graphlin.capture import capture
from graphlin.tier import Tier
from tests.blocks import Mixer, captured, pack

FIRST_CAPTURE = """
import json, sys, torch, graphlin
from graphlin.backends import get_backend
backend, loaded = get_backend("{0}"), []
capture = backend.capture
def noting(**options):
    loaded.append(sorted({{"sympy", "torch._dynamo", "torch._inductor"}} & sys.modules.keys()))
    return capture(**options)
backend.capture = noting
graphed = graphlin.capture(torch.nn.Linear(8, 8).to("{0}"), graphlin.Tier(8, 2), fallback="raise")
graphed(torch.randn(4, 8, device="{0}")).sum().backward()
assert graphed.stats.backward_replays == 1
print(json.dumps(loaded))
"""


def test_a_first_warm_up_and_its_backward_import_none_of_pytorchs_compiler(device):
    """SymPy alone takes half a second, two without its bytecode; torch.autograd.grad would import it to compare two shapes.

    The host's recorder, a dispatch mode, imports all of it itself, so only other devices are asked again at the second graph.
    """
    if device.type == "npu":
        return  # torch_npu imports all of it itself
    paths = os.pathsep.join(map(os.path.abspath, sys.path))
    done = subprocess.run([sys.executable, "-c", FIRST_CAPTURE.format(device.type)], capture_output=True, text=True,
                          env=os.environ | {"PYTHONPATH": paths})
    assert done.returncode == 0, done.stderr
    forward, backward = json.loads(done.stdout)
    assert forward == [] and (device.type == "cpu" or backward == [])


def test_garbage_of_a_captured_run_is_gone_before_its_memory_is_shared(device, monkeypatch):
    boxes, left = [], []

    class Box:
        pass

    class Leaky(Mixer):
        def forward(self, x, cu_seqlens=None):
            box = Box()
            box.itself, box.y = box, super().forward(x, cu_seqlens)
            boxes.append(ref(box))
            return box.y

    unowned = get_backend(device).unowned
    monkeypatch.setattr(get_backend(device), "unowned",
                        lambda tensors: (left.append(sum(box() is not None for box in boxes)), unowned(tensors))[1])
    graphed = capture(Leaky().to(device), [Tier(16, 3), Tier(8, 3)])
    graphed(*pack([3, 4], device))
    captured(graphed, 1)
    assert len(boxes) > 4 and left == [0, 0]
