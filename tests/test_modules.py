"""RNNTLoss and RNNTJointLoss: thin owners of the functions' arguments and of ordinary parameters."""

import copy
import pickle

import pytest
import torch

import rnnt
from tests.fixtures import LOSSES_S_P, P, s_p
from tests.support import (
    assert_same_bits,
    check_printed,
    joint_loss,
    ragged,
    results,
)


def module_of(batch, place=None, **options):
    """RNNTJointLoss with the output layer of a batch."""
    weight, bias = batch.linear_weight, batch.linear_bias
    backend = "reference" if place is None else place.backend
    module = rnnt.RNNTJointLoss(
        weight.shape[1], weight.shape[0], bias=bias is not None, backend=backend, dtype=weight.dtype,
        device=weight.device, **options,
    )  # fmt: skip
    with torch.no_grad():
        module.output.weight.copy_(weight)
        if bias is not None:
            module.output.bias.copy_(bias)
    return module


def test_rnnt_loss(place):
    module = rnnt.RNNTLoss(0, -1, "none", backend=place.backend)

    def compute(backend, cast):
        module.backend = backend
        return {"loss": module(cast(s_p()), *(x.to(place.device) for x in P))}

    check_printed(place, compute, {"loss": LOSSES_S_P})


def test_rnnt_loss_passes_everything_on():
    options = {"blank": 0, "clamp": 0.05, "reduction": "mean_volume", "fused_log_softmax": False}
    x = s_p().log_softmax(-1).requires_grad_()
    loss = rnnt.RNNTLoss(**options, fastemit_lambda=0.1, backend="reference")(x, *P)
    expected = rnnt.rnnt_loss(x, *P, **options, fastemit_lambda=0.1, backend="reference")
    assert loss == expected
    assert torch.equal(torch.autograd.grad(loss, x)[0], torch.autograd.grad(expected, x)[0])


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
def test_joint_loss_is_the_function(place, bias):
    batch = ragged(3, 5, 3, 5, 6, bias=bias, blank=0).cast(place.finest, place.device)
    module = module_of(batch, place, reduction="none", tile_rows=7, blank=0)
    encoder, predictor = batch.encoder.clone().requires_grad_(), batch.predictor.clone().requires_grad_()
    loss = module(encoder, predictor, *batch[4:])
    loss.sum().backward()
    found = {
        "loss": loss.detach(),
        "d_encoder": encoder.grad,
        "d_predictor": predictor.grad,
        **{f"d_linear_{name}": x.grad for name, x in module.output.named_parameters()},
    }
    assert_same_bits(found, results(batch, backend=place.backend, blank=0, tile_rows=7))


def test_joint_loss_passes_everything_on():
    batch = ragged(3, 8, 3, 5, 6, blank=2)
    options = {
        "activation": "sigmoid", "blank": 2, "fastemit_lambda": 0.2, "clamp": 0.1, "reduction": "mean_target",
        "occupancy_threshold": 0.05, "tile_rows": 3, "validate": False,
    }  # fmt: skip
    module = module_of(batch, dropout_p=0.3, **options)
    torch.manual_seed(1)
    module(*batch[:2], *batch[4:]).backward()
    weight = batch.linear_weight.clone().requires_grad_()
    torch.manual_seed(1)
    joint_loss(batch._replace(linear_weight=weight), dropout_p=0.3, backend="reference", **options).backward()
    assert torch.equal(module.output.weight.grad, weight.grad)


def test_projections():
    torch.manual_seed(0)
    module = rnnt.RNNTJointLoss(6, 5, encoder_features=9, predictor_features=7, backend="reference", reduction="none")
    assert sorted(module.state_dict()) == [
        "encoder_projection.bias",
        "encoder_projection.weight",
        "output.bias",
        "output.weight",
        "predictor_projection.bias",
        "predictor_projection.weight",
    ]
    batch = ragged(3, 5, 3, 5, 6).cast(torch.float32)
    encoder, predictor = torch.randn(3, 5, 9), torch.randn(3, 4, 7)
    loss = module(encoder, predictor, *batch[4:])
    layer = module.output
    projected = batch._replace(
        encoder=module.encoder_projection(encoder), predictor=module.predictor_projection(predictor),
        linear_weight=layer.weight, linear_bias=layer.bias,
    )  # fmt: skip
    assert torch.equal(loss, joint_loss(projected, reduction="none", backend="reference"))
    loss.sum().backward()
    assert all(x.grad is not None and x.grad.any() for x in module.parameters())


def test_without_projections_and_bias_one_weight_is_owned():
    module = rnnt.RNNTJointLoss(6, 5, bias=False)
    assert {name: tuple(x.shape) for name, x in module.named_parameters()} == {"output.weight": (5, 6)}


@pytest.mark.parametrize("activation", ["tanh", "relu", "sigmoid"])
def test_logits_are_the_scores_of_the_loss(activation):
    batch = ragged(2, 4, 3, 5, 6)
    batch = batch._replace(encoder_lengths=torch.tensor([4, 4]), target_lengths=torch.tensor([3, 3]))
    module = module_of(batch, reduction="none", activation=activation, dropout_p=0.5).eval()
    scores = module.logits(batch.encoder[:, :, None], batch.predictor[:, None])
    assert scores.shape == (2, 4, 4, 5)
    loss = rnnt.rnnt_loss(scores, *batch[4:], reduction="none", backend="reference")
    torch.testing.assert_close(loss, module(*batch[:2], *batch[4:]), rtol=1e-12, atol=0)
    step = module.logits(batch.encoder[0, 0], batch.predictor[0, 0])  # as in decoding: one frame, one state
    assert step.shape == (5,)


def test_dropout_follows_the_mode():
    batch = ragged(3, 5, 3, 5, 6)
    module = module_of(batch, dropout_p=0.5, reduction="none")
    plain = joint_loss(batch, reduction="none", backend="reference")
    assert torch.equal(module.eval()(*batch[:2], *batch[4:]), plain)
    assert not torch.equal(module.train()(*batch[:2], *batch[4:]), plain)


def test_states_of_another_size():
    module = rnnt.RNNTJointLoss(6, 5, encoder_features=9, predictor_features=7, backend="reference")
    batch = ragged(3, 5, 3, 5, 6).cast(torch.float32)
    with pytest.raises(ValueError, match="encoder: expected F_encoder = 9, got 6"):
        module(*batch[:2], *batch[4:])
    with pytest.raises(ValueError, match="predictor: expected F_predictor = 7, got 6"):
        module.logits(torch.randn(3, 9), torch.randn(3, 6))


def test_ordinary_module(tmp_path):
    module = rnnt.RNNTJointLoss(6, 5, encoder_features=9, backend="reference")
    batch = ragged(3, 5, 3, 5, 6).cast(torch.float32)
    call = (torch.randn(3, 5, 9), batch.predictor, *batch[4:])
    expected = module(*call)
    assert copy.deepcopy(module)(*call) == expected
    assert pickle.loads(pickle.dumps(module))(*call) == expected
    torch.save(module.state_dict(), tmp_path / "module.pt")
    other = rnnt.RNNTJointLoss(6, 5, encoder_features=9, backend="reference")
    other.load_state_dict(torch.load(tmp_path / "module.pt"))
    assert other(*call) == expected
    assert module.double().output.weight.dtype == torch.float64
    assert "blank=4, reduction='mean', backend='reference'" in repr(module)


def test_parameters_are_made_where_asked():
    module = rnnt.RNNTJointLoss(6, 5, encoder_features=9, predictor_features=7, device="meta", dtype=torch.bfloat16)
    assert {(x.device.type, x.dtype) for x in module.parameters()} == {("meta", torch.bfloat16)}
