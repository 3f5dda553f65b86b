"""Between dense planes [B, T, U1] and packed rows [N].

Only the entrances that take or give dense planes need this; the joint loss stays packed throughout.
Before: layout.py.  After: loss.py, dense_loss.py.
"""

import torch
from torch import Tensor

from rnnt.layout import row_offsets, rows_at
from rnnt.problem import Alignment


def unpack(packed: Tensor, alignment: Alignment) -> Tensor:
    """[rows] -> [B, T, U1], 0 outside the lengths."""
    rows = rows_at(alignment, row_offsets(alignment), torch.arange(alignment.rows, device=packed.device))
    nodes = alignment.utterances * alignment.frames * alignment.columns
    dense = packed.new_zeros(nodes + 1)  # the last takes rows past N
    dense[torch.where(rows.valid, rows.node(alignment.columns), nodes)] = packed
    return dense[:nodes].view(alignment.utterances, alignment.frames, alignment.columns)


def pack(plane_blank: Tensor, plane_label: Tensor, alignment: Alignment) -> tuple[Tensor, Tensor]:
    """[B, T, U1], [B, T, U] -> [rows] float32 each, 0 past N and where there is no label."""
    rows = rows_at(alignment, row_offsets(alignment), torch.arange(alignment.rows, device=plane_blank.device))
    node = rows.node(alignment.columns)
    blank = torch.where(rows.valid, plane_blank.reshape(-1)[node], 0)
    has_label = rows.valid & (rows.label >= 0)
    label = torch.where(has_label, torch.nn.functional.pad(plane_label, (0, 1)).reshape(-1)[node], 0)
    return blank.float(), label.float()
