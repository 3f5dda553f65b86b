"""Launching one kernel for many tiles.

A tile step launches the same kernel with the same arguments but one, the tile's first row.  Triton binds, specialises
and looks up a launch's arguments every time, which takes longer than a small tile's work; here it does so for the
first tile, and the compiled kernel is launched directly for the others.
"""

from typing import Any


class TileLaunch:
    """A kernel with all its arguments but the first, `first`: int64 and not specialised on, so that one compiled
    kernel serves every tile.  Call it with the tile's first row."""

    def __init__(self, kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
        self.kernel = kernel
        self.grid = (*grid, 1, 1)[:3]
        self.arguments = arguments
        self.options = options
        self.constants = [options[name] for name in kernel.arg_names[1 + len(arguments) :]]
        self.compiled: Any = None

    def __call__(self, first: int) -> None:
        if self.compiled is not None:
            self.compiled[self.grid](first, *self.arguments, *self.constants)
        else:
            self.compiled = self.kernel[self.grid](first, *self.arguments, **self.options)  # None when interpreted
