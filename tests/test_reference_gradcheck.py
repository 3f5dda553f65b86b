"""The reference backend's gradients against finite differences, in float64.

FastEmit, clamp and occupancy_threshold change gradients on purpose, away from the derivative of the value; they are
held against path enumeration (test_reference_paths.py) and against laws (test_occupancy.py) instead.
"""

import pytest
import torch
from torch.autograd import gradcheck

import rnnt
from tests import fixtures
from tests.support import ragged


@pytest.mark.parametrize("reduction", ["none", "sum", "mean", "mean_target", "mean_volume"])
@pytest.mark.parametrize("fused", [True, False], ids=["logits", "log-probs"])
def test_logits(fused, reduction):
    def loss(logits):
        scores = logits if fused else logits.log_softmax(-1)
        return rnnt.rnnt_loss(scores, *fixtures.P, 0, -1, reduction, fused, backend="reference")

    assert gradcheck(loss, fixtures.s_p().requires_grad_())


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("activation", ["tanh", "relu", "sigmoid"])
def test_joint(activation, bias):
    batch = ragged(3, 4, 3, 5, 3, bias=bias)

    def loss(encoder, predictor, weight, linear_bias=None):
        return rnnt.joint_rnnt_loss(
            encoder, predictor, weight, *batch[4:], linear_bias=linear_bias, activation=activation,
            reduction="none", backend="reference",
        )  # fmt: skip

    assert gradcheck(loss, [x.requires_grad_() for x in batch.floats().values()])


def test_joint_with_dropout():
    """The seed is set again for every evaluation, so the function is one and the same."""
    batch = ragged(2, 4, 3, 5, 4)

    def loss(encoder, predictor, weight, linear_bias):
        torch.manual_seed(7)
        return rnnt.joint_rnnt_loss(
            encoder, predictor, weight, *batch[4:], linear_bias=linear_bias, dropout_p=0.4,
            reduction="none", backend="reference",
        )  # fmt: skip

    assert gradcheck(loss, [x.requires_grad_() for x in batch.floats().values()])


def test_planes():
    batch = ragged(2, 2, 2, 4, 2)

    def planes(encoder, predictor, weight, linear_bias):
        return rnnt.joint_log_probs(
            encoder, predictor, weight, *batch[4:], linear_bias=linear_bias, backend="reference"
        )

    assert gradcheck(planes, [x.requires_grad_() for x in batch.floats().values()])


def test_loss_from_planes():
    batch = ragged(3, 4, 3, 5, 3)
    generator = torch.Generator().manual_seed(3)
    blank = torch.randn(3, 4, 4, generator=generator, dtype=torch.float64)
    label = torch.randn(3, 4, 3, generator=generator, dtype=torch.float64)

    def loss(blank, label):
        return rnnt.rnnt_loss_from_log_probs(
            blank, label, batch.encoder_lengths, batch.target_lengths, reduction="none", backend="reference"
        )

    assert gradcheck(loss, [blank.requires_grad_(), label.requires_grad_()])
