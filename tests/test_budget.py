"""The checks can fail: wrong losses, each wrong in one place, break the budget that right ones keep."""

import pytest
import torch

import rnnt
from tests.support import (
    Budget,
    Joint,
    assert_budget,
    joint_budget,
    named_dtypes,
    ragged,
    results,
    upstream_of,
    with_gradients,
)

BLANK = 0
LENGTHS = ("encoder_lengths", "target_lengths")


def planes(batch: Joint) -> tuple[torch.Tensor, torch.Tensor]:
    return rnnt.joint_log_probs(*batch[:3], *batch[4:], linear_bias=batch.linear_bias, blank=BLANK, backend="reference")


def loss_of(blank, label, batch, **options):
    lengths = batch.encoder_lengths, batch.target_lengths
    return rnnt.rnnt_loss_from_log_probs(blank, label, *lengths, reduction="none", backend="reference", **options)


def right(batch):
    return loss_of(*planes(batch), batch)


def bias_dropped(batch):
    return right(batch._replace(linear_bias=0 * batch.linear_bias))


def label_column_shifted(batch):
    blank, label = planes(batch)
    return loss_of(blank, label.roll(1, dims=2), batch)


def predictor_shifted(batch):
    return right(batch._replace(predictor=batch.predictor.roll(1, dims=1)))


def blank_and_label_swapped(batch):
    blank, label = planes(batch)
    return loss_of(torch.cat([label, blank[:, :, -1:]], dim=2), blank[:, :, :-1], batch)


def last_blank_forgotten(batch):
    blank, label = planes(batch)
    utterance = torch.arange(len(blank))
    last = torch.zeros_like(blank, dtype=torch.bool)
    last[utterance, batch.encoder_lengths - 1, batch.target_lengths] = True
    return loss_of(torch.where(last, 0, blank), label, batch)


def first_label_of_all(batch):
    return right(batch._replace(targets=batch.targets[:, :1].expand_as(batch.targets)))


def frame_forgotten(batch):
    return right(batch._replace(encoder_lengths=(batch.encoder_lengths - 1).clamp(min=1)))


def best_path_alone(batch):
    """The most probable alignment instead of the sum: a large scale makes the logsumexp a maximum."""
    blank, label = planes(batch)
    return loss_of(50 * blank, 50 * label, batch) / 50


def one_row_without_gradient(batch):
    """A row of the middle of the first utterance is lost in the backward pass alone."""
    blank, label = planes(batch)
    at = torch.zeros_like(blank, dtype=torch.bool)
    at[0, batch.encoder.shape[1] // 2] = True
    return loss_of(torch.where(at, blank.detach(), blank), label, batch)


def softmax_part_forgotten(batch):
    """log_softmax's second term is treated as a constant."""
    hidden = torch.tanh(batch.encoder[:, :, None] + batch.predictor[:, None])
    logits = hidden @ batch.linear_weight.T + batch.linear_bias
    logp = (logits - logits.logsumexp(-1, keepdim=True).detach()).float()
    label = logp[:, :, :-1].gather(-1, batch.targets[:, None, :, None].expand(-1, logp.shape[1], -1, 1))[..., 0]
    return loss_of(logp[..., BLANK], label, batch)


def utterances_weighted_alike(batch):
    """Every utterance's gradient has the mean's weight."""
    loss = right(batch)
    return loss.detach() + (loss - loss.detach()).mean()


def fastemit_unasked(batch):
    return loss_of(*planes(batch), batch, fastemit_lambda=0.05)


MUTANTS = [
    bias_dropped,
    label_column_shifted,
    predictor_shifted,
    blank_and_label_swapped,
    last_blank_forgotten,
    first_label_of_all,
    frame_forgotten,
    best_path_alone,
    one_row_without_gradient,
    softmax_part_forgotten,
    utterances_weighted_alike,
    fastemit_unasked,
]


def found_by(loss_function, batch, upstream):
    leaves = with_gradients(batch)
    loss = loss_function(leaves)
    loss.backward(upstream.to(loss))
    return {"loss": loss.detach(), **{f"d_{name}": x.grad for name, x in leaves.floats().items()}}


@pytest.fixture(params=named_dtypes("fp32", "fp16", "bf16"), scope="module")
def setting(request) -> tuple[Joint, torch.Tensor, Budget]:
    """B3-T17-U5-V37-H24, as the backends are tested on, with its upstream gradient and budget."""
    batch = ragged(3, 17, 5, 37, 24, blank=BLANK).cast(request.param)
    upstream = upstream_of(batch)
    return batch, upstream, joint_budget(batch, upstream, blank=BLANK)


def test_right_loss_passes(setting):
    batch, upstream, budget = setting
    assert_budget(found_by(right, batch, upstream), budget)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_checks_can_fail(setting, mutant):
    batch, upstream, budget = setting
    with pytest.raises(AssertionError, match="over the budget"):
        assert_budget(found_by(mutant, batch, upstream), budget)


@pytest.mark.parametrize("name", ["loss", "d_encoder", "d_predictor", "d_linear_weight", "d_linear_bias"])
def test_each_tensor_is_checked(setting, name):
    """An error of 2 % at one entry is found in whichever tensor it is, and named with its index."""
    batch, upstream, budget = setting
    found = results(batch, upstream, backend="reference", blank=BLANK)
    worst = found[name].abs().argmax()
    found[name].view(-1)[worst] *= 1.02
    at = ", ".join(str(int(i)) for i in torch.unravel_index(worst, found[name].shape))
    with pytest.raises(AssertionError, match=rf"{name}\[{at}\]: largest error .* over the budget .*eager's error"):
        assert_budget(found, budget)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_fails(setting, value):
    batch, upstream, budget = setting
    found = results(batch, upstream, backend="reference", blank=BLANK)
    found["d_encoder"][1, 2, 3] = value
    with pytest.raises(AssertionError, match=r"d_encoder: not finite at \[1, 2, 3\]"):
        assert_budget(found, budget)


def test_shapes_must_agree(setting):
    batch, upstream, budget = setting
    found = results(batch, upstream, backend="reference", blank=BLANK)
    found["d_linear_bias"] = found["d_linear_bias"][None]
    with pytest.raises(AssertionError, match=r"d_linear_bias: shape \(1, 37\), expected \(37,\)"):
        assert_budget(found, budget)
