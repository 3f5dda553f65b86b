"""Where each utterance's packed rows start, and the way between dense planes [B, T, U1] and packed rows [N].

Only the entrances that take or give dense planes need the latter; the joint loss stays packed throughout.
Before: layout.py.  After: loss.py, dense_loss.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rnnt.layout import row_offsets, rows_at
from rnnt.problem import Alignment
from rnnt.triton.launch import launch

BLOCK = 128


@triton.jit(do_not_specialize=["utterances", "frames", "labels"])
def place_utterances_kernel(
    encoder_lengths_ptr, target_lengths_ptr, offsets_ptr, clipped_ptr, utterances, frames, labels, BLOCK: tl.constexpr
):
    """One program; reads all lengths, writes offsets [B + 1] and the target lengths [B] that these are made of."""
    total = tl.zeros([1], tl.int64)
    tl.store(offsets_ptr + tl.arange(0, 1), total)
    for start in range(0, utterances, BLOCK):
        b = start + tl.arange(0, BLOCK)
        inside = b < utterances
        T = tl.load(encoder_lengths_ptr + b, mask=inside, other=0)
        U = tl.load(target_lengths_ptr + b, mask=inside, other=0)
        T = tl.minimum(tl.maximum(T, 0), frames)
        U = tl.minimum(tl.maximum(U, 0), labels)
        rows = T * (U + 1)
        tl.store(clipped_ptr + b, U, mask=inside)
        tl.store(offsets_ptr + 1 + b, total + tl.cumsum(rows, axis=0), mask=inside)
        total += tl.sum(rows, axis=0)


def place_utterances(alignment: Alignment) -> tuple[Tensor, Tensor]:
    """offsets [B + 1] as layout.row_offsets, and target lengths [B], of lengths that need not have been checked: they
    are clipped to what the tensors hold, so that no kernel reads or writes past these."""
    utterances = alignment.utterances
    offsets = alignment.encoder_lengths.new_empty(utterances + 1)
    clipped = alignment.encoder_lengths.new_empty(utterances)
    launch(
        place_utterances_kernel, (1,),
        alignment.encoder_lengths, alignment.target_lengths, offsets, clipped,
        utterances, alignment.frames, alignment.columns - 1, BLOCK=BLOCK,
    )  # fmt: skip
    return offsets, clipped


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
