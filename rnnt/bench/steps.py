"""What is timed: the three passes of one training step.

    forward    joint_rnnt_loss on projected states that require gradients
    backward   the backward pass of the same
    both       forward and backward, with the two projections and their gradients

Parameters are PyTorch's fresh nn.Linear layers, the output layer's weights times the shape's `scores`.  Of a step in a
CUDA graph, "both" is a replay, and the only pass.  Before: shapes.py.  After: measure.py, tests/benchmarks.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

import rnnt
from rnnt.bench.machine import synchronize
from rnnt.bench.shapes import ENCODER_FEATURES, PREDICTOR_FEATURES, Shape, make_batch
from rnnt.check import DTYPES

PASSES = ("forward", "backward", "both")
CAPTURE_WARMUPS = 3


class Settings(NamedTuple):
    """How the loss is called; graph: the step is captured once in a CUDA graph, which needs validate=False."""

    backend: str
    tile_rows: int | str | None
    activation: str = "relu"
    dropout_p: float = 0.0
    validate: bool = True
    occupancy_threshold: float | str = "auto"
    graph: bool = False

    @property
    def passes(self) -> tuple[str, ...]:
        return ("both",) if self.graph else PASSES

    @property
    def tiles(self) -> str:
        names: dict[int | str | None, str] = {"auto": "tiled", None: "untiled"}
        tiling = "-" if self.backend == "reference" else names.get(self.tile_rows, str(self.tile_rows))
        return f"{tiling}, graph" if self.graph else tiling

    def arguments(self) -> dict[str, Any]:
        """Of the loss."""
        return {name: value for name, value in self._asdict().items() if name != "graph"}


def autocast(shape: Shape, device: str) -> AbstractContextManager[None]:
    return torch.autocast(device, DTYPES[shape.dtype], enabled=shape.autocast)


def captured(work: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A graph of one call, after calls on a stream of their own, which compile the kernels."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(CAPTURE_WARMUPS):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


class Step:
    """Layers, inputs, and the passes over them; checked: the loss has been compared with the reference."""

    def __init__(self, shape: Shape, settings: Settings, device: str, checked: bool = False) -> None:
        self.shape, self.settings, self.device, self.checked = shape, settings, device, checked
        torch.manual_seed(0)
        linear = partial(torch.nn.Linear, device=device, dtype=torch.float32 if shape.autocast else DTYPES[shape.dtype])
        self.encoder_projection = linear(ENCODER_FEATURES, shape.H)
        self.predictor_projection = linear(PREDICTOR_FEATURES, shape.H)
        self.output = linear(shape.H, shape.V)
        self.output.weight.data.mul_(shape.scores)
        encoder, predictor, *self.integers = make_batch(shape, device)
        self.states = [encoder.requires_grad_(), predictor.requires_grad_()]
        self.projected = [x.detach().requires_grad_() for x in self.project()]  # [B, T, H], [B, U1, H]
        self.graph: torch.cuda.CUDAGraph | None = None

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
                **self.settings.arguments(),
            )

    def forward(self) -> Tensor:
        return self.loss(*self.projected)

    def both(self) -> None:
        self.loss(*self.project()).backward()

    def gradients(self) -> tuple[Tensor, ...]:
        """As `both`, for a graph: the gradients are results, and nothing is added up from replay to replay."""
        return torch.autograd.grad(self.loss(*self.project()), self.leaves("both"))

    def capture(self) -> torch.cuda.CUDAGraph:
        """Forward and backward as a graph, in place of one captured before."""
        self.graph = None  # its memory goes first
        self.graph = captured(self.gradients)
        return self.graph

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
        work: Callable[[], object]
        if self.settings.graph:
            work = (self.graph or self.capture()).replay
        else:
            work = {"forward": self.forward, "both": self.both}.get(which) or self.forward().backward
        synchronize(self.device)

        def call() -> None:
            work()
            synchronize(self.device)

        return call
