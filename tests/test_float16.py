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


@pytest.mark.parametrize("fastemit_lambda", [1.0, 30.0, 1000.0])
def test_fastemit_of_any_size(place, fastemit_lambda):
    batch, upstream = batch_at(place), torch.tensor([1.0, 0.5])
    options = {"blank": 0, "fastemit_lambda": fastemit_lambda}
    found = results(batch, upstream, backend=place.backend, **options)
    assert_budget(found, joint_budget(batch, upstream, **options))


@pytest.mark.parametrize("tile_rows", [64, None])
def test_sum_over_a_tile_beyond_the_range(place, tile_rows):
    """60 frames of 3000 are 180000; it is the mean that has to fit."""
    T, U, V, H = 60, 0, 5, 8
    batch = Joint(
        torch.full((1, T, H), 3000.0), torch.zeros(1, 1, H), torch.zeros(V, H), torch.zeros(V),
        torch.zeros(1, U, dtype=torch.int64), torch.tensor([T]), torch.tensor([U]),
    ).cast(torch.float16, place.device)  # fmt: skip
    upstream, options = torch.tensor([1 / T]), {"blank": 0, "activation": "relu"}
    found = results(batch, upstream, backend=place.backend, tile_rows=tile_rows, **options)
    assert_budget(found, joint_budget(batch, upstream, **options))


@pytest.mark.parametrize("tile_rows", [7, "auto"])
def test_gradient_of_an_improbable_class(place, tile_rows):
    """One of probability 1e-7 or so has a gradient of that size, which a loss scale brings into float16's range."""
    batch = batch_at(place)
    rare = 6
    batch.linear_bias[rare] = -16
    assert not (batch.targets == rare).any()
    upstream, options = torch.full((2,), 65536.0), {"blank": 0, "occupancy_threshold": 0.0}

    def own(backend: str, batch: Joint, **tiling: object) -> dict[str, torch.Tensor]:
        # float32 parameters under autocast: results beyond float16's range are no matter
        with torch.autocast(batch.encoder.device.type, torch.float16, enabled=batch.encoder.dtype != torch.float64):
            wide = batch if batch.encoder.dtype == torch.float64 else batch.cast(torch.float32)
            found = results(wide, upstream, backend=backend, **options, **tiling)
        return {name: found[f"d_linear_{name}"][rare] for name in ("weight", "bias")}

    assert_budget(own(place.backend, batch, tile_rows=tile_rows), budget_of(batch, lambda x: own("reference", x)))
