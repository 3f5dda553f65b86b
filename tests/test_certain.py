"""A near-certain prediction keeps its digits, however large the scores are: softmax does not see what they share."""

import pytest
import torch
from torch import Tensor

import rnnt
from tests.support import at_places

SHIFTS = [0.0, 64.0, 1024.0]  # an ulp of float32 at 1024 is more than the loss
CLASSES = [3, 1100]  # the latter is reduced in parts on a GPU
ROUNDING = 2.0**-23  # of probabilities near 1
ONE = torch.tensor([1])
NO_LABELS = torch.zeros(1, 0, dtype=torch.long)


def scores(classes: int, shift: float) -> Tensor:
    """[classes] float32, all exact; class 0 is the blank."""
    others = torch.full((classes - 3,), -50.0)
    return torch.cat([torch.tensor([0.0, -10.0, -11.0]), others]) + shift


def expected(classes: int) -> tuple[Tensor, Tensor]:
    """Of a lattice of one node, whose only path is one blank: the loss, and its gradient at the scores."""
    probability = scores(classes, 0.0).double().softmax(0)
    loss = scores(classes, 0.0)[1:].double().exp().sum().log1p()
    return loss, torch.cat([-probability[1:].sum()[None], probability[1:]])


def assert_exact(loss: Tensor, gradient: Tensor, classes: int) -> None:
    right_loss, right_gradient = expected(classes)
    assert abs(loss.item() - right_loss) <= ROUNDING
    assert (gradient.cpu().double() - right_gradient).abs().max() <= ROUNDING


@pytest.mark.parametrize("classes", CLASSES)
@pytest.mark.parametrize("shift", SHIFTS)
@pytest.mark.parametrize("tile_rows", ["auto", None], ids=["tiled", "untiled"])
def test_joint(place, tile_rows, shift, classes):
    states, weight = torch.zeros(1, 1, 8, device=place.device), torch.zeros(classes, 8, device=place.device)
    bias = scores(classes, shift).to(place.device).requires_grad_()
    lengths = (x.to(place.device) for x in (NO_LABELS, ONE, ONE - 1))
    loss = rnnt.joint_rnnt_loss(
        states, states, weight, *lengths, linear_bias=bias, blank=0, reduction="sum", tile_rows=tile_rows,
        backend=place.backend,
    )  # fmt: skip
    assert_exact(loss, torch.autograd.grad(loss, bias)[0], classes)


@pytest.mark.parametrize(("place", "classes"), at_places([33], [129]))
@pytest.mark.parametrize("seed", range(4))
def test_a_last_class_behind_whole_blocks(place, classes, seed):
    """Its score near 64 is a sum over features, which rounds to the same number forwards and backwards."""
    generator = torch.Generator().manual_seed(seed)
    states, weight = torch.randn(1, 1, 256, generator=generator), torch.zeros(classes, 256)
    weight[-1] = torch.randn(256, generator=generator)
    hidden = states[0, 0].double().tanh()
    weight[-1] *= (64.3 / (hidden @ weight[-1].double())).float()
    bias = torch.cat([torch.tensor([54.0, 53.0]), torch.full((classes - 3,), 14.0), torch.zeros(1)])
    right = -(weight.double() @ hidden + bias).softmax(0)[:-1].sum()
    states, weight, bias = (x.to(place.device) for x in (states, weight, bias))
    lengths = (x.to(place.device) for x in (NO_LABELS, ONE, ONE - 1))
    loss = rnnt.joint_rnnt_loss(
        states, torch.zeros_like(states), weight, *lengths, linear_bias=bias.requires_grad_(), blank=-1,
        reduction="sum", backend=place.backend,
    )  # fmt: skip
    (gradient,) = torch.autograd.grad(loss, bias)
    assert abs(gradient[-1].cpu().double() - right) <= ROUNDING


@pytest.mark.parametrize("classes", CLASSES)
@pytest.mark.parametrize("shift", SHIFTS)
def test_planes(place, shift, classes):
    states, weight = torch.zeros(1, 1, 8, device=place.device), torch.zeros(classes, 8, device=place.device)
    bias = scores(classes, shift).to(place.device).requires_grad_()
    targets, frames, labels = (x.to(place.device) for x in (NO_LABELS, ONE, ONE - 1))
    blank, label = rnnt.joint_log_probs(
        states, states, weight, targets, frames, labels, linear_bias=bias, blank=0, backend=place.backend
    )
    loss = rnnt.rnnt_loss_from_log_probs(blank, label, frames, labels, reduction="sum", backend=place.backend)
    assert_exact(loss, torch.autograd.grad(loss, bias)[0], classes)


@pytest.mark.parametrize("classes", CLASSES)
@pytest.mark.parametrize("shift", SHIFTS)
def test_dense(place, shift, classes):
    logits = scores(classes, shift).to(place.device)[None, None, None].requires_grad_()
    lengths = (x.to(place.device) for x in (NO_LABELS, ONE, ONE - 1))
    loss = rnnt.rnnt_loss(logits, *lengths, blank=0, reduction="sum", backend=place.backend)
    assert_exact(loss, torch.autograd.grad(loss, logits)[0][0, 0, 0], classes)
