"""The end of processes that tests start."""

import os
import sys


def end_process() -> None:
    """Ends this process as done, past the interpreter's own end, where threads that torch.distributed leaves behind abort it now
    and then on a busy machine."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
