"""The reference backend against path enumeration, in float64."""

import numpy as np
import pytest
import torch

import rnnt
from tests import fixtures, oracle
from tests.support import Joint, logits_results, ragged, results, upstream_of

# (T, U) of one utterance; all below share a batch of five with the shapes (1, 0), (1, 3), (4, 0) and (2, 3) inside.
SHAPES = [(1, 0), (1, 1), (1, 3), (2, 0), (2, 3), (3, 2), (4, 1), (4, 3)]
EXACT = {"rtol": 1e-12, "atol": 1e-12}


def corners(V: int, H: int, blank: int, bias: bool = True) -> Joint:
    batch = ragged(5, 4, 3, V, H, blank=blank, seed=V + H, bias=bias)
    frames, labels = torch.tensor([4, 1, 1, 4, 2]), torch.tensor([3, 0, 3, 0, 3])
    return batch._replace(encoder_lengths=frames, target_lengths=labels)


def enumerated(batch: Joint, upstream: torch.Tensor, **options) -> dict[str, torch.Tensor]:
    arrays = [None if x is None else x.numpy() for x in batch]
    found = oracle.loss_of_joint(*arrays, upstream.numpy(), **options)
    return {name: torch.from_numpy(x) for name, x in found.items()}


@pytest.mark.parametrize(("T", "U"), SHAPES)
def test_lattice(T, U):
    generator = torch.Generator().manual_seed(T * 10 + U)
    logits = torch.randn(1, T, U + 1, 4, generator=generator, dtype=torch.float64)
    targets = torch.randint(1, 4, (1, U), generator=generator)
    lengths = torch.tensor([T]), torch.tensor([U])
    found = logits_results(logits, targets, *lengths, blank=0, backend="reference")
    losses, gradient = oracle.loss_of_logits(logits.numpy(), targets.numpy(), [T], [U], blank=0)
    np.testing.assert_allclose(found["loss"], losses, **EXACT)
    np.testing.assert_allclose(found["d_logits"], gradient, **EXACT)


@pytest.mark.parametrize(
    ("V", "H", "blank", "bias", "options"),
    [
        pytest.param(5, 6, 0, True, {}, id="blank-first"),
        pytest.param(5, 6, 4, True, {}, id="blank-last"),
        pytest.param(7, 3, 3, False, {}, id="no-bias"),
        pytest.param(2, 1, 1, True, {}, id="V2-H1"),
        pytest.param(5, 6, 0, True, {"activation": "relu"}, id="relu"),
        pytest.param(5, 6, 0, True, {"activation": "sigmoid"}, id="sigmoid"),
        pytest.param(5, 6, 2, True, {"fastemit_lambda": 0.3}, id="fastemit"),
        pytest.param(5, 6, 2, True, {"clamp": 0.05}, id="clamp"),
        pytest.param(5, 6, 2, True, {"fastemit_lambda": 0.3, "clamp": 0.1}, id="fastemit-clamp"),
    ],
)
def test_joint(V, H, blank, bias, options):
    batch = corners(V, H, blank, bias)
    upstream = upstream_of(batch)
    found = results(batch, upstream, backend="reference", blank=blank, **options)
    expected = enumerated(batch, upstream, blank=blank, **options)
    torch.testing.assert_close(found, expected, **EXACT)


@pytest.mark.parametrize("options", [{}, {"fastemit_lambda": 0.3}, {"clamp": 0.2}], ids=["plain", "fastemit", "clamp"])
@pytest.mark.parametrize("normalise", [True, False], ids=["logits", "log-probs"])
def test_logits(normalise, options):
    logits = fixtures.s_p()
    logits = logits if normalise else logits.log_softmax(-1)
    found = logits_results(logits, *fixtures.P, blank=0, backend="reference", fused_log_softmax=normalise, **options)
    targets, frames, labels = (x.numpy() for x in fixtures.P)
    losses, gradient = oracle.loss_of_logits(
        logits.numpy(), targets, frames, labels, blank=0, normalise=normalise, **options
    )
    np.testing.assert_allclose(found["loss"], losses, **EXACT)
    np.testing.assert_allclose(found["d_logits"], gradient, **EXACT)


def test_planes():
    """joint_log_probs gives the two planes, 0 outside the lengths, and the loss of planes is the loss of the joint."""
    batch = corners(5, 6, 0)
    blank, label = rnnt.joint_log_probs(
        *batch[:3], *batch[4:], linear_bias=batch.linear_bias, blank=0, backend="reference"
    )
    logits = torch.tanh(batch.encoder[:, :, None] + batch.predictor[:, None]) @ batch.linear_weight.T
    logp = oracle.log_softmax((logits + batch.linear_bias).numpy())
    for b, (T, U) in enumerate(zip(batch.encoder_lengths.tolist(), batch.target_lengths.tolist(), strict=True)):
        expected_blank, expected_label = np.zeros(blank.shape[1:]), np.zeros(label.shape[1:])
        expected_blank[:T, : U + 1] = logp[b, :T, : U + 1, 0]
        for u in range(U):
            expected_label[:T, u] = logp[b, :T, u, batch.targets[b, u]]
        np.testing.assert_allclose(blank[b], expected_blank, **EXACT)
        np.testing.assert_allclose(label[b], expected_label, **EXACT)
    blank.requires_grad_()
    label.requires_grad_()
    loss = rnnt.rnnt_loss_from_log_probs(
        blank, label, batch.encoder_lengths, batch.target_lengths, reduction="none", backend="reference"
    )
    loss.sum().backward()
    for b, (T, U) in enumerate(zip(batch.encoder_lengths.tolist(), batch.target_lengths.tolist(), strict=True)):
        found = oracle.lattice(blank[b, :T, : U + 1].detach().numpy(), label[b, :T, :U].detach().numpy())
        np.testing.assert_allclose(loss[b].item(), -found.log_z, **EXACT)
        np.testing.assert_allclose(blank.grad[b, :T, : U + 1], -found.blank, **EXACT)
        np.testing.assert_allclose(label.grad[b, :T, :U], -found.label, **EXACT)


def test_uniform_scores_have_a_closed_form():
    """The enumeration itself against Z's closed form."""
    for T, U in SHAPES:
        losses, gradient = oracle.loss_of_logits(np.zeros((1, T, U + 1, 5)), np.ones((1, U), int), [T], [U], blank=0)
        np.testing.assert_allclose(losses, fixtures.uniform_loss(T, U, 5), **EXACT)
        if T + U > 1:
            blank, label = 1 / 5 - (T - 1) / (T + U - 1), 1 / 5 - U / (T + U - 1)
            np.testing.assert_allclose(gradient[0, 0, 0], [blank, label, 0.2, 0.2, 0.2], **EXACT)
