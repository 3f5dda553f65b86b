"""The GEMM floor: what the matrix products of the output layer alone cost.

    forward   hidden [N, H]  x linear_weight^T      -> logits [N, V]           2 N H V FLOP
    backward  d_logits [N, V] x linear_weight       -> d_hidden [N, H]         2 N H V FLOP
              d_logits^T      x hidden              -> d_linear_weight [V, H]  2 N H V FLOP

Over the valid rows, in chunks that fit in memory, in the shape's dtype.  V and H are rounded to a multiple of 64 for
the measurement, since a library's unaligned products are several times slower, and the time is scaled back by the
FLOP: V = 1025 has the floor of 1024 and a thousandth.  Before: shapes.py.  After: measure.py.
"""

import functools
import statistics
import time
from typing import NamedTuple

import torch

from rnnt.bench.machine import synchronize
from rnnt.bench.shapes import Shape
from rnnt.check import DTYPES

CHUNK_BYTES = {"cuda": 1 << 30, "cpu": 64 << 20}
REPEATS = {"cuda": 10, "cpu": 3}


class Floor(NamedTuple):
    """Seconds of one matrix product each, over all rows."""

    logits: float
    d_hidden: float
    d_linear_weight: float

    def seconds(self, which: str) -> float:
        """Of the pass "forward", "backward" or "both"."""
        forward, backward = self.logits, self.d_hidden + self.d_linear_weight
        return {"forward": forward, "backward": backward, "both": forward + backward}[which]


@functools.cache
def gemm_floor(shape: Shape, device: str) -> Floor:
    V, H = (max(64, round(size / 64) * 64) for size in (shape.V, shape.H))
    dtype = DTYPES[shape.dtype]
    chunks = -(-shape.rows * V * dtype.itemsize // CHUNK_BYTES[device])
    rows = -(-shape.rows // chunks)
    hidden = torch.randn(rows, H, device=device, dtype=dtype)
    weight = torch.randn(V, H, device=device, dtype=dtype)
    logits = torch.empty(rows, V, device=device, dtype=dtype)
    d_hidden, d_weight = torch.empty_like(hidden), torch.empty_like(weight)
    torch.mm(hidden, weight.T, out=logits)
    products = (
        lambda: torch.mm(hidden, weight.T, out=logits),
        lambda: torch.mm(logits, weight, out=d_hidden),
        lambda: torch.mm(logits.T, hidden, out=d_weight),
    )
    scale = (shape.rows * shape.V * shape.H) / (chunks * rows * V * H)
    seconds = []
    for product in products:
        product()
        times = []
        for _ in range(REPEATS[device]):
            synchronize(device)
            start = time.perf_counter()
            for _ in range(chunks):
                product()
            synchronize(device)
            times.append(time.perf_counter() - start)
        seconds.append(scale * statistics.median(times))
    return Floor(*seconds)


def flop(shape: Shape, which: str) -> int:
    """FLOP of the floor's products of one pass."""
    return {"forward": 1, "backward": 2, "both": 3}[which] * 2 * shape.rows * shape.H * shape.V
