"""What `occupancy_threshold` leaves out of the backward pass, measured on a batch.

    w[b,t,u]   = w_blank + w_label, the occupancies of the node's two arcs;  sum over t, u = T_b + U_b
    g[b,t,u,v] = derivative of utterance b's loss at the node's logits
               = w softmax[v] - w_blank [v = blank] - w_label [v = label]

A node is left out where w < occupancy_threshold.  Its g sums to 0 over v, and what is negative in it to at least -w, so
that in L1 norm |g| <= 2 w, and no entry is beyond w.  What an utterance's gradient at the logits loses is therefore at
most 2 D, with D the sum of w over the nodes left out; d_linear_bias loses at most D an entry, d_linear_weight
D max |hidden|, each times the utterance's upstream gradient.  Relative to the gradient itself nothing follows from the
occupancies alone, but the norm needs no logits either:

    |g| = |w p_blank - w_blank| + |w p_label - w_label| + w (1 - p_blank - p_label)

Occupancies are minus the gradient of the summed loss at the two planes of log-probabilities.  Sums are float64.
Before: api.py.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rnnt.api import joint_log_probs, rnnt_loss_from_log_probs
from rnnt.problem import check_clamp, check_occupancy_threshold, compute_dtype


@dataclass(frozen=True)
class OccupancyReport:
    """All sums are over the batch, every utterance at unit scale."""

    threshold: float
    rows: int  # valid lattice nodes
    live_rows: int  # those whose occupancy reaches the threshold
    dropped_mass: float  # sum of the occupancies left out / sum of all
    gradient_error: float  # |what the gradient at the logits loses| / |gradient|, L1; with clamp an upper bound of it

    @property
    def live_share(self) -> float:
        return _ratio(self.live_rows, self.rows)

    def __str__(self) -> str:
        return (
            f"occupancy_threshold={self.threshold:g}: {self.live_rows:,} of {self.rows:,} rows are live"
            f" ({self.live_share:.1%})\n"
            f"occupancy left out: {self.dropped_mass:.2g} of all\n"
            f"gradient at the logits: {self.gradient_error:.2g} of its L1 norm lost"
        )


def occupancy_report(
    encoder: Tensor,
    predictor: Tensor,
    linear_weight: Tensor,
    targets: Tensor,
    encoder_lengths: Tensor,
    target_lengths: Tensor,
    *,
    linear_bias: Tensor | None = None,
    activation: str = "tanh",
    dropout_p: float = 0.0,
    blank: int = -1,
    clamp: float = -1,
    backend: str = "auto",
    tile_rows: int | str | None = "auto",
    occupancy_threshold: float | str = "auto",
    validate: bool = True,
) -> OccupancyReport:
    """How many rows of a batch the backward pass of `joint_rnnt_loss` works on, and what the others would have added.

    Costs a forward pass and some tensors [B, T, U1], and waits for the device; no input gets a gradient.

        print(debug.occupancy_report(encoder, predictor, weight, targets, encoder_lengths, target_lengths))

    Args: as in `rnnt.joint_rnnt_loss`.  clamp sets the automatic threshold, and rare nodes weigh more under it: of an
    entry of a gradient (none is beyond 1) it leaves at least the share min(clamp, 1), which gradient_error is divided
    by.  FastEmit does not move the threshold; the gradient here is that of the loss without it.

    Raises: as `rnnt.joint_rnnt_loss`.
    """
    with torch.no_grad():
        planes = joint_log_probs(
            encoder, predictor, linear_weight, targets, encoder_lengths, target_lengths,
            linear_bias=linear_bias, activation=activation, dropout_p=dropout_p, blank=blank,
            backend=backend, tile_rows=tile_rows, validate=validate,
        )  # fmt: skip
    inputs = [x for x in (encoder, predictor, linear_weight, linear_bias) if x is not None]
    bound = check_clamp(clamp)
    threshold = check_occupancy_threshold(occupancy_threshold, compute_dtype(*inputs), bound)

    with torch.enable_grad():
        logp_blank, logp_label = (plane.detach().requires_grad_() for plane in planes)
        loss = rnnt_loss_from_log_probs(
            logp_blank, logp_label, encoder_lengths, target_lengths, reduction="sum", backend=backend, validate=False
        )
        d_planes = torch.autograd.grad(loss, (logp_blank, logp_label), allow_unused=True, materialize_grads=True)
    w_blank, w_label = -d_planes[0].double(), _with_last_column(-d_planes[1].double())
    occupancy = w_blank + w_label  # [B, T, U1]

    _, frames, columns = occupancy.shape
    device = occupancy.device
    inside_t = torch.arange(frames, device=device) < encoder_lengths.to(device)[:, None]
    inside_u = torch.arange(columns, device=device) <= target_lengths.to(device)[:, None]
    valid = inside_t[:, :, None] & inside_u[:, None, :]
    p_blank = logp_blank.detach().double().exp()
    p_label = torch.where(valid[:, :, 1:], logp_label.detach().double().exp(), 0)  # the last column has no next label
    p_label = _with_last_column(p_label)
    gradient = (occupancy * p_blank - w_blank).abs() + (occupancy * p_label - w_label).abs()
    gradient = gradient + occupancy * (1 - p_blank - p_label).clamp(min=0)

    dropped = valid & (occupancy < threshold)  # not where it is NaN
    sums = [valid, dropped, occupancy, occupancy * dropped, gradient, gradient * dropped]
    rows, dropped_rows, mass, dropped_mass, norm, lost = torch.stack([x.double().sum() for x in sums]).tolist()
    return OccupancyReport(
        threshold=threshold,
        rows=int(rows),
        live_rows=int(rows - dropped_rows),
        dropped_mass=_ratio(dropped_mass, mass),
        gradient_error=_ratio(lost, norm) / (min(bound, 1.0) if bound > 0 else 1.0),
    )


def _with_last_column(x: Tensor) -> Tensor:
    """[B, T, U] -> [B, T, U1], with zeros."""
    return torch.nn.functional.pad(x, (0, 1))


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
