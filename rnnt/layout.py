"""Packed rows: every utterance's valid lattice nodes laid end to end, u fastest.

    offsets[b]   = sum over b' < b of T_b' (U_b' + 1)
    row(b, t, u) = offsets[b] + t (U_b + 1) + u,   N = offsets[B]

Padding has no row.  All indices are int64: N H and N V pass 2^31 in ordinary training.
Where N is not known on the host, rows are counted up to the capacity B T U1; those past N are marked invalid and point
at row 0, so that reading them is harmless.  Before: validation.py.  After: a backend's joint.py.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from rnnt.problem import Alignment


class Rows(NamedTuple):
    """Where a set of rows comes from; each [rows]."""

    utterance: Tensor  # b, int64
    frame: Tensor  # b T + t, int64: index into encoder.view(B T, H)
    state: Tensor  # b U1 + u, int64: index into predictor.view(B U1, H)
    label: Tensor  # next label, int64; -1 at u = U_b, where there is none
    valid: Tensor  # bool

    def node(self, columns: int) -> Tensor:
        """Index into a dense [B, T, U1] plane, flattened."""
        return self.frame * columns + self.state % columns


def row_offsets(alignment: Alignment) -> Tensor:
    """offsets [B + 1] int64."""
    frames, labels = alignment.encoder_lengths, alignment.target_lengths
    offsets = frames.new_zeros(frames.shape[0] + 1)
    torch.cumsum(torch.addcmul(frames, frames, labels), 0, out=offsets[1:])
    return offsets


def rows_at(alignment: Alignment, offsets: Tensor, row: Tensor) -> Rows:
    """The rows whose indices are given: row [rows] int64 (>= N: invalid)."""
    valid = row < offsets[-1]
    row = torch.where(valid, row, 0)
    utterance = torch.searchsorted(offsets[1:], row, right=True)
    columns = alignment.target_lengths[utterance] + 1
    local = row - offsets[utterance]
    t, u = local // columns, local % columns
    labels = torch.nn.functional.pad(alignment.targets, (0, 1), value=-1)  # [B, U1]
    label = torch.where(u + 1 < columns, labels[utterance, u], -1)
    frame = utterance * alignment.frames + t
    state = utterance * alignment.columns + u
    return Rows(utterance, frame, state, label, valid)


def dense_mask(alignment: Alignment) -> Tensor:
    """[B, T, U1] bool: True at valid nodes."""
    device = alignment.targets.device
    frames = torch.arange(alignment.frames, device=device) < alignment.encoder_lengths[:, None]
    columns = torch.arange(alignment.columns, device=device) <= alignment.target_lengths[:, None]
    return frames[:, :, None] & columns[:, None, :]


def label_mask(alignment: Alignment) -> Tensor:
    """[B, T, U] bool: True where a valid node has a next label."""
    device = alignment.targets.device
    frames = torch.arange(alignment.frames, device=device) < alignment.encoder_lengths[:, None]
    labels = torch.arange(alignment.columns - 1, device=device) < alignment.target_lengths[:, None]
    return frames[:, :, None] & labels[:, None, :]


def dense_rows(alignment: Alignment) -> Tensor:
    """[B, T, U1] int64: row index of each valid node (elsewhere meaningless)."""
    device = alignment.targets.device
    t = torch.arange(alignment.frames, device=device)[None, :, None]
    u = torch.arange(alignment.columns, device=device)[None, None, :]
    return row_offsets(alignment)[:-1, None, None] + t * (alignment.target_lengths + 1)[:, None, None] + u
