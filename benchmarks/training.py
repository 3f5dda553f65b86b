"""A training step: forward, backward and fused AdamW, float32 parameters, bfloat16 autocast.

Before: network.py.  After: measure.py.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.data import Batch, make_batches
from benchmarks.losses import Loss
from benchmarks.network import FULL, Sizes, Transducer
from rnnt.check import DTYPES

LEARNING_RATE = 1e-4


@dataclass(frozen=True)
class Setup:
    """What all losses of a run have in common; dtype: autocast's, float32 for none."""

    device: str
    dtype: str = "bfloat16"
    sizes: Sizes = FULL
    batches: int = 3
    seed: int = 0
    validate: bool = True


class Training:
    """Model and optimiser, the same at the start for every loss."""

    def __init__(self, loss: Loss, setup: Setup) -> None:
        self.setup = setup
        torch.manual_seed(setup.seed)
        with torch.device(setup.device):
            self.model = Transducer(setup.sizes, loss, setup.validate).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, fused=True)

    @property
    def parameters(self) -> int:
        return sum(x.numel() for x in self.model.parameters())

    def make_batches(self, data: str, B: int) -> list[Batch]:
        setup, sizes = self.setup, self.setup.sizes
        return make_batches(
            data,
            B,
            setup.batches,
            mels=sizes.mels,
            V=sizes.V,
            frames_of=self.model.encoder_lengths,
            device=setup.device,
            share=sizes.share,
            seed=setup.seed,
        )

    def loss(self, batch: Batch) -> Tensor:
        setup = self.setup
        with torch.autocast(setup.device, DTYPES[setup.dtype], enabled=setup.dtype != "float32"):
            loss: Tensor = self.model(batch)
        return loss

    def step(self, batch: Batch) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.loss(batch)
        loss.backward()
        self.optimizer.step()
        return loss.detach()
