"""Checks of the values a problem is built on: lengths and labels.

Reading them from an accelerator costs one host sync, from the CPU none; `validate=False` skips the checks.  The number
of valid rows N comes out of it as a Python int.  Inside a graph that torch.compile captures, the same check runs as one
opaque operator.  Before: api.py.  After: layout.py.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass
class Check:
    """What lengths and labels must be.

    targets [B, U], encoder_lengths [B], target_lengths [B]: int32 or int64, on any device.  classes None: labels are
    not used, and not checked.
    """

    targets: Tensor
    encoder_lengths: Tensor
    target_lengths: Tensor
    frames: int
    classes: int | None
    blank: int
    lengths_name: str = "encoder_lengths"

    @property
    def on_host(self) -> bool:
        return all(x.device.type == "cpu" for x in self._integers())

    def rows(self) -> int:
        """N, the number of valid lattice rows, after lengths and labels have been found in range.

        Raises ValueError with argument, expected, got.
        """
        frames, classes = self.frames, self.classes
        utterances, labels = self.targets.shape
        lengths, counts, *values = host_values(self._integers())
        wrong_length, wrong_count = (lengths < 1) | (lengths > frames), (counts < 0) | (counts > labels)
        wrong_label = np.zeros((utterances, 0), dtype=bool)
        if classes is not None:
            wrong_label = (values[0] < 0) | (values[0] >= classes) | (values[0] == self.blank)
            wrong_label &= np.arange(labels) < counts[:, None]
        wrong = wrong_length | wrong_count | wrong_label.any(axis=1)
        if wrong.any():
            b = int(wrong.argmax())
            if wrong_length[b]:
                expected = f"a length in [1, {frames}] (T = {frames})"
                raise ValueError(f"{self.lengths_name}[{b}]: expected {expected}, got {lengths[b]}")
            if wrong_count[b]:
                expected = f"a length in [0, {labels}] (U = {labels})"
                raise ValueError(f"target_lengths[{b}]: expected {expected}, got {counts[b]}")
            u = int(wrong_label[b].argmax())
            expected = f"a label in [0, {classes}) other than blank = {self.blank} (target_lengths[{b}] = {counts[b]})"
            raise ValueError(f"targets[{b}, {u}]: expected {expected}, got {values[0][b, u]}")
        return int((lengths * (counts + 1)).sum())

    def _integers(self) -> list[Tensor]:
        lengths = [self.encoder_lengths, self.target_lengths]
        return lengths if self.classes is None else [*lengths, self.targets]


def host_values(tensors: list[Tensor]) -> list[np.ndarray]:
    """Integer tensors' values, int64; those on an accelerator are fetched together."""
    away = [x for x in tensors if x.device.type != "cpu"]
    together = torch.cat([x.flatten() for x in away]).cpu() if away else torch.empty(0)
    fetched = iter(together.split([x.numel() for x in away]))
    found = (x if x.device.type == "cpu" else next(fetched).view(x.shape) for x in tensors)
    return [x.long().numpy() for x in found]


@torch.library.custom_op("rnnt::check_values", mutates_args=())
def checked_lengths(
    targets: Tensor, encoder_lengths: Tensor, target_lengths: Tensor, frames: int, classes: int | None, blank: int,
    lengths_name: str = "encoder_lengths",
) -> Tensor:  # fmt: skip
    """[2, B] encoder and target lengths, copied once they and the labels have been found in range."""
    Check(targets, encoder_lengths, target_lengths, frames, classes, blank, lengths_name).rows()
    return torch.stack([encoder_lengths, target_lengths])


@checked_lengths.register_fake
def _(
    targets: Tensor, encoder_lengths: Tensor, target_lengths: Tensor, frames: int, classes: int | None, blank: int,
    lengths_name: str = "encoder_lengths",
) -> Tensor:  # fmt: skip
    return encoder_lengths.new_empty((2, encoder_lengths.shape[0]))
