"""RNNTJointLoss inside DistributedDataParallel, on two processes of this machine.

The parameters belong to a module whose forward runs inside the wrapper, so that their gradients are averaged; and the
recompute of tiles hands each parameter one gradient a step, so that the reducer sees it ready once.
"""

from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import rnnt
from tests.support import places, ragged

RANKS = 2
TILE_ROWS = 1  # a tile for every row


class Model(nn.Module):
    def __init__(self, backend: str) -> None:
        super().__init__()
        self.encoder = nn.Linear(6, 6)
        self.loss = rnnt.RNNTJointLoss(
            6, 5, encoder_features=6, predictor_features=6, backend=backend, tile_rows=TILE_ROWS, reduction="sum"
        )

    def forward(self, batch: list[torch.Tensor]) -> torch.Tensor:
        encoder, predictor, targets, encoder_lengths, target_lengths = batch
        return self.loss(self.encoder(encoder), predictor, targets, encoder_lengths, target_lengths)


def model(backend: str) -> Model:
    torch.manual_seed(0)
    return Model(backend)


def batch_of(rank: int, step: int) -> list[torch.Tensor]:
    """Other lengths and numbers on each rank and at each step."""
    batch = ragged(2 + rank, 4 + step, 3, 5, 6, seed=10 * rank + step).cast(torch.float32)
    return [*batch[:2], *batch[4:]]


def train(rank: int, folder: str, backend: str) -> None:
    """One process: gradients after a step, after two accumulated ones, each with static_graph off and on."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS, timeout=timedelta(seconds=120)
    )
    found = {}
    for static_graph in (False, True):
        wrapped = DistributedDataParallel(model(backend), static_graph=static_graph)
        wrapped(batch_of(rank, 0)).backward()
        found[f"step-{static_graph}"] = {name: x.grad.clone() for name, x in wrapped.module.named_parameters()}
        wrapped.zero_grad()
        with wrapped.no_sync():
            wrapped(batch_of(rank, 1)).backward()
        wrapped(batch_of(rank, 2)).backward()
        found[f"accumulated-{static_graph}"] = {name: x.grad.clone() for name, x in wrapped.module.named_parameters()}
    torch.save(found, f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


def average_gradients(steps: list[int]) -> dict[str, torch.Tensor]:
    """What the ranks should agree on, from one process: the mean over ranks of the sum over steps."""
    alone = model("reference")
    for step in steps:
        for rank in range(RANKS):
            (alone(batch_of(rank, step)) / RANKS).backward()
    return {name: x.grad for name, x in alone.named_parameters()}


ON_CPU = [param for param in places() if param.values[0].device == "cpu" and not param.values[0].interpreted]


@pytest.mark.parametrize("place", ON_CPU)
def test_gradients_are_averaged_once(place, tmp_path: Path):
    torch.multiprocessing.spawn(train, (str(tmp_path), place.backend), RANKS)
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(RANKS)]
    assert len(ranks[0]) == 4
    for scenario, gradients in ranks[0].items():
        expected = average_gradients([0] if scenario.startswith("step") else [1, 2])
        for name, gradient in gradients.items():
            assert torch.equal(gradient, ranks[1][scenario][name]), f"{scenario} {name}: ranks differ"
            # float32 sums in another order
            tolerance = 16 * torch.finfo(torch.float32).eps * expected[name].abs().max()
            assert (gradient - expected[name]).abs().max() <= tolerance, f"{scenario} {name}"
