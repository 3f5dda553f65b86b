"""The shapes that are measured, and random inputs of them.

Utterance lengths fall evenly from 100 % to `shortest` of T and of U alike.
Before: nothing.  After: steps.py, floor.py.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from rnnt.check import DTYPES

ENCODER_FEATURES = 512
PREDICTOR_FEATURES = 640


@dataclass(frozen=True)
class Shape:
    """Sizes of one measured step; `autocast`: float32 parameters, matrix products in `dtype`.

    scores: what multiplies the output layer's fresh weights, and so sharpens the posteriors as training does.
    """

    name: str
    B: int
    T: int
    U: int
    V: int
    H: int = 640
    shortest: float = 1.0
    dtype: str = "bfloat16"
    autocast: bool = False
    scores: float = 1.0

    def lengths(self) -> tuple[list[int], list[int]]:
        """Frames and labels of each utterance, the longest first."""
        share = torch.linspace(1.0, self.shortest, self.B, dtype=torch.float64)
        return (self.T * share).round().long().tolist(), (self.U * share).round().long().tolist()

    @property
    def rows(self) -> int:
        """N, the valid lattice nodes."""
        return sum(t * (u + 1) for t, u in zip(*self.lengths(), strict=True))

    @property
    def dense_bytes(self) -> int:
        """Size of the [B, T, U1, V] tensor."""
        return self.B * self.T * (self.U + 1) * self.V * DTYPES[self.dtype].itemsize

    def in_dtype(self, dtype: str) -> "Shape":
        return self if dtype == self.dtype else replace(self, name=f"{self.name}-{dtype}", dtype=dtype)

    def with_frames(self, T: int) -> "Shape":
        if T == self.T:
            return self
        size = f"-T{self.T}-"  # in names made of sizes
        name = self.name.replace(size, f"-T{T}-") if size in self.name else f"{self.name}-T{T}"
        return replace(self, name=name, T=T)


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("target", 32, 400, 128, 1024),
        Shape("target-1025", 32, 400, 128, 1025),
        Shape("ragged", 32, 400, 128, 1024, shortest=0.25),
        Shape("small", 16, 200, 50, 1024),
        Shape("long", 8, 1500, 300, 1024),
        Shape("bigvocab", 16, 250, 80, 8192),
        Shape("speech", 64, 250, 100, 1025, shortest=0.6, autocast=True),
        Shape("cpu", 4, 150, 30, 500, 256, dtype="float32"),
    )
}


def parse(text: str) -> Shape:
    """A name of SHAPES, or B,T,U,V,H."""
    if text in SHAPES:
        return SHAPES[text]
    try:
        sizes = [int(size) for size in text.split(",")]
    except ValueError:
        sizes = []
    if len(sizes) != 5 or min(sizes[:2] + sizes[3:]) < 1 or sizes[2] < 0:
        raise ValueError(f"expected B,T,U,V,H or one of {', '.join(SHAPES)}, got {text!r}")
    name = "-".join(f"{letter}{size}" for letter, size in zip("BTUVH", sizes, strict=True))
    B, T, U, V, H = sizes
    return Shape(name, B, T, U, V, H)


class Batch(NamedTuple):
    """The integer side of a step, and the states that the two projections take."""

    encoder: Tensor  # [B, T, ENCODER_FEATURES]
    predictor: Tensor  # [B, U1, PREDICTOR_FEATURES]
    targets: Tensor  # [B, U]
    encoder_lengths: Tensor  # [B]
    target_lengths: Tensor  # [B]


def make_batch(shape: Shape, device: str) -> Batch:
    """Standard normal states in the shape's dtype and uniform labels; the blank is V - 1."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device).to(DTYPES[shape.dtype])

    frames, labels = shape.lengths()
    return Batch(
        normal(shape.B, shape.T, ENCODER_FEATURES),
        normal(shape.B, shape.U + 1, PREDICTOR_FEATURES),
        torch.randint(max(shape.V - 1, 1), (shape.B, shape.U), generator=generator, device=device),
        torch.tensor(frames, device=device),
        torch.tensor(labels, device=device),
    )
