"""debug.occupancy_report, and the bound it stands on, against every path's enumeration in float64.

With w a node's occupancy, g its gradient at the logits, and D the sum of w over an utterance's nodes left out:

    |g| <= 2 w in L1 norm, max |g| <= w     so that the gradient at the logits loses at most 2 D, and
    d_linear_bias loses at most D an entry and 2 D in L1 norm,   d_linear_weight D max |hidden| an entry
"""

import numpy as np
import pytest
import torch

from rnnt import debug
from rnnt.problem import OCCUPANCY_THRESHOLD
from tests import oracle
from tests.support import Joint, named_dtypes, ragged, results

BLANK = 0
SCALES = [pytest.param(1.0, id="random"), pytest.param(12.0, id="sharp")]
THRESHOLDS = [1e-3, 3e-2, 0.3]


def batch_of(scale: float) -> Joint:
    """Lattices of at most 6 x 5 nodes, 126 paths; scale: of the output layer."""
    return ragged(4, 6, 4, 7, 5, blank=BLANK, scale=scale, seed=3)


def enumerated(batch: Joint) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """hidden [B, T, U1, H], occupancy [B, T, U1], and each loss's own gradient at the logits [B, T, U1, V]."""
    encoder, predictor, weight, bias, targets, frames, labels = (x.numpy() for x in batch)
    hidden = np.tanh(encoder[:, :, None] + predictor[:, None])
    logits = hidden @ weight.T + bias
    _, gradient = oracle.loss_of_logits(logits, targets, frames, labels, blank=BLANK)
    occupancy = np.zeros(logits.shape[:3])
    for b, (T, U) in enumerate(zip(frames, labels, strict=True)):
        logp = oracle.log_softmax(logits[b, :T, : U + 1])
        found = oracle.lattice(logp[:, :, BLANK], logp[:, np.arange(U), targets[b, :U]])
        occupancy[b, :T, : U + 1] += found.blank
        occupancy[b, :T, :U] += found.label
    return hidden, occupancy, gradient


def report_of(batch: Joint, **options) -> debug.OccupancyReport:
    return debug.occupancy_report(*batch[:3], *batch[4:], linear_bias=batch.linear_bias, blank=BLANK, **options)


def l1(x: np.ndarray) -> np.ndarray:
    """[B, ...] -> [B]"""
    return np.abs(x).reshape(len(x), -1).sum(axis=1)


@pytest.mark.parametrize("threshold", THRESHOLDS)
@pytest.mark.parametrize("scale", SCALES)
def test_bound_of_what_is_left_out(scale, threshold):
    _, occupancy, gradient = enumerated(batch_of(scale))
    rounding = 1e-14
    assert (np.abs(gradient).sum(axis=-1) <= 2 * occupancy + rounding).all()
    assert (np.abs(gradient).max(axis=-1) <= occupancy + rounding).all()
    left_out = np.where(occupancy < threshold, occupancy, 0)
    lost = gradient * (occupancy < threshold)[..., None]
    assert l1(left_out).max() > 0
    assert (l1(lost) <= 2 * l1(left_out) + rounding).all()


@pytest.mark.parametrize("threshold", THRESHOLDS)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("backend", [pytest.param(x, marks=getattr(pytest.mark, x)) for x in ("reference", "compiled")])
def test_gradients_stay_within_the_bound(backend, scale, threshold):
    """A backend's gradients lose just the nodes below the threshold, utterance by utterance."""
    batch = batch_of(scale)
    hidden, occupancy, gradient = enumerated(batch)
    for b in range(len(batch.targets)):
        upstream = torch.zeros(len(batch.targets), dtype=torch.float64)
        upstream[b] = 1
        options = {"backend": backend, "blank": BLANK, "tile_rows": 32}
        exact = results(batch, upstream, occupancy_threshold=0, **options)
        found = results(batch, upstream, occupancy_threshold=threshold, **options)
        change = {name: (exact[name] - found[name]).numpy() for name in ("d_linear_bias", "d_linear_weight")}
        lost = gradient[b] * (occupancy[b] < threshold)[..., None]  # [T, U1, V]
        np.testing.assert_allclose(change["d_linear_bias"], lost.sum(axis=(0, 1)), rtol=0, atol=1e-12)
        weight = np.einsum("tuv,tuh->vh", lost, hidden[b])
        np.testing.assert_allclose(change["d_linear_weight"], weight, rtol=0, atol=1e-12)
        left_out = np.where(occupancy[b] < threshold, occupancy[b], 0).sum() + 1e-13
        assert np.abs(change["d_linear_bias"]).sum() <= 2 * left_out
        assert np.abs(change["d_linear_bias"]).max() <= left_out
        assert np.abs(change["d_linear_weight"]).max() <= left_out * np.abs(hidden[b]).max()


@pytest.mark.parametrize("threshold", [0, *THRESHOLDS])
@pytest.mark.parametrize("scale", SCALES)
def test_report(place, scale, threshold):
    batch = batch_of(scale).cast(place.finest, place.device)
    _, occupancy, gradient = enumerated(batch.cast(torch.float64, "cpu"))
    left_out = occupancy < threshold
    assert threshold == 0 or np.abs(occupancy / threshold - 1).min() > 1e-4  # rounding decides nothing
    rows = int((batch.encoder_lengths * (batch.target_lengths + 1)).sum())
    padded = occupancy.size - rows  # never passed
    found = report_of(batch, backend=place.backend, occupancy_threshold=threshold)
    assert (found.threshold, found.rows) == (threshold, rows)
    assert found.live_rows == rows - (left_out.sum() - padded if threshold > 0 else 0)
    assert found.live_share == found.live_rows / rows
    tolerance = {"rel": 1e-4, "abs": 1e-6} if place.finest == torch.float32 else {"rel": 1e-9, "abs": 1e-14}
    total = float((batch.encoder_lengths + batch.target_lengths).sum())  # a path has T + U arcs
    assert found.dropped_mass == pytest.approx(occupancy[left_out].sum() / total, **tolerance)
    expected = np.abs(gradient[left_out]).sum() / np.abs(gradient).sum()
    assert found.gradient_error == pytest.approx(expected, **tolerance)
    bound = 2 * found.dropped_mass * total / np.abs(gradient).sum()
    assert found.gradient_error <= bound * (1 + 1e-6)


def test_padding_and_the_inputs_are_left_alone(place):
    batch = batch_of(1.0).cast(place.finest, place.device)
    options = {"backend": place.backend, "occupancy_threshold": 0.03}
    expected = report_of(batch, **options)
    encoder, predictor, targets = batch.encoder.clone(), batch.predictor.clone(), batch.targets.clone()
    for b, (T, U) in enumerate(zip(batch.encoder_lengths.tolist(), batch.target_lengths.tolist(), strict=True)):
        encoder[b, T:], predictor[b, U + 1 :], targets[b, U:] = torch.nan, torch.nan, -100
    padded = batch._replace(encoder=encoder.requires_grad_(), predictor=predictor, targets=targets)
    assert report_of(padded, **options) == expected
    assert encoder.grad is None


@pytest.mark.parametrize("clamp", [1e-2, 1e-4])
def test_clamp_is_within_the_bound(clamp):
    """Relative to a clamped gradient, what is left out weighs more; the report says at most how much."""
    batch = batch_of(1.0)
    encoder, predictor, weight, bias, targets, frames, labels = (x.numpy() for x in batch)
    _, occupancy, _ = enumerated(batch)
    logits = np.tanh(encoder[:, :, None] + predictor[:, None]) @ weight.T + bias
    _, clamped = oracle.loss_of_logits(logits, targets, frames, labels, blank=BLANK, clamp=clamp)
    for threshold in THRESHOLDS:
        found = report_of(batch, backend="reference", clamp=clamp, occupancy_threshold=threshold)
        exact = np.abs(clamped[occupancy < threshold]).sum() / np.abs(clamped).sum()
        assert 0 < exact <= found.gradient_error
    automatic = report_of(batch.cast(torch.float32), backend="reference", clamp=clamp)
    assert automatic.threshold == pytest.approx(1e-8 * clamp)


@pytest.mark.parametrize("dtype", named_dtypes("fp64", "fp32", "fp16", "bf16"))
def test_automatic_threshold_is_that_of_the_loss(dtype):
    batch = ragged(3, 60, 20, 40, 16, blank=BLANK).cast(dtype)
    found = report_of(batch, backend="reference")
    assert found.threshold == OCCUPANCY_THRESHOLD[dtype]
    assert found.dropped_mass <= torch.finfo(dtype).eps / 2
    assert found.gradient_error <= torch.finfo(dtype).eps / 2
    assert (found.live_rows == found.rows) == (dtype == torch.float64)


def test_autocast_decides_as_in_the_loss():
    with torch.autocast("cpu", torch.bfloat16):
        found = report_of(batch_of(1.0).cast(torch.float32), backend="reference")
    assert found.threshold == OCCUPANCY_THRESHOLD[torch.bfloat16]


def test_text():
    found = debug.OccupancyReport(1e-4, 206400, 61203, 1.2e-5, 1.1e-5)
    assert str(found) == (
        "occupancy_threshold=0.0001: 61,203 of 206,400 rows are live (29.7%)\n"
        "occupancy left out: 1.2e-05 of all\n"
        "gradient at the logits: 1.1e-05 of its L1 norm lost"
    )


def test_empty_batch():
    batch = Joint(
        torch.zeros(0, 4, 6), torch.zeros(0, 3, 6), torch.zeros(5, 6), None,
        torch.zeros(0, 2, dtype=torch.int64), torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64),
    )  # fmt: skip
    found = report_of(batch, backend="reference")
    assert (found.rows, found.live_rows, found.live_share) == (0, 0, 0)
    assert (found.dropped_mass, found.gradient_error) == (0, 0)


def test_errors_are_those_of_the_loss():
    with pytest.raises(ValueError, match=r"occupancy_threshold: expected a number in \[0, 1\) or 'auto', got 1"):
        report_of(batch_of(1.0), occupancy_threshold=1.0)
    with pytest.raises(ValueError, match="predictor: expected H = 5, got 6"):
        report_of(batch_of(1.0)._replace(predictor=torch.zeros(4, 5, 6)))
