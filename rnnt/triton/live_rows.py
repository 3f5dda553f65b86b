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

from rnnt.triton.config import configs


@triton.jit(do_not_specialize=["rows"])
def live_rows_kernel(slot_ptr, row_ptr, rows, BLOCK_ROWS: tl.constexpr):
    """Owns BLOCK_ROWS packed rows; writes those that are live to their slots."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    mask_row = row < rows
    slot = tl.load(slot_ptr + row, mask=mask_row, other=0)
    after = tl.load(slot_ptr + row + 1, mask=mask_row, other=0)
    tl.store(row_ptr + slot, row.to(row_ptr.dtype.element_ty), mask=mask_row & (after > slot))


def live_rows(weight_blank: Tensor, weight_label: Tensor, threshold: float) -> tuple[Tensor, Tensor, Tensor]:
    """row [N] and slot [N + 1] (int32, int64 past 2^31 rows), and the count [1], a view of slot's end."""
    rows = weight_blank.shape[0]
    index = torch.int32 if rows < 2**31 - 1 else torch.int64
    live = (weight_blank != 0) | (weight_label != 0)
    if threshold > 0:
        live = ~(weight_blank + weight_label < threshold)  # a NaN is live: its loss is NaN, and so are its gradients
    slot = torch.zeros(rows + 1, dtype=index, device=live.device)
    torch.cumsum(live, 0, dtype=index, out=slot[1:])
    row = torch.empty(rows, dtype=index, device=live.device)
    config = configs(torch.float32).rows
    live_rows_kernel[(triton.cdiv(rows, config.block_rows),)](
        slot, row, rows, BLOCK_ROWS=config.block_rows, num_warps=config.num_warps
    )
    return row, slot, slot[-1:]


class LiveCount:
    """The count [1] on its way to the host."""

    def __init__(self, count: Tensor) -> None:
        self.known: int | None = None
        self.arrived: torch.cuda.Event | None = None
        if not count.is_cuda:
            self.known = int(count)
        elif not torch.cuda.is_current_stream_capturing():
            self.host = torch.empty(1, dtype=count.dtype, pin_memory=True)
            self.host.copy_(count, non_blocking=True)
            self.arrived = torch.cuda.Event()
            self.arrived.record()

    def end_before(self, first: int) -> bool:
        """Whether it is known that no live row is left from slot first on; never waits."""
        if self.known is None and self.arrived is not None and self.arrived.query():
            self.known = int(self.host)
        return self.known is not None and self.known <= first
