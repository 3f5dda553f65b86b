"""occupancy_threshold: which rows the backward pass leaves out, and how much a gradient can lose by it.

A row whose occupancy (blank arc + label arc) is w has a logit gradient of at most w an entry and 2 w in sum, so that
with `dropped` the sum over an utterance's rows below the threshold

    |change of d_linear_bias[v]|      <=  sum over utterances of |upstream| dropped
    |change of d_linear_weight[v, h]| <=  the same, since |tanh| <= 1
    |change of d_encoder[b]| summed over t, at any h  <=  |upstream| 2 dropped max |linear_weight|; d_predictor too
"""

import pytest
import torch

import rnnt
from rnnt.problem import OCCUPANCY_THRESHOLD
from tests.support import (
    Joint,
    assert_budget,
    assert_same_bits,
    budget_of,
    joint_budget,
    named_dtypes,
    ragged,
    results,
    upstream_of,
)

GRADIENTS = ("d_encoder", "d_predictor", "d_linear_weight", "d_linear_bias")
THRESHOLDS = [1e-3, 3e-2, 0.3]


def batch_at(place) -> Joint:
    return ragged(4, 12, 6, 5, 6, blank=0).cast(place.finest, place.device)


def occupancies(batch: Joint) -> torch.Tensor:
    """[B, T, U1] in float64: minus the gradient of the loss at the two planes."""
    batch = batch.cast(torch.float64).on(batch.encoder.device.type)
    planes = rnnt.joint_log_probs(*batch[:3], *batch[4:], linear_bias=batch.linear_bias, blank=0, backend="reference")
    blank, label = (x.detach().requires_grad_() for x in planes)
    rnnt.rnnt_loss_from_log_probs(blank, label, *batch[5:], reduction="sum", backend="reference").backward()
    return -(blank.grad + torch.nn.functional.pad(label.grad, (0, 1)))


@pytest.mark.parametrize("threshold", THRESHOLDS)
@pytest.mark.parametrize("tile_rows", [7, None])
def test_loss_of_gradient_is_bounded(place, tile_rows, threshold):
    batch = batch_at(place)
    upstream = upstream_of(batch).to(place.device)
    occupancy = occupancies(batch)
    dropped = torch.where(occupancy < threshold, occupancy, 0).sum(dim=(1, 2))  # [B]
    assert dropped.max() > 0
    options = {"backend": place.backend, "blank": 0, "tile_rows": tile_rows}
    exact = results(batch, upstream, occupancy_threshold=0, **options)
    found = results(batch, upstream, occupancy_threshold=threshold, **options)
    assert torch.equal(found["loss"], exact["loss"])
    change = {name: (found[name].double() - exact[name].double()).abs() for name in GRADIENTS}
    assert all(x.any() for x in change.values())
    rounding = 8 * torch.finfo(place.finest).eps * max(exact[name].abs().max().double() for name in GRADIENTS)
    total = (upstream.abs() * dropped).sum() + rounding
    assert change["d_linear_bias"].max() <= total
    assert change["d_linear_weight"].max() <= total
    each = 2 * upstream.abs() * dropped * batch.linear_weight.abs().max().double() + rounding
    for name in ("d_encoder", "d_predictor"):
        assert (change[name].sum(dim=1) <= each[:, None]).all(), name


@pytest.mark.parametrize("threshold", THRESHOLDS)
def test_every_backend_drops_the_same_rows(place, threshold):
    batch = batch_at(place)
    near = (occupancies(batch) / threshold - 1).abs().min()
    assert near > 1e-5  # no row so near the threshold that rounding decides
    upstream = upstream_of(batch)

    def run(x, backend="reference"):
        return results(x, upstream, backend=backend, blank=0, occupancy_threshold=threshold)

    assert_budget(run(batch, place.backend), budget_of(batch, run))


def test_zero_drops_nothing(place):
    batch = batch_at(place)
    upstream = upstream_of(batch)
    found = results(batch, upstream, backend=place.backend, blank=0, tile_rows=7, occupancy_threshold=0.0)
    assert_budget(found, joint_budget(batch, upstream, blank=0, occupancy_threshold=0.0))


def test_loss_scale_is_no_matter(place):
    """The threshold compares with the occupancy alone: a power of two in the upstream gradient passes through."""
    batch = batch_at(place)
    upstream = upstream_of(batch)
    options = {"backend": place.backend, "blank": 0, "tile_rows": 7, "occupancy_threshold": 0.03}
    found = results(batch, upstream, **options)
    scaled = results(batch, upstream * 2.0**-20, **options)
    assert_same_bits({name: scaled[name] * 2.0**20 for name in GRADIENTS}, {name: found[name] for name in GRADIENTS})


def test_fastemit_does_not_move_the_threshold(place):
    batch = batch_at(place)

    def run(x, backend="reference"):
        return results(x, backend=backend, blank=0, occupancy_threshold=0.03, fastemit_lambda=0.5)

    assert_budget(run(batch, place.backend), budget_of(batch, run))


def test_everything_dropped_leaves_zeros(place):
    """One label among many frames: no single row is sure; with a threshold above all, every gradient is 0."""
    batch = Joint(
        torch.zeros(1, 8, 6), torch.zeros(1, 2, 6), torch.zeros(5, 6), torch.zeros(5),
        torch.tensor([[1]]), torch.tensor([8]), torch.tensor([1]),
    ).cast(place.finest, place.device)  # fmt: skip
    found = results(batch, backend=place.backend, blank=0, occupancy_threshold=0.9999)
    # The two corner rows are passed by every alignment; every other row has less than one.
    assert found["d_encoder"].shape == (1, 8, 6)
    assert all(x.isfinite().all() for x in found.values())
    kept = found["d_linear_bias"].double().sum().abs()
    assert kept <= 8 * torch.finfo(place.finest).eps


@pytest.mark.parametrize("dtype", named_dtypes("bf16", "fp16", "fp32"))
def test_automatic_threshold_is_below_the_rounding(dtype):
    """In exact arithmetic, what "auto" drops changes no gradient by more than half a unit of the dtype."""
    batch = ragged(3, 60, 20, 40, 16)
    exact = results(batch, backend="reference", occupancy_threshold=0)
    found = results(batch, backend="reference", occupancy_threshold=OCCUPANCY_THRESHOLD[dtype])
    for name in GRADIENTS:
        change = (found[name] - exact[name]).abs().max() / exact[name].abs().max()
        assert 0 < change <= torch.finfo(dtype).eps / 2, name


def test_automatic_threshold_is_zero_in_float64():
    batch = ragged(3, 20, 10, 5, 6)
    found = results(batch, backend="reference")
    assert_same_bits(found, results(batch, backend="reference", occupancy_threshold=0))
