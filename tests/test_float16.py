"""float16 has five bits of exponent: gradients keep their digits whatever the losses weigh, and none is inf."""

import pytest
import torch

import rnnt
from tests.support import Joint, assert_budget, budget_of, joint_budget, ragged, results, with_gradients

WEIGHTS = [(1e3, 1.0), (4e3, 0.04)]  # of two utterances


def batch_at(place, scale: float = 1.0) -> Joint:
    return ragged(2, 8, 3, 7, 16, blank=0, scale=scale).cast(torch.float16, place.device)


def by_utterance(found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What belongs to one utterance on its own, so that each is held to its own scale."""
    own = {f"{name}[{b}]": found[name][b] for name in ("d_encoder", "d_predictor") for b in range(2)}
    return own | {name: found[name] for name in ("d_linear_weight", "d_linear_bias")}


@pytest.mark.parametrize("tile_rows", ["auto", None], ids=["tiled", "untiled"])
@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
def test_an_utterance_of_little_weight(place, weights, tile_rows):
    batch, upstream = batch_at(place), torch.tensor(weights)
    budget = budget_of(batch, lambda x: by_utterance(results(x, upstream, blank=0, backend="reference")))
    found = results(batch, upstream, blank=0, backend=place.backend, tile_rows=tile_rows)
    assert_budget(by_utterance(found), budget)


def planes_results(batch: Joint, weights: tuple[float, float], backend: str) -> dict[str, torch.Tensor]:
    """Gradients of the sum of the planes' losses, weighted."""
    leaves = with_gradients(batch)
    blank, label = rnnt.joint_log_probs(
        *leaves[:3], *leaves[4:], linear_bias=leaves.linear_bias, blank=0, backend=backend
    )
    loss = rnnt.rnnt_loss_from_log_probs(blank, label, *batch[5:], reduction="none", backend=backend)
    (loss[0] * weights[0] + loss[1] * weights[1]).backward()
    return by_utterance({f"d_{name}": x.grad for name, x in leaves.floats().items()})


@pytest.mark.parametrize("weights", [(1e3, 1e3), *WEIGHTS], ids=str)
def test_planes_of_any_scale(place, weights):
    """The planes' gradients, not the losses', are all that joint_log_probs sees of a loss's scale."""
    batch = batch_at(place)
    assert_budget(
        planes_results(batch, weights, place.backend),
        budget_of(batch, lambda x: planes_results(x, weights, "reference")),
    )


@pytest.mark.parametrize("scale", [1e-3, 30.0, 1e3])
def test_weights_of_any_size(place, scale):
    """Gradients of hidden states are as large as the weights."""
    batch, upstream = batch_at(place, scale), torch.tensor([1.0, 0.5])
    found = results(batch, upstream, blank=0, backend=place.backend)
    assert_budget(found, joint_budget(batch, upstream, blank=0))
