"""What a compiled kernel may take of an Ascend device."""

GRID_LIMIT = 65_535
"""Programs of one launch."""

WORKSPACE_LIMIT = 64 << 20
"""Bytes of global memory that one launch may ask for at the tier (4096, 32): workspace of a program times its programs."""


def fault(fit, unmasked: int, grid: int) -> str:
    """What is wrong with a kernel that runs in `grid` programs, or an empty string.

    fit: what bishengir said (`npu_rig.fit.Fit`); unmasked: masked loads that became loads of whole tiles.
    """
    if not fit.ok:
        return f"does not fit: {fit}"
    if fit.locks:
        return f"takes {fit.locks} locks, whose synchronous copy a graph can't hold"
    if fit.rewrites:
        return f"{fit.rewrites} masked stores became load, select and store of the whole tile, which writes outside the mask"
    if unmasked:
        return f"{unmasked} masked loads became loads of the whole tile, which read outside the tensor"
    if grid > GRID_LIMIT:
        return f"a grid of {grid:,} programs, a launch may have {GRID_LIMIT:,}"
    if fit.workspace * grid > WORKSPACE_LIMIT:
        return f"a workspace of {fit.workspace * grid:,} bytes, a launch may have {WORKSPACE_LIMIT:,}"
    return ""
