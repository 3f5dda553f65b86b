"""What a call may be given: frozen inputs, integer dtypes, lengths on the CPU, an empty batch, autocast."""

import pytest
import torch

import rnnt
from tests.fixtures import LOSSES_S_P, P, j_p, s_p
from tests.support import (
    Place,
    assert_budget,
    assert_same_bits,
    budget_from,
    joint_budget,
    joint_loss,
    named_dtypes,
    ragged,
    results,
    upstream_of,
    with_gradients,
)

NAMES = ["encoder", "predictor", "linear_weight", "linear_bias"]


def options_at(place: Place, **options):
    return {"backend": place.backend, "blank": 0, "tile_rows": 7, **options}


@pytest.mark.parametrize("frozen", NAMES)
@pytest.mark.parametrize("tile_rows", [7, None])
def test_one_input_frozen(place, frozen, tile_rows):
    batch = ragged(3, 5, 3, 5, 6, blank=0).cast(place.finest, place.device)
    upstream = upstream_of(batch)
    leaves = with_gradients(batch)
    leaves = leaves._replace(**{frozen: getattr(leaves, frozen).detach()})
    loss = joint_loss(leaves, reduction="none", **options_at(place, tile_rows=tile_rows))
    loss.backward(upstream.to(loss))
    found = {f"d_{name}": x.grad for name, x in leaves.floats().items() if name != frozen}
    assert getattr(leaves, frozen).grad is None
    expected = joint_budget(batch, upstream, blank=0)
    assert_budget({"loss": loss.detach(), **found}, expected)


@pytest.mark.parametrize("learning", NAMES)
def test_one_input_learning(place, learning):
    batch = ragged(3, 5, 3, 5, 6, blank=0).cast(place.finest, place.device)
    x = getattr(batch, learning).clone().requires_grad_()
    joint_loss(batch._replace(**{learning: x}), reduction="sum", **options_at(place)).backward()
    assert_budget({f"d_{learning}": x.grad}, joint_budget(batch, blank=0))


def test_nothing_learns(place):
    batch = ragged(3, 5, 3, 5, 6, blank=0).cast(place.finest, place.device)
    loss = joint_loss(batch, reduction="none", **options_at(place))
    assert not loss.requires_grad
    with torch.no_grad():
        without = joint_loss(with_gradients(batch), reduction="none", **options_at(place))
    assert not without.requires_grad
    expected = joint_budget(batch, blank=0)
    assert_budget({"loss": loss}, expected)
    assert_budget({"loss": without}, expected)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
@pytest.mark.parametrize("device", ["cpu", "same"])
def test_integer_inputs(place, dtype, device):
    device = place.device if device == "same" else "cpu"
    batch = j_p().cast(place.finest, place.device)
    expected = results(batch, **options_at(place))
    other = batch._replace(
        targets=batch.targets.to(dtype),
        encoder_lengths=batch.encoder_lengths.to(device, dtype),
        target_lengths=batch.target_lengths.to(device, dtype),
    )
    assert_same_bits(results(other, **options_at(place)), expected)
    unchecked = results(other, **options_at(place, validate=False))
    if place.backend == "compiled" and place.device == "cuda":
        # Which rows are live is not known without waiting: padding takes part, so sums fall into other tiles.
        assert_budget(unchecked, joint_budget(batch, blank=0))
    else:
        assert_same_bits(unchecked, expected)


class Stop(torch.autograd.Function):
    """Nothing comes back through it, not even zeros."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return None


def test_no_upstream_gradient(place):
    batch = with_gradients(j_p().cast(place.finest, place.device))
    logits = s_p().to(place.device, place.finest).requires_grad_()
    lengths = [x.to(place.device) for x in P[1:]]
    planes = [torch.zeros(2, 4, n, device=place.device, dtype=place.finest).requires_grad_() for n in (4, 3)]
    losses = [
        joint_loss(batch, **options_at(place)),
        rnnt.rnnt_loss(logits, P[0].to(place.device), *lengths, 0, backend=place.backend),
        rnnt.rnnt_loss_from_log_probs(*planes, *lengths, backend=place.backend),
    ]
    for loss in losses:
        Stop.apply(loss).backward()
    for x in (*batch.floats().values(), logits, *planes):
        assert x.grad is None or not x.grad.any()


@pytest.mark.compiled
def test_unchecked_labels_read_no_other_memory():
    """validate=False: a label that is no class is the caller's fault, but no crash: no memory lies 2^40 scores on."""
    batch = j_p().cast(torch.float32)
    targets = batch.targets.clone()
    targets[0, 0] = 2**40
    joint_loss(batch._replace(targets=targets), blank=0, backend="compiled", validate=False)
    rnnt.rnnt_loss(s_p().float(), targets, *P[1:], 0, backend="compiled", validate=False)


def test_nan_outside_the_planes(place):
    """rnnt_loss_from_log_probs reads nothing outside the lengths, and gives no gradient there."""
    logp = s_p().log_softmax(-1).to(place.device, place.finest)
    planes = [logp[..., 0].clone(), logp[:, :, :-1, 1].clone()]
    lengths = [x.to(place.device) for x in P[1:]]

    def gradients(blank, label):
        blank, label = blank.clone().requires_grad_(), label.clone().requires_grad_()
        loss = rnnt.rnnt_loss_from_log_probs(blank, label, *lengths, reduction="none", backend=place.backend)
        loss.sum().backward()
        return {"loss": loss.detach(), "d_blank": blank.grad, "d_label": label.grad}

    expected = gradients(*planes)
    for plane, first in zip(planes, (2, 1), strict=True):
        plane[1, 2:] = torch.nan
        plane[1, :, first:] = torch.nan
    found = gradients(*planes)
    assert_same_bits(found, expected)
    assert not found["d_blank"][1, 2:].any()
    assert not found["d_label"][1, :, 1:].any()


def test_empty_batch(place):
    batch = ragged(3, 5, 3, 5, 6, blank=0).cast(place.finest, place.device)
    fields = ("encoder", "predictor", "targets", "encoder_lengths", "target_lengths")
    empty = with_gradients(batch._replace(**{name: getattr(batch, name)[:0] for name in fields}))
    assert joint_loss(empty, reduction="none", **options_at(place)).shape == (0,)
    loss = joint_loss(empty, reduction="sum", **options_at(place))
    assert loss.item() == 0
    loss.backward()
    for name, x in empty.floats().items():
        assert x.grad.shape == x.shape, name
        assert not x.grad.any(), name
    planes = rnnt.joint_log_probs(*empty[:3], *empty[4:], linear_bias=empty.linear_bias, **options_at(place))
    assert [tuple(x.shape) for x in planes] == [(0, 5, 4), (0, 5, 3)]
    loss = rnnt.rnnt_loss_from_log_probs(*planes, *empty[5:], reduction="sum", backend=place.backend)
    assert loss.item() == 0
    logits = torch.zeros(0, 5, 4, 5, device=place.device).requires_grad_()
    loss = rnnt.rnnt_loss(logits, *empty[4:], blank=0, reduction="sum", backend=place.backend)
    loss.backward()
    assert loss.item() == 0
    assert logits.grad.shape == logits.shape


@pytest.mark.parametrize("dtype", named_dtypes("fp64", "bf16"))
def test_dtypes_of_the_results(place, dtype):
    """Losses and planes in float32 (float64 from float64), gradients in their input's dtype."""
    if dtype == torch.float64 and place.finest != dtype:
        batch = j_p().cast(dtype, place.device)
        with pytest.raises(ValueError, match="backend: expected one that can take this call, got 'triton'"):
            joint_loss(batch, **options_at(place))
        return
    if dtype == torch.bfloat16 and place.interpreted:
        dtype = torch.float16  # the interpreter's bfloat16 product is wrong
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    batch = with_gradients(j_p().cast(dtype, place.device))
    planes = rnnt.joint_log_probs(*batch[:3], *batch[4:], linear_bias=batch.linear_bias, **options_at(place))
    assert [x.dtype for x in planes] == [wide, wide]
    loss = rnnt.rnnt_loss_from_log_probs(*planes, *batch[5:], reduction="mean", backend=place.backend)
    assert loss.dtype == wide
    loss.backward()
    assert all(x.grad.dtype == dtype for x in batch.floats().values())
    logits = s_p().to(place.device, dtype).requires_grad_()
    loss = rnnt.rnnt_loss(logits, *(x.to(place.device) for x in P), blank=0, reduction="none", backend=place.backend)
    loss.sum().backward()
    assert loss.dtype == wide
    assert logits.grad.dtype == dtype
    torch.testing.assert_close(loss.tolist(), LOSSES_S_P, rtol=torch.finfo(dtype).eps, atol=5e-9)


@pytest.mark.parametrize("cached", [True, False], ids=["weight-cache", "no-cache"])
def test_autocast(place, cached):
    """float32 parameters and states; the products run in autocast's dtype, gradients come back in float32."""
    dtype = torch.float16 if place.interpreted or place.device == "cuda" else torch.bfloat16
    batch = ragged(3, 5, 3, 5, 6, blank=0).cast(torch.float32, place.device)
    upstream = upstream_of(batch)

    def under_autocast(backend):
        with torch.autocast(place.device, dtype, cache_enabled=cached):
            return results(batch, upstream, backend=backend, blank=0)

    found = under_autocast(place.backend)
    assert {x.dtype for x in found.values()} == {torch.float32}
    truth = results(batch.cast(torch.float64), upstream, backend="reference", blank=0)
    expected = budget_from(under_autocast("reference"), truth, dtype)
    assert_budget(found, expected)
    assert all(error.max() > 1e-5 for error in expected.eager.values())  # sixteen bits were in use


def test_mixed_dtypes_under_autocast(place):
    """bfloat16 states and a float32 output layer, as autocast leaves them: each gradient has its input's dtype."""
    batch = ragged(3, 5, 3, 5, 6, blank=0).cast(torch.float32, place.device)
    batch = batch._replace(encoder=batch.encoder.bfloat16(), predictor=batch.predictor.bfloat16())

    def under_autocast(backend):
        with torch.autocast(place.device, torch.bfloat16):
            return results(batch, backend=backend, blank=0)

    found = under_autocast(place.backend)
    assert found["d_encoder"].dtype == found["d_predictor"].dtype == torch.bfloat16
    assert found["d_linear_weight"].dtype == found["d_linear_bias"].dtype == torch.float32
    truth = results(batch.cast(torch.float64), backend="reference", blank=0)
    assert_budget(found, budget_from(under_autocast("reference"), truth, torch.bfloat16))


def test_autocast_leaves_float64_alone(place):
    batch = j_p().cast(place.finest, place.device)
    if place.finest != torch.float64:
        return
    with torch.autocast(place.device, torch.bfloat16):
        found = results(batch, **options_at(place))
    assert_same_bits(found, results(batch, **options_at(place)))


def test_planes_of_a_single_node(place):
    """T = 1 and U = 0: logp_label has no entry, and a gradient of its shape all the same."""
    planes = [torch.full((2, 1, n), -0.5, dtype=place.finest, device=place.device).requires_grad_() for n in (1, 0)]
    lengths = [torch.tensor(x, device=place.device) for x in ([1, 1], [0, 0])]
    loss = rnnt.rnnt_loss_from_log_probs(*planes, *lengths, reduction="sum", backend=place.backend)
    d_blank, d_label = torch.autograd.grad(loss, planes)
    assert loss.item() == 1
    assert d_blank.flatten().tolist() == [-1, -1]
    assert d_label.shape == (2, 1, 0)
