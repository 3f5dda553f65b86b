"""The gradient can be taken once; differentiating it is an error and never a wrong number."""

import itertools

import pytest
import torch

import rnnt
from tests.fixtures import P, j_p, s_p, sines
from tests.support import joint_loss, with_gradients

MESSAGE = "no second derivative"


def losses(place, x):
    args = torch.tensor([[1]]), torch.tensor([2]), torch.tensor([1])
    return rnnt.rnnt_loss(x, *(arg.to(place.device) for arg in args), blank=0, reduction="sum", backend=place.backend)


@pytest.mark.parametrize("upstream", ["learning", "constant"])
def test_of_logits(place, upstream):
    x = sines(1, 2, 1, 3).to(place.device, place.finest).requires_grad_()
    loss = losses(place, x)
    if upstream == "learning":
        loss = loss**2
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(RuntimeError, match=MESSAGE):
        (losses(place, x) + gradient.pow(2).sum()).backward()


@pytest.mark.parametrize("tile_rows", [7, None])
def test_of_the_joint(place, tile_rows):
    batch = with_gradients(j_p().cast(place.finest, place.device))
    loss = joint_loss(batch, reduction="sum", blank=0, backend=place.backend, tile_rows=tile_rows)
    inputs = batch.floats()
    gradients = torch.autograd.grad(loss, list(inputs.values()), create_graph=True)
    for gradient, x in itertools.product(gradients, inputs.values()):  # mixed derivatives too
        with pytest.raises(RuntimeError, match=MESSAGE):
            torch.autograd.grad(gradient.pow(2).sum(), x, retain_graph=True)


def test_of_the_planes(place):
    batch = with_gradients(j_p().cast(place.finest, place.device))
    args, options = (*batch[:3], *batch[4:]), {"linear_bias": batch.linear_bias, "blank": 0, "backend": place.backend}
    blank, label = rnnt.joint_log_probs(*args, **options)
    (gradient,) = torch.autograd.grad((blank.sum() + label.sum()), batch.encoder, create_graph=True)
    with pytest.raises(RuntimeError, match=MESSAGE):
        gradient.pow(2).sum().backward()


def test_of_the_loss_from_planes(place):
    logp = s_p().to(place.device, place.finest).log_softmax(-1)
    blank, label = logp[..., 0].clone().requires_grad_(), logp[:, :, :-1, 1].clone().requires_grad_()
    lengths = [x.to(place.device) for x in P[1:]]
    loss = rnnt.rnnt_loss_from_log_probs(blank, label, *lengths, reduction="sum", backend=place.backend)
    gradients = torch.autograd.grad(loss, (blank, label), create_graph=True)
    for gradient, x in itertools.product(gradients, (blank, label)):
        with pytest.raises(RuntimeError, match=MESSAGE):
            torch.autograd.grad(gradient.pow(2).sum(), x, retain_graph=True)


def test_a_gradient_penalty_is_refused_even_beside_other_terms(place):
    """The loss as one term of a sum whose other terms are differentiable twice."""
    x = sines(1, 2, 1, 3).to(place.device, place.finest).requires_grad_()
    total = losses(place, x) + x.pow(3).sum()
    (gradient,) = torch.autograd.grad(total, x, create_graph=True)
    with pytest.raises(RuntimeError, match=MESSAGE):
        torch.autograd.grad(gradient.sum(), x)


@pytest.mark.parametrize("way", ["logits", "joint", "planes", "loss-from-planes"])
@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside-others"])
def test_by_the_weight_of_the_loss(place, way, beside):
    """A gradient that depends on nothing but a factor of the loss, as where losses' weights are learned."""
    weight = torch.ones((), device=place.device, dtype=place.finest, requires_grad=True)
    if way == "logits":
        x = sines(1, 2, 1, 3).to(place.device, place.finest).requires_grad_()
        loss = losses(place, x)
    else:
        batch = j_p().cast(place.finest, place.device)
        x = batch.encoder.requires_grad_()
        options = {"linear_bias": batch.linear_bias, "blank": 0, "backend": place.backend}
        if way == "joint":
            loss = joint_loss(batch, reduction="sum", blank=0, backend=place.backend)
        else:
            planes = rnnt.joint_log_probs(*batch[:3], *batch[4:], **options)
            if way == "planes":
                loss = planes[0].sum() + planes[1].sum()
            else:
                loss = rnnt.rnnt_loss_from_log_probs(*planes, *batch[5:], reduction="sum", backend=place.backend)
    total = weight * loss + (weight * x.pow(2).sum() if beside else 0)
    (gradient,) = torch.autograd.grad(total, x, create_graph=True)
    with pytest.raises(RuntimeError, match=MESSAGE):
        torch.autograd.grad(gradient.pow(2).sum(), weight)
