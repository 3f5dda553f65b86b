"""What is timed: the three passes of one training step.

    forward    joint_rnnt_loss on projected states that require gradients
    backward   the backward pass of the same
    both       forward and backward, with the two projections and their gradients

Parameters are PyTorch's fresh nn.Linear layers.  Before: shapes.py.  After: correctness.py, test_loss.py.
"""

from contextlib import AbstractContextManager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

import rnnt
from tests.benchmarks.shapes import DTYPES, ENCODER_FEATURES, PREDICTOR_FEATURES, Shape, make_batch


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
        return {"auto": "tiled", None: "untiled"}.get(self.tile_rows) or str(self.tile_rows)


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

    def clear_gradients(self) -> None:
        for x in self.leaves("both") + self.projected:
            x.grad = None

    def hold_gradients(self, which: str) -> None:
        """Zero gradients where the pass will add its own, so that these do not count as memory of the pass."""
        self.clear_gradients()
        for x in self.leaves(which):
            x.grad = torch.zeros_like(x)
