"""How many rows a tile holds.

A tile is what lives in memory at once, so its size is the workspace divided by the bytes of one row.  The result does
not depend on the lengths of a batch: tiles keep one static shape through a whole training run.
Before: layout.py.  After: a backend's loss.py.
"""

GRANULE = 256


def tile_size(tile_rows: int | str | None, bytes_per_row: int, workspace: int) -> int:
    """Rows of a tile: as asked for, or ("auto", and None, where only scratch space is tiled) the largest multiple of
    GRANULE, but at least one, that fits the workspace in bytes."""
    if isinstance(tile_rows, int):
        return tile_rows
    return max(workspace // bytes_per_row // GRANULE, 1) * GRANULE
