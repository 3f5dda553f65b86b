"""Checks of the values a problem is built on: lengths and labels.

Reading them from an accelerator costs one host sync, from the CPU none; `validate=False` skips the checks.  The number
of valid rows N comes out of it as a Python int.  Inside a graph that torch.compile captures, the same check runs as
one opaque operator.  Before: api.py.  After: layout.py.
"""

import numpy as np
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

    targets [B, U], encoder_lengths [B], target_lengths [B]: int32 or int64, on any device.  classes None: labels are
    not used, and not checked.  Raises ValueError with argument, expected, got.
    """
    utterances, labels = targets.shape
    lengths, counts, *values = _on_host(encoder_lengths, target_lengths, *([] if classes is None else [targets]))
    wrong_length, wrong_count = (lengths < 1) | (lengths > frames), (counts < 0) | (counts > labels)
    wrong_label = np.zeros((utterances, 0), dtype=bool)
    if classes is not None:
        wrong_label = (values[0] < 0) | (values[0] >= classes) | (values[0] == blank)
        wrong_label &= np.arange(labels) < counts[:, None]
    wrong = wrong_length | wrong_count | wrong_label.any(axis=1)
    if wrong.any():
        b = int(wrong.argmax())
        if wrong_length[b]:
            expected = f"a length in [1, {frames}] (T = {frames})"
            raise ValueError(f"{lengths_name}[{b}]: expected {expected}, got {lengths[b]}")
        if wrong_count[b]:
            expected = f"a length in [0, {labels}] (U = {labels})"
            raise ValueError(f"target_lengths[{b}]: expected {expected}, got {counts[b]}")
        u = int(wrong_label[b].argmax())
        expected = f"a label in [0, {classes}) other than blank = {blank} (target_lengths[{b}] = {counts[b]})"
        raise ValueError(f"targets[{b}, {u}]: expected {expected}, got {values[0][b, u]}")
    return int((lengths * (counts + 1)).sum())


def _on_host(*tensors: Tensor) -> list[np.ndarray]:
    """The integer tensors' values; those on an accelerator come over together, in one host sync."""
    away = [x.flatten().long() for x in tensors if x.device.type != "cpu"]
    fetched = iter(torch.cat(away).cpu().split([len(x) for x in away])) if away else iter([])
    return [(x.long() if x.device.type == "cpu" else next(fetched).view(x.shape)).numpy() for x in tensors]


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
