"""Launching kernels at little cost to the host.

Triton binds, specialises and looks up a launch's arguments every time, which takes longer than a small kernel's work.
Here it does so once for each kind of arguments; later launches of that kind go to the compiled kernel directly.
"""

import functools
from typing import Any

from torch import Tensor
from triton.runtime import driver

from rnnt.backends import interpreting

_compiled: dict[tuple[Any, ...], Any] = {}


class Launch:
    """A kernel with all its arguments but the leading ones, which a call brings.

    A tile step launches one kernel with the same arguments but one, the tile's first row, `first`: it is annotated
    int64 and not specialised on, so that one compiled kernel serves every tile.
    """

    def __init__(self, kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
        self.kernel = kernel
        self.grid = (*grid, 1, 1)[:3]
        self.arguments = arguments
        self.options = options
        self.ready: Any = None

    def __call__(self, *leading: int) -> None:
        if interpreting():
            self.kernel[self.grid](*leading, *self.arguments, **self.options)
            return
        if self.ready is None:
            names = self.kernel.arg_names[len(leading) :]
            device = driver.active.get_current_device()
            kind = self._kind(names, device)
            if kind not in _compiled:
                _compiled[kind] = self.kernel[self.grid](*leading, *self.arguments, **self.options)
                return
            stream = driver.active.get_current_stream(device)
            self.ready = functools.partial(_compiled[kind][self.grid], stream=stream)
            constants = [self.options[name] for name in names[len(self.arguments) :]]
            # Triton would ask for a tensor's address, and the driver for its device, at every launch.
            self.plain = [x.data_ptr() if isinstance(x, Tensor) else x for x in self.arguments] + constants
        self.ready(*leading, *self.plain)

    def _kind(self, names: list[str], device: int) -> tuple[Any, ...]:
        """All that Triton compiles a kernel for: launches alike in it run the same code."""
        plain = self.kernel.do_not_specialize  # integers of which Triton looks at the width alone
        kind: list[Any] = [id(self.kernel), device, *self.options.values()]
        for x, name in zip(self.arguments, names, strict=False):
            if isinstance(x, Tensor):
                kind += (x.dtype, x.data_ptr() % 16 == 0)
            elif isinstance(x, int):
                kind.append(-(2**31) <= x < 2**31)
                if name not in plain:
                    kind += (x == 1, x % 16 == 0)
            elif hasattr(x, "block_shape"):  # a tensor descriptor, of Triton or of Gluon
                kind += (x.base.dtype, *x.block_shape)
            else:
                kind.append(type(x))  # a float, or None
        return tuple(kind)


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """One launch."""
    Launch(kernel, grid, *arguments, **options)()
