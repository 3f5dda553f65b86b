"""An utterance none of whose alignments is possible has loss inf and gradient 0, and leaves the others alone."""

import pytest
import torch

import rnnt
from tests.fixtures import FRAMES_P, LABELS_P, P, s_p
from tests.support import (
    Joint,
    assert_budget,
    assert_same_bits,
    joint_budget,
    joint_loss,
    logits_budget,
    logits_results,
    ragged,
    results,
    upstream_of,
    with_gradients,
)


def forbid_last_blank(logits: torch.Tensor) -> torch.Tensor:
    """Every path of utterance 1 (two frames, one label) ends with this arc."""
    logits = logits.clone()
    logits[1, 1, 1, 0] = -torch.inf
    return logits


@pytest.mark.parametrize("options", [{}, {"clamp": 0.05}, {"fastemit_lambda": 0.1}], ids=["plain", "clamp", "fastemit"])
@pytest.mark.parametrize("fused", [True, False], ids=["logits", "log-probs"])
def test_logits(place, fused, options):
    logits = s_p().to(place.device, place.finest)
    logits = logits if fused else logits.log_softmax(-1)
    options = {"blank": 0, "fused_log_softmax": fused, "backend": place.backend, **options}
    found = logits_results(forbid_last_blank(logits), *P, **options)
    usual = logits_results(logits, *P, **options)
    assert found["loss"][1] == torch.inf
    assert not found["d_logits"][1].any()
    assert found["loss"][0] == usual["loss"][0]
    assert torch.equal(found["d_logits"][0], usual["d_logits"][0])


def test_planes(place):
    logp = s_p().to(place.device, place.finest).log_softmax(-1)
    blank, label = logp[..., 0].clone(), logp[:, :, :-1, 1].clone()
    label[1, :, 0] = -torch.inf
    blank.requires_grad_()
    label.requires_grad_()
    lengths = FRAMES_P.to(place.device), LABELS_P.to(place.device)
    loss = rnnt.rnnt_loss_from_log_probs(blank, label, *lengths, reduction="none", backend=place.backend)
    loss.sum().backward()
    assert loss[1] == torch.inf
    assert loss[0].isfinite()
    for x in (blank, label):
        assert not x.grad[1].any()
        assert x.grad[0].any()
        assert x.grad.isfinite().all()


def test_some_arcs_forbidden(place):
    """Arcs of probability 0 close some paths; the rest carries the loss and gradients stay finite."""
    logits = s_p().to(place.device, place.finest)
    for b, t, u, v in [(0, 0, 0, 0), (0, 1, 1, 2), (0, 2, 3, 0), (1, 0, 0, 0)]:
        logits[b, t, u, v] = -torch.inf
    found = logits_results(logits, *P, blank=0, backend=place.backend)
    finite = logits.clamp(min=-1e4)  # exp(-1e4) is 0 in every dtype
    assert_budget(found, logits_budget(finite, *P, blank=0))


def with_forbidden_label(place) -> tuple[Joint, Joint]:
    """Class 3 has bias -inf and stands in utterance 1 alone; and the same batch with a weightless utterance 1."""
    batch = ragged(3, 5, 3, 5, 6, blank=0)
    targets = torch.tensor([[1, 2, 1], [1, 3, 2], [4, 4, 1]])
    batch = batch._replace(
        targets=targets, encoder_lengths=torch.tensor([5, 4, 3]), target_lengths=torch.tensor([3, 3, 0])
    )
    batch.linear_bias[3] = -torch.inf
    return batch.cast(place.finest, place.device)


@pytest.mark.parametrize(("tile_rows", "threshold"), [(7, "auto"), (7, 1e-3), (None, 0)])
def test_joint(place, tile_rows, threshold):
    batch = with_forbidden_label(place)
    upstream = upstream_of(batch)
    options = {"backend": place.backend, "blank": 0, "tile_rows": tile_rows, "occupancy_threshold": threshold}
    found = results(batch, upstream, **options)
    assert found["loss"].isfinite().tolist() == [True, False, True]
    assert found["loss"][1] == torch.inf
    assert not found["d_encoder"][1].any()
    assert not found["d_predictor"][1].any()
    assert not found["d_linear_weight"][3].any()
    assert not found["d_linear_bias"][3].any()
    possible = batch._replace(
        **{
            name: getattr(batch, name)[[0, 2]]
            for name in ("encoder", "predictor", "targets", "encoder_lengths", "target_lengths")
        }
    )
    for name in ("loss", "d_encoder", "d_predictor"):
        found[name] = found[name][[0, 2]]
    if threshold == 1e-3:
        threshold = 0  # the bound on what a threshold drops has its own test
        found = {"loss": found["loss"]}
    assert_budget(found, joint_budget(possible, upstream[[0, 2]], blank=0, occupancy_threshold=threshold))


def test_finite_losses_can_be_picked(place):
    """loss[loss.isfinite()] trains on the rest: upstream 0 meets no inf."""
    batch = with_forbidden_label(place)
    leaves = with_gradients(batch)
    loss = joint_loss(leaves, reduction="none", backend=place.backend, blank=0, tile_rows=7)
    loss[loss.isfinite()].sum().backward()
    found = {f"d_{name}": x.grad for name, x in leaves.floats().items()}
    expected = results(batch, torch.tensor([1.0, 0.0, 1.0]), backend=place.backend, blank=0, tile_rows=7)
    assert_same_bits(found, {name: expected[name] for name in found})
    assert all(x.isfinite().all() for x in found.values())


def test_infinite_upstream_of_planes(place):
    """And padding gets none of it."""
    blank, label = torch.zeros(2, 4, 3), torch.zeros(2, 4, 2)
    label[0, :, 0] = -torch.inf
    blank, label = (x.to(place.device, place.finest).requires_grad_() for x in (blank, label))
    lengths = torch.tensor([4, 3], device=place.device), torch.tensor([2, 1], device=place.device)
    loss = rnnt.rnnt_loss_from_log_probs(blank, label, *lengths, reduction="none", backend=place.backend)
    assert loss.isinf().tolist() == [True, False]
    d_blank, d_label = torch.autograd.grad((loss**2).sum(), (blank, label))
    assert not d_blank[0].any()
    assert not d_label[0].any()
    assert not d_blank[1, 3].any()
    assert not d_blank[1, :, 2].any()
    assert d_blank[1].isfinite().all()


def test_infinite_upstream_of_logits(place):
    """What (loss**2).sum() makes of an infinite loss."""
    logits = forbid_last_blank(s_p().to(place.device, place.finest)).requires_grad_()
    loss = rnnt.rnnt_loss(logits, *(x.to(place.device) for x in P), blank=0, reduction="none", backend=place.backend)
    (loss**2).sum().backward()
    assert not logits.grad[1].any()
    assert logits.grad[0].isfinite().all()


@pytest.mark.parametrize("tile_rows", [7, None])
def test_infinite_upstream_of_the_joint(place, tile_rows):
    batch = ragged(2, 5, 3, 5, 6)
    targets = torch.tensor([[0, 2, 0], [0, 1, 3]])
    bias = batch.linear_bias.clone()
    bias[1] = -torch.inf  # utterance 1 cannot be said
    batch = batch._replace(
        linear_bias=bias, targets=targets, encoder_lengths=torch.tensor([5, 4]), target_lengths=torch.tensor([3, 2])
    )
    leaves = with_gradients(batch.cast(place.finest, place.device))
    loss = joint_loss(leaves, reduction="none", blank=4, backend=place.backend, tile_rows=tile_rows)
    assert loss.isinf().tolist() == [False, True]
    (loss**2).sum().backward()
    assert not leaves.encoder.grad[1].any()
    for x in (leaves.encoder, leaves.predictor, leaves.linear_weight, leaves.linear_bias):
        assert x.grad.isfinite().all()
    assert leaves.linear_bias.grad.any()
