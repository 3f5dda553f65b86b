"""The loss as modules: `RNNTLoss` for dense scores, `RNNTJointLoss` with the joint network inside.

`RNNTJointLoss` owns the output layer (and the two projections when their feature sizes are given), so that autocast,
DistributedDataParallel and FSDP see one ordinary module whose forward uses its own parameters.  Put it inside the
module that is wrapped: a loss called on raw weights outside the wrapper's forward would leave their gradients unshared
among ranks.  FSDP2's fully_shard takes it as one unit, alone or with the modules around it (docs/distributed.md): the
forward reads the output layer's weight without calling that layer, whose own unit would not gather it.  After: api.py.
"""

import torch
from torch import Tensor, nn

from rnnt.api import joint_rnnt_loss, rnnt_loss
from rnnt.backends import NAMES
from rnnt.problem import (
    ACTIVATIONS,
    REDUCTIONS,
    check_blank,
    check_clamp,
    check_count,
    check_dropout,
    check_fastemit,
    check_flag,
    check_integer,
    check_name,
    check_number,
    check_occupancy_threshold,
    check_size,
    check_tile_rows,
)


class RNNTLoss(nn.Module):
    """`rnnt.rnnt_loss` as a module; constructor arguments as torchaudio.transforms.RNNTLoss, then keywords.

    forward(logits [B, T, U1, V], targets [B, U], logit_lengths [B], target_lengths [B]) -> [B] or scalar.
    """

    def __init__(
        self,
        blank: int = -1,
        clamp: float = -1,
        reduction: str = "mean",
        fused_log_softmax: bool = True,
        *,
        fastemit_lambda: float = 0.0,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        check_name("reduction", reduction, REDUCTIONS)
        check_name("backend", backend, (*NAMES, "auto"))
        self.blank = check_integer("blank", blank)
        self.clamp = check_number("clamp", clamp)
        self.reduction = reduction
        self.fused_log_softmax = check_flag("fused_log_softmax", fused_log_softmax)
        self.fastemit_lambda = check_fastemit(fastemit_lambda)
        self.backend = backend

    def forward(self, logits: Tensor, targets: Tensor, logit_lengths: Tensor, target_lengths: Tensor) -> Tensor:
        return rnnt_loss(
            logits,
            targets,
            logit_lengths,
            target_lengths,
            self.blank,
            self.clamp,
            self.reduction,
            self.fused_log_softmax,
            fastemit_lambda=self.fastemit_lambda,
            backend=self.backend,
        )

    def extra_repr(self) -> str:
        return f"blank={self.blank}, reduction={self.reduction!r}, backend={self.backend!r}"


class RNNTJointLoss(nn.Module):
    """Joint network and transducer loss: `rnnt.joint_rnnt_loss` with the parameters it needs.

    Args:
        joint_features: H.
        vocab_size: V, blank included.
        encoder_features: size of the encoder's states when they are to be projected to H here; None: they have H.
        predictor_features: likewise for the prediction network's states.
        bias: give the output layer (and the projections) a bias.
        activation, dropout_p, blank, fastemit_lambda, clamp, reduction, backend, tile_rows, occupancy_threshold,
            validate: as in `rnnt.joint_rnnt_loss`; dropout is active in training mode only.

    forward(encoder [B, T, F_encoder], predictor [B, U1, F_predictor], targets [B, U], encoder_lengths [B],
    target_lengths [B]) -> [B] or scalar.  Raises: as `rnnt.joint_rnnt_loss`; ValueError too where states are not of the
    size that is to be projected.
    """

    def __init__(
        self,
        joint_features: int,
        vocab_size: int,
        *,
        encoder_features: int | None = None,
        predictor_features: int | None = None,
        bias: bool = True,
        activation: str = "tanh",
        dropout_p: float = 0.0,
        blank: int = -1,
        fastemit_lambda: float = 0.0,
        clamp: float = -1,
        reduction: str = "mean",
        backend: str = "auto",
        tile_rows: int | str | None = "auto",
        occupancy_threshold: float | str = "auto",
        validate: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for name, size in (
            ("joint_features", joint_features),
            ("encoder_features", encoder_features),
            ("predictor_features", predictor_features),
        ):
            if size is not None:
                check_count(name, size)
        check_name("activation", activation, ACTIVATIONS)
        check_name("reduction", reduction, REDUCTIONS)
        check_name("backend", backend, (*NAMES, "auto"))
        self.activation = activation
        self.dropout_p = check_dropout(dropout_p)
        self.blank = check_blank(blank, vocab_size)
        self.fastemit_lambda = check_fastemit(fastemit_lambda)
        self.clamp = check_clamp(clamp)
        self.reduction = reduction
        self.backend = backend
        self.tile_rows = check_tile_rows(tile_rows)
        check_occupancy_threshold(occupancy_threshold, torch.float32, self.clamp)
        self.occupancy_threshold = occupancy_threshold
        self.validate = check_flag("validate", validate)
        self.encoder_projection: nn.Module = nn.Identity()
        self.predictor_projection: nn.Module = nn.Identity()
        if encoder_features is not None:
            self.encoder_projection = nn.Linear(encoder_features, joint_features, bias, device, dtype)
        if predictor_features is not None:
            self.predictor_projection = nn.Linear(predictor_features, joint_features, bias, device, dtype)
        self.output = nn.Linear(joint_features, vocab_size, bias, device, dtype)

    def forward(
        self, encoder: Tensor, predictor: Tensor, targets: Tensor, encoder_lengths: Tensor, target_lengths: Tensor
    ) -> Tensor:
        return joint_rnnt_loss(
            _projected("encoder", encoder, self.encoder_projection),
            _projected("predictor", predictor, self.predictor_projection),
            self.output.weight,
            targets,
            encoder_lengths,
            target_lengths,
            linear_bias=self.output.bias,
            activation=self.activation,
            dropout_p=self.dropout_p if self.training else 0.0,
            blank=self.blank,
            fastemit_lambda=self.fastemit_lambda,
            clamp=self.clamp,
            reduction=self.reduction,
            backend=self.backend,
            tile_rows=self.tile_rows,
            occupancy_threshold=self.occupancy_threshold,
            validate=self.validate,
        )

    def logits(self, encoder: Tensor, predictor: Tensor) -> Tensor:
        """[..., V] scores for decoding, without dropout: encoder [..., F_encoder] and predictor [..., F_predictor]
        broadcast against each other after projection."""
        hidden = _projected("encoder", encoder, self.encoder_projection)
        hidden = hidden + _projected("predictor", predictor, self.predictor_projection)
        return self.output(getattr(torch, self.activation)(hidden))

    def extra_repr(self) -> str:
        return f"{self.activation}, blank={self.blank}, reduction={self.reduction!r}, backend={self.backend!r}"


def _projected(name: str, states: Tensor, projection: nn.Module) -> Tensor:
    if isinstance(projection, nn.Linear) and isinstance(states, Tensor) and states.dim() > 0:
        check_size(name, f"F_{name}", projection.in_features, states.shape[-1])
    return projection(states)
