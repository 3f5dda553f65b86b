"""Where each utterance's packed rows start, and the way between dense planes [B, T, U1] and packed rows [N].

Only the entrances that take or give dense planes need the latter; the joint loss stays packed throughout.
Before: layout.py.  After: loss.py, dense_loss.py.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from rnnt.layout import row_offsets, rows_at
from rnnt.problem import Alignment
from rnnt.triton.launch import launch
from rnnt.validation import Check

BLOCK = 128


@triton.jit
def wrong_utterance(
    targets_ptr, encoder_lengths_ptr, target_lengths_ptr, b, frames, labels, classes, blank, BLOCK: tl.constexpr
):
    """1 where a length or a label of utterance b is out of range, else 0: what rnnt.validation.Check looks for."""
    T, U = tl.load(encoder_lengths_ptr + b), tl.load(target_lengths_ptr + b)
    in_range = (T >= 1) & (frames >= T) & (U >= 0) & (labels >= U)
    wrong = tl.where(in_range, 0, 1)
    used = tl.minimum(U, labels)
    for start in range(0, labels, BLOCK):
        u = start + tl.arange(0, BLOCK)
        label = tl.load(targets_ptr + b * labels + u, mask=u < used, other=0)
        bad = (u < used) & ((label < 0) | (label >= classes) | (label == blank))
        wrong |= tl.max(bad.to(tl.int32), axis=0)
    return wrong


@triton.jit(do_not_specialize=["utterances", "frames", "labels", "classes", "blank"])
def place_utterances_kernel(
    targets_ptr, encoder_lengths_ptr, target_lengths_ptr, offsets_ptr, clipped_ptr,
    utterances, frames, labels, classes, blank,
    CHECK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program 0 reads all lengths, and writes offsets [B + 1] and the target lengths [B] that these are made of; the
    others (CHECK) own an utterance each, and write whether it is wrong behind the offsets: [B]."""
    program = tl.program_id(0).to(tl.int64)
    if program == 0:
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
    elif CHECK:
        wrong = wrong_utterance(
            targets_ptr, encoder_lengths_ptr, target_lengths_ptr, program - 1, frames, labels, classes, blank, BLOCK
        )
        tl.store(offsets_ptr + utterances + program, wrong.to(tl.int64))


class Placed(NamedTuple):
    offsets: Tensor  # [B + 1] as layout.row_offsets
    target_lengths: Tensor  # [B]
    verdict: Tensor  # [1 + B]: N, and whether an utterance has a length or label out of range; not checked: [1]


def place_utterances(alignment: Alignment, check: Check | None = None) -> Placed:
    """Of lengths that need not have been checked: they are clipped to what the tensors hold, so that log_probs_fwd,
    which runs before a check's verdict is known, reads and writes nothing past these."""
    utterances = alignment.utterances
    numbers = alignment.encoder_lengths.new_empty(2 * utterances + 1 if check else utterances + 1)
    clipped = alignment.encoder_lengths.new_empty(utterances)
    launch(
        place_utterances_kernel, (1 + utterances if check else 1,),
        alignment.targets, alignment.encoder_lengths, alignment.target_lengths, numbers, clipped,
        utterances, alignment.frames, alignment.columns - 1, (check and check.classes) or 0, alignment.blank,
        CHECK=check is not None, BLOCK=BLOCK,
    )  # fmt: skip
    return Placed(numbers[: utterances + 1] if check else numbers, clipped, numbers[utterances:])


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
