"""Exceptions of graphlin. A wrong argument is a plain ValueError or TypeError; everything else derives from GraphlinError."""


class GraphlinError(RuntimeError):
    """Base of every error that graphlin raises about capture, replay or devices."""


class CaptureError(GraphlinError):
    """A block could not be captured; nothing is left open and the block still works eagerly."""


class HostSync(CaptureError):
    """The block reads a device value on the host (`.item()`, `.tolist()`, a data-dependent shape)."""


class ColdKernel(CaptureError):
    """A kernel would be compiled for the first time inside a capture."""


class UnsupportedModule(CaptureError):
    """The block holds a module or returns an output that cannot live in a graph."""


class Resource(CaptureError):
    """The device has too little memory, or too few streams, for the capture."""


class ReplayError(GraphlinError):
    """A call could not be replayed and `fallback="raise"` forbids the eager path; or a backward could not be."""


class TierOverflow(ReplayError):
    """The input has more tokens or sequences than the largest tier."""


class TierUnderflow(ReplayError):
    """The input fills too little of its tier: more than `max_padding` of the tier's rows would be padding."""


class StructureMismatch(ReplayError):
    """The call differs from the captured ones in shapes, structure, dtypes, device, a constant or its mode, or needs what a
    replay does not have (more modes, forward-mode derivatives)."""


class StaleAddress(ReplayError):
    """A part of the block, or a hook in it, is no longer the one that the graph was captured with."""


class SlotInUse(ReplayError):
    """Every slot holds a forward that still waits for its backward."""


class RanksDiffer(ReplayError):
    """Ranks that capture together could not all capture the call, so that none did."""


class BackendUnavailable(GraphlinError):
    """No backend serves the device of these tensors in this process."""


class ExchangeFailed(GraphlinError):
    """Ranks of a process group could not exchange what they carry: one failed, or did not take part in time."""
