"""How many rows a tile holds.

A tile is what lives in memory at once, so its size is the workspace divided by the bytes of one row.  The result does
not depend on the lengths of a batch: tiles keep one static shape through a whole training run.
Before: layout.py.  After: a backend's loss.py.
"""

SMALLEST_TILE = 256


def tile_size(tile_rows: int | str | None, bytes_per_row: int, workspace: int) -> int:
    """Rows of a tile: as asked for, or ("auto", and None, where only scratch space is tiled) the largest power of two
    whose rows fit the workspace in bytes."""
    if isinstance(tile_rows, int):
        return tile_rows
    rows = max(workspace // bytes_per_row, SMALLEST_TILE)
    return 1 << (rows.bit_length() - 1)
