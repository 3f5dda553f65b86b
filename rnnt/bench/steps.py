"""What is timed: the three passes of one training step.

    forward    joint_rnnt_loss on projected states that require gradients
    backward   the backward pass of the same
    both       forward and backward, with the two projections and their gradients

Parameters are PyTorch's fresh nn.Linear layers.  Before: shapes.py.  After: measure.py, tests/benchmarks.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

import rnnt
from rnnt.bench.machine import synchronize
from rnnt.bench.shapes import ENCODER_FEATURES, PREDICTOR_FEATURES, Shape, make_batch
from rnnt.check import DTYPES

PASSES = ("forward", "backward", "both")


class Settings(NamedTuple):
    """How the loss is called."""

    backend: str
    tile_rows: int | str | None
    activation: str = "relu"
    dropout_p: float = 0.0
    validate: bool = True

    @property
    def tiles(self) -> str:
        if self.backend == "reference":
            return "-"
        if self.tile_rows is None:
            return "untiled"
        return "tiled" if self.tile_rows == "auto" else str(self.tile_rows)


def autocast(shape: Shape, device: str) -> AbstractContextManager[None]:
    return torch.autocast(device, DTYPES[shape.dtype], enabled=shape.autocast)


class Step:
    """Layers, inputs, and the passes over them; checked: the loss has been compared with the reference."""

    def __init__(self, shape: Shape, settings: Settings, device: str, checked: bool = False) -> None:
        self.shape, self.settings, self.device, self.checked = shape, settings, device, checked
        torch.manual_seed(0)
        linear = partial(torch.nn.Linear, device=device, dtype=torch.float32 if shape.autocast else DTYPES[shape.dtype])
        self.encoder_projection = linear(ENCODER_FEATURES, shape.H)
        self.predictor_projection = linear(PREDICTOR_FEATURES, shape.H)
        self.output = linear(shape.H, shape.V)
        encoder, predictor, *self.integers = make_batch(shape, device)
        self.states = [encoder.requires_grad_(), predictor.requires_grad_()]
        self.projected = [x.detach().requires_grad_() for x in self.project()]  # [B, T, H], [B, U1, H]

    def project(self) -> tuple[Tensor, Tensor]:
        encoder, predictor = self.states
        with autocast(self.shape, self.device):
            return self.encoder_projection(encoder), self.predictor_projection(predictor)

    def loss(self, encoder: Tensor, predictor: Tensor) -> Tensor:
        """Mean loss of projected states."""
        targets, encoder_lengths, target_lengths = self.integers
        with autocast(self.shape, self.device):
            return rnnt.joint_rnnt_loss(
                encoder,
                predictor,
                self.output.weight,
                targets,
                encoder_lengths,
                target_lengths,
                linear_bias=self.output.bias,
                **self.settings._asdict(),
            )

    def forward(self) -> Tensor:
        return self.loss(*self.projected)

    def both(self) -> None:
        self.loss(*self.project()).backward()

    def leaves(self, which: str) -> list[Tensor]:
        """Everything that has a gradient after the pass "backward" or "both"."""
        layers = [self.output]
        if which == "both":
            layers += [self.encoder_projection, self.predictor_projection]
        parameters = [x for layer in layers for x in layer.parameters()]
        return parameters + (self.states if which == "both" else self.projected)

    def prepare(self, which: str, hold_gradients: bool = False) -> Callable[[], None]:
        """The pass as a call that waits for the device; what comes before the pass is done here.

        hold_gradients: where the pass will add its gradients there are zeros, so that they do not count as its memory.
        """
        for x in self.leaves("both") + self.projected:
            x.grad = None
        for x in self.leaves(which) if hold_gradients else []:
            x.grad = torch.zeros_like(x)
        work: Callable[[], object] = {"forward": self.forward, "both": self.both}.get(which) or self.forward().backward
        synchronize(self.device)

        def call() -> None:
            work()
            synchronize(self.device)

        return call
