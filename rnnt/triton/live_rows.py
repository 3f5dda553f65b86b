"""The rows the backward pass works on: those whose occupancy counts.

    live[row]  = w_blank + w_label >= threshold   (threshold 0: the weights are not both 0)
    slot[row]  = number of live rows before it,  slot[N] = their count
    row[slot]  = the slot-th live row

The gradient at a node is its occupancy times a vector of bounded size, and most nodes' occupancy is next to nothing.
The count stays on the device: kernels are launched for as many rows as there could be, and stop at it.  It is also
copied to the host without waiting; once it has arrived there, launches that would find nothing are left out.
Before: lattice.py.  After: joint.py and log_probs.py, backwards.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rnnt.triton.config import cdiv, configs
from rnnt.triton.host_copy import HostCopy
from rnnt.triton.launch import launch


@triton.jit
def load_live(weight_blank_ptr, weight_label_ptr, row, rows, threshold, THRESHOLD: tl.constexpr):
    """Whether the rows are live, as int32; a NaN is: its loss is NaN, and so are its gradients."""
    w_blank = tl.load(weight_blank_ptr + row, mask=row < rows, other=0.0)
    w_label = tl.load(weight_label_ptr + row, mask=row < rows, other=0.0)
    dead = (w_blank + w_label < threshold) if THRESHOLD else ((w_blank == 0) & (w_label == 0))
    return tl.where(dead | (row >= rows), 0, 1)


@triton.jit(do_not_specialize=["rows"])
def count_live_rows_kernel(
    weight_blank_ptr, weight_label_ptr, counts_ptr, rows, threshold, THRESHOLD: tl.constexpr, BLOCK_ROWS: tl.constexpr
):
    """Owns BLOCK_ROWS packed rows; writes how many of them are live."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    live = load_live(weight_blank_ptr, weight_label_ptr, row, rows, threshold, THRESHOLD)
    tl.store(counts_ptr + tl.program_id(0), tl.sum(live, axis=0))


@triton.jit(do_not_specialize=["rows"])
def live_rows_kernel(
    weight_blank_ptr, weight_label_ptr, counts_ptr, slot_ptr, row_ptr, rows, threshold,
    THRESHOLD: tl.constexpr, BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    """Owns BLOCK_ROWS packed rows; adds up the counts before them, and writes their slots and the live ones' rows."""
    index = slot_ptr.dtype.element_ty
    block = tl.program_id(0)
    before = tl.zeros([BLOCK_ROWS], index)
    for start in range(0, block, BLOCK_ROWS):
        offs = start + tl.arange(0, BLOCK_ROWS)
        before += tl.load(counts_ptr + offs, mask=offs < block, other=0).to(index)
    row = block.to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    live = load_live(weight_blank_ptr, weight_label_ptr, row, rows, threshold, THRESHOLD)
    after = tl.sum(before, axis=0) + tl.cumsum(live, axis=0).to(index)
    tl.store(slot_ptr + 1 + row, after, mask=row < rows)
    tl.store(slot_ptr + row, after - live.to(index), mask=row == 0)
    tl.store(row_ptr + after - 1, row.to(index), mask=live == 1)


def index_type(rows: int) -> torch.dtype:
    """dtype of slots and of packed rows' indices."""
    return torch.int32 if rows < 2**31 - 1 else torch.int64


def live_rows(weight_blank: Tensor, weight_label: Tensor, threshold: float) -> tuple[Tensor, Tensor, Tensor]:
    """row [rows] and slot [rows + 1] (int32, int64 past 2^31 rows), and the count [1], a view of slot's end."""
    rows, config = weight_blank.shape[0], configs(torch.float32).live_rows
    blocks = cdiv(rows, config.block_rows)
    index = index_type(rows)
    counts = weight_blank.new_empty(blocks, dtype=torch.int32)
    slot = counts.new_empty(rows + 1, dtype=index)
    row = counts.new_empty(rows, dtype=index)
    options = {"THRESHOLD": threshold > 0, "BLOCK_ROWS": config.block_rows, "num_warps": config.num_warps}
    launch(count_live_rows_kernel, (blocks,), weight_blank, weight_label, counts, rows, threshold, **options)
    launch(live_rows_kernel, (blocks,), weight_blank, weight_label, counts, slot, row, rows, threshold, **options)
    return row, slot, slot[-1:]


class LiveCount:
    """The count [1], known to the host once it has arrived there; in a CUDA graph never."""

    def __init__(self, count: Tensor) -> None:
        self.known: int | None = None
        self.copy = None if count.is_cuda and torch.cuda.is_current_stream_capturing() else HostCopy(count)

    def end_before(self, first: int) -> bool:
        """Whether it is known that no live row is left from slot first on; never waits."""
        if self.known is None and self.copy is not None and self.copy.has_arrived():
            self.known = int(self.copy.host)
        return self.known is not None and self.known <= first
