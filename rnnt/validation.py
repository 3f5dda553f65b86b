"""Checks of the values a problem is built on: lengths and labels.

Reading them from an accelerator costs one host sync; `validate=False` skips both.  The lengths come back as Python
ints, so that the number of valid rows N is known on the host.  Inside a graph that torch.compile captures, the same
check runs as one opaque operator.  Before: api.py.  After: layout.py.
"""

import torch
from torch import Tensor


def check_values(
    targets: Tensor,
    encoder_lengths: Tensor,
    target_lengths: Tensor,
    frames: int,
    classes: int | None,
    blank: int,
    lengths_name: str = "encoder_lengths",
) -> int:
    """N, the number of valid lattice rows, after lengths and labels have been found in range.

    targets [B, U], encoder_lengths [B], target_lengths [B]: int64 on one device.  classes None: labels are not used,
    and not checked.  Raises ValueError with argument, expected, got.
    """
    labels = targets.shape[1]
    inside = torch.arange(labels, device=targets.device) < target_lengths[:, None]  # [B, U]
    if classes is None:
        wrong = torch.zeros_like(inside)
    else:
        wrong = inside & ((targets < 0) | (targets >= classes) | (targets == blank))
    wrong_label = wrong.any(dim=1).long()
    lengths, counts, wrong_flags = torch.stack([encoder_lengths, target_lengths, wrong_label]).tolist()
    for b, (length, count, flag) in enumerate(zip(lengths, counts, wrong_flags, strict=True)):
        if not 1 <= length <= frames:
            raise ValueError(f"{lengths_name}[{b}]: expected a length in [1, {frames}] (T = {frames}), got {length}")
        if not 0 <= count <= labels:
            raise ValueError(f"target_lengths[{b}]: expected a length in [0, {labels}] (U = {labels}), got {count}")
        if flag:
            u = int(wrong[b].int().argmax())
            label = int(targets[b, u])
            expected = f"a label in [0, {classes}) other than blank = {blank}"
            raise ValueError(f"targets[{b}, {u}]: expected {expected} (target_lengths[{b}] = {count}), got {label}")
    return sum(length * (count + 1) for length, count in zip(lengths, counts, strict=True))


@torch.library.custom_op("rnnt::check_values", mutates_args=())
def checked_lengths(
    targets: Tensor, encoder_lengths: Tensor, target_lengths: Tensor, frames: int, classes: int | None, blank: int
) -> Tensor:
    """[2, B] encoder and target lengths, copied once they and the labels have been found in range."""
    check_values(targets, encoder_lengths, target_lengths, frames, classes, blank)
    return torch.stack([encoder_lengths, target_lengths])


@checked_lengths.register_fake
def _(
    targets: Tensor, encoder_lengths: Tensor, target_lengths: Tensor, frames: int, classes: int | None, blank: int
) -> Tensor:
    return encoder_lengths.new_empty((2, encoder_lengths.shape[0]))
