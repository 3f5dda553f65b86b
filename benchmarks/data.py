"""Utterance lengths, and random batches of them.

    20s          audio of 20 s: lengths fall evenly from 100 % to 60 % over the batch, 5 labels a second
    librispeech  frames and labels as in LibriSpeech's train-clean-100, drawn with a fixed seed: quantiles interpolated
                 linearly (the outermost are the bounds), joined by a Gaussian copula

A mel frame is 10 ms.  Features and labels are random.  Before: nothing.  After: network.py, measure.py.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

DATA = ("20s", "librispeech")

SECONDS, SHORTEST = 20, 0.6
MEL_FRAMES_A_SECOND, LABELS_A_SECOND = 100, 5

# train-clean-100: encoder frames after 4x subsampling, and BPE-500 labels.
LEVELS = (0.01, 0.05, 0.25, 0.50, 0.75, 0.95, 0.99)
FRAMES_4X = (62, 105, 284, 343, 382, 432, 452)
LABELS = (12, 22, 57, 71, 83, 98, 109)
CORRELATION = 0.82
NORMAL_CORRELATION = 0.842  # of the normal numbers behind them: what gives the frames and labels theirs


class Batch(NamedTuple):
    """What one training step takes; frames and labels are the two lengths once more, on the host."""

    features: Tensor  # [B, F, mels]
    mask: Tensor  # [B, F] bool
    previous: Tensor  # [B, U1], the blank and then the targets
    targets: Tensor  # [B, U], the blank is V - 1
    encoder_lengths: Tensor  # [B]
    target_lengths: Tensor  # [B]
    frames: list[int]
    labels: list[int]

    @property
    def rows(self) -> int:
        """N, the valid lattice nodes."""
        return sum(t * (u + 1) for t, u in zip(self.frames, self.labels, strict=True))


def lengths(data: str, B: int, generator: torch.Generator, share: float = 1.0) -> tuple[Tensor, Tensor]:
    """Mel frames and labels of B utterances, [B] int64; share: of the lengths, for tests."""
    if data == "20s":
        seconds = share * SECONDS * torch.linspace(1.0, SHORTEST, B, dtype=torch.float64)
        mel, labels = MEL_FRAMES_A_SECOND * seconds, LABELS_A_SECOND * seconds
    else:
        first, other = torch.randn(2, B, generator=generator, dtype=torch.float64)
        second = NORMAL_CORRELATION * first + math.sqrt(1 - NORMAL_CORRELATION**2) * other
        mel = 4 * (share * _quantile(first, FRAMES_4X)).round()
        labels = share * _quantile(second, LABELS)
    return mel.round().long().clamp(min=1), labels.round().long()


def _quantile(normal: Tensor, values: tuple[int, ...]) -> Tensor:
    """Standard normal numbers as numbers with the quantiles `values` at LEVELS."""
    return torch.from_numpy(np.interp(torch.special.ndtr(normal).numpy(), LEVELS, values))


def make_batches(
    data: str,
    B: int,
    count: int,
    *,
    mels: int,
    V: int,
    frames_of: Callable[[Tensor], Tensor],
    device: str,
    share: float = 1.0,
    seed: int = 0,
) -> list[Batch]:
    """Batches padded to their longest utterance; frames_of: mel frames -> the encoder's frames."""
    generator = torch.Generator().manual_seed(seed)
    on_device = torch.Generator(device).manual_seed(seed)
    batches = []
    for _ in range(count):
        mel, labels = lengths(data, B, generator, share)
        frames = frames_of(mel).long()
        F, U = int(mel.max()), int(labels.max())
        targets = torch.randint(V - 1, (B, U), generator=on_device, device=device)
        batches.append(
            Batch(
                features=torch.randn(B, F, mels, generator=on_device, device=device),
                mask=(torch.arange(F) < mel[:, None]).to(device),
                previous=torch.nn.functional.pad(targets, (1, 0), value=V - 1),
                targets=targets,
                encoder_lengths=frames.to(device),
                target_lengths=labels.to(device),
                frames=frames.tolist(),
                labels=labels.tolist(),
            )
        )
    return batches
