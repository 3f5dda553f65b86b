"""A NaN inside the lengths is never taken for an impossible or a likely utterance: loss and gradients are NaN."""

import warnings

import pytest
import torch

import rnnt
from tests.fixtures import P, j_p, s_p
from tests.support import Joint, assert_budget, joint_budget, joint_loss, results, with_gradients


def test_one_score(place):
    scores = s_p().to(place.device, torch.float32)
    scores[0, 1, 1, 2] = torch.nan
    scores.requires_grad_()
    args = [x.to(place.device) for x in P]
    loss = rnnt.rnnt_loss(scores, *args, blank=0, reduction="none", backend=place.backend)
    loss.sum().backward()
    assert loss.isnan().tolist() == [True, False]
    assert scores.grad[0, 1, 1].isnan().any()
    assert scores.grad[1].isfinite().all()


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy, under Triton's interpreter
def test_an_infinite_score_of_another_class(place):
    """As in log_softmax; log-sum-exp alone would say inf, and the loss would look impossible."""
    scores = s_p().to(place.device, torch.float32)
    wanted = {0, int(P[0][0, 1])}  # blank, and the label of column 1
    scores[0, 1, 1, next(v for v in range(scores.shape[3]) if v not in wanted)] = torch.inf
    scores.requires_grad_()
    args = [x.to(place.device) for x in P]
    loss = rnnt.rnnt_loss(scores, *args, blank=0, reduction="none", backend=place.backend)
    loss.sum().backward()
    assert loss.isnan().tolist() == [True, False]
    assert scores.grad[0, 1, 1].isnan().any()


@pytest.mark.parametrize("tile_rows", ["auto", None])
def test_large_weights_in_float16(place, tile_rows):
    """Gradients of the states far beyond their upstream gradient: what weights of 40 make of it."""
    weight = torch.tensor([[40.0], [-40.0], [0.0]])
    batch = Joint(
        torch.full((1, 2, 1), 0.03), torch.zeros(1, 2, 1), weight, torch.tensor([0.5, 0.0, -1.0]),
        torch.tensor([[1]]), torch.tensor([2]), torch.tensor([1]),
    ).cast(torch.float16, place.device)  # fmt: skip
    options = {"blank": 0, "backend": place.backend, "tile_rows": tile_rows}
    assert_budget(results(batch, **options), joint_budget(batch, blank=0))


@pytest.mark.parametrize("activation", ["tanh", "relu"])
def test_one_frame(place, activation):
    batch = j_p().cast(torch.float32, place.device)
    encoder = batch.encoder.clone()
    encoder[0, 2, 3] = torch.nan
    leaves = with_gradients(batch._replace(encoder=encoder))
    loss = joint_loss(leaves, reduction="none", blank=0, backend=place.backend, activation=activation)
    loss.sum().backward()
    assert loss.isnan().tolist() == [True, False]
    assert leaves.linear_weight.grad.isnan().any()
    assert leaves.encoder.grad[0, 2].isnan().any()
    assert leaves.encoder.grad[1].isfinite().all()


@pytest.mark.parametrize("clamp", [1e-2, 1e-5])
def test_threshold_follows_the_clamp(place, clamp):
    """A clamped gradient weighs rare nodes as much as frequent ones; "auto" still drops less than rounding."""
    batch = j_p().cast(torch.float32, place.device)
    options = {"blank": 0, "reduction": "sum", "clamp": clamp, "backend": place.backend}
    gradients = []
    for threshold in ("auto", 0):
        leaves = with_gradients(batch)
        joint_loss(leaves, occupancy_threshold=threshold, **options).backward()
        gradients.append(leaves.encoder.grad)
    torch.testing.assert_close(*gradients, rtol=0, atol=2**-24 * float(gradients[1].abs().max()))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpoint_around(place, use_reentrant):
    """A loss inside torch.utils.checkpoint has the gradients of one outside."""
    batch = j_p().cast(torch.float32, place.device)
    found = []
    for checkpointed in (False, True):
        leaves = with_gradients(batch)

        def run(encoder, leaves=leaves):
            return joint_loss(leaves._replace(encoder=encoder), blank=0, reduction="sum", backend=place.backend)

        if checkpointed:
            loss = torch.utils.checkpoint.checkpoint(run, leaves.encoder, use_reentrant=use_reentrant)
        else:
            loss = run(leaves.encoder)
        loss.backward()
        found.append([loss.detach(), *(x.grad for x in leaves.floats().values())])
    for outside, inside in zip(*found, strict=True):
        assert torch.equal(outside, inside)


def test_uninitialised_memory_is_not_used(place):
    """PyTorch's deterministic mode fills torch.empty with NaN: none of it reaches a loss or a gradient, not even times
    zero."""
    batch = j_p().cast(torch.float32, place.device)
    options = {"blank": 0, "backend": place.backend}  # one tile: a second would find the first one's rows
    with warnings.catch_warnings():  # of CUDA functions without a deterministic variant
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            assert torch.empty(3).isnan().all()
            found = results(batch, **options)
        finally:
            torch.use_deterministic_algorithms(False)
    for name, x in found.items():
        assert x.isfinite().all(), name
