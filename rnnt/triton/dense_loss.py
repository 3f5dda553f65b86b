"""The two entrances with dense inputs, as operators of torch.library.

    logits_loss       log_probs (logits.py) -> lattice -> losses [B]
    log_probs_loss                             lattice -> losses [B]

Before: backends.py.  Neighbour: loss.py, the entrance at the joint network.
"""

from typing import Any

import torch
from torch import Tensor

from rnnt.layout import row_offsets
from rnnt.problem import Alignment, LogitsProblem, LogProbsProblem
from rnnt.triton.lattice import losses_and_occupancies
from rnnt.triton.logits import logits_bwd, logits_fwd
from rnnt.triton.packing import pack, unpack


def logits_loss(problem: LogitsProblem) -> Tensor:
    logits, alignment = problem.logits, problem.alignment
    with_gradient = torch.is_grad_enabled() and logits.requires_grad
    losses, *_ = logits_loss_operator(
        logits, alignment.targets, alignment.encoder_lengths, alignment.target_lengths,
        alignment.blank, alignment.rows, problem.log_softmax, problem.fastemit_lambda, problem.clamp, with_gradient,
    )  # fmt: skip
    return losses


def log_probs_loss(problem: LogProbsProblem) -> Tensor:
    blank, label, alignment = problem.logp_blank, problem.logp_label, problem.alignment
    with_gradient = torch.is_grad_enabled() and (blank.requires_grad or label.requires_grad)
    losses, *_ = log_probs_loss_operator(
        blank, label, alignment.encoder_lengths, alignment.target_lengths,
        alignment.rows, problem.fastemit_lambda, with_gradient,
    )  # fmt: skip
    return losses


@torch.library.custom_op("rnnt::triton_logits_loss", mutates_args=())
def logits_loss_operator(
    logits: Tensor, targets: Tensor, encoder_lengths: Tensor, target_lengths: Tensor,
    blank: int, rows: int, log_softmax: bool, fastemit_lambda: float, clamp: float, with_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """losses [B]; for the backward pass occupancy_blank, occupancy_label, lse [rows]."""
    targets = targets.contiguous()
    alignment = Alignment(targets, encoder_lengths, target_lengths, blank, logits.shape[1], rows)
    offsets = row_offsets(alignment)
    logp_blank, logp_label, lse = logits_fwd(logits, targets, offsets, target_lengths, blank, log_softmax, rows)
    losses, occupancy_blank, occupancy_label = losses_and_occupancies(
        logp_blank, logp_label, offsets, encoder_lengths, target_lengths, logits.shape[2], with_gradient
    )
    return losses, occupancy_blank, occupancy_label, lse


@logits_loss_operator.register_fake
def _(
    logits, targets, encoder_lengths, target_lengths, blank, rows, log_softmax, fastemit_lambda, clamp, with_gradient
):  # type: ignore[no-untyped-def]
    kept = rows if with_gradient else 0
    found = (logits.new_empty(size, dtype=torch.float32) for size in (logits.shape[0], kept, kept))
    return *found, logits.new_empty(rows, dtype=torch.float64)


@torch.library.custom_op("rnnt::triton_logits_bwd", mutates_args=())
def logits_bwd_operator(
    logits: Tensor, targets: Tensor, encoder_lengths: Tensor, target_lengths: Tensor,
    lse: Tensor, weight_blank: Tensor, weight_label: Tensor, upstream: Tensor,
    blank: int, rows: int, log_softmax: bool, clamp: float,
) -> Tensor:  # fmt: skip
    """d_logits [B, T, U1, V] in the dtype of logits."""
    alignment = Alignment(targets.contiguous(), encoder_lengths, target_lengths, blank, logits.shape[1], rows)
    return logits_bwd(
        logits, alignment.targets, row_offsets(alignment), encoder_lengths, target_lengths,
        lse, weight_blank, weight_label, upstream, blank, log_softmax, clamp,
    )  # fmt: skip


@logits_bwd_operator.register_fake
def _(
    logits, targets, encoder_lengths, target_lengths, lse, weight_blank, weight_label, upstream,
    blank, rows, log_softmax, clamp,
):  # type: ignore[no-untyped-def]  # fmt: skip
    return torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)


def _logits_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, occupancy_blank, occupancy_label, lse = output
    ctx.mark_non_differentiable(occupancy_blank, occupancy_label, lse)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:4], lse, occupancy_blank, occupancy_label)
    ctx.blank, ctx.rows, ctx.log_softmax, ctx.fastemit_lambda, ctx.clamp, _ = inputs[4:]


def _logits_backward(ctx: Any, d_losses: Tensor | None, *_: Any) -> tuple[Any, ...]:
    if d_losses is None:
        return (None,) * 10
    *tensors, occupancy_label = ctx.saved_tensors
    weight_label = occupancy_label * (1 + ctx.fastemit_lambda)
    d_logits = logits_bwd_operator(
        *tensors, weight_label, d_losses.float().contiguous(), ctx.blank, ctx.rows, ctx.log_softmax, ctx.clamp
    )
    return d_logits, *(None,) * 9


logits_loss_operator.register_autograd(_logits_backward, setup_context=_logits_context)


@torch.library.custom_op("rnnt::triton_log_probs_loss", mutates_args=())
def log_probs_loss_operator(
    logp_blank: Tensor, logp_label: Tensor, encoder_lengths: Tensor, target_lengths: Tensor,
    rows: int, fastemit_lambda: float, with_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """losses [B]; for the backward pass the occupancies [B, T, U1] and [B, T, U] float32 (else empty)."""
    utterances, frames, columns = logp_blank.shape
    targets = encoder_lengths.new_zeros((utterances, columns - 1))  # labels are chosen already
    alignment = Alignment(targets, encoder_lengths, target_lengths, 0, frames, rows)
    planes = pack(logp_blank, logp_label, alignment)
    losses, occupancy_blank, occupancy_label = losses_and_occupancies(
        *planes, row_offsets(alignment), encoder_lengths, target_lengths, columns, with_gradient
    )
    if with_gradient:
        occupancy_blank = unpack(occupancy_blank, alignment)
        occupancy_label = unpack(occupancy_label, alignment)[:, :, :-1].contiguous()
    return losses, occupancy_blank, occupancy_label


@log_probs_loss_operator.register_fake
def _(logp_blank, logp_label, encoder_lengths, target_lengths, rows, fastemit_lambda, with_gradient):  # type: ignore[no-untyped-def]
    empty = (0,)
    return (
        logp_blank.new_empty(logp_blank.shape[0], dtype=torch.float32),
        logp_blank.new_empty(logp_blank.shape if with_gradient else empty, dtype=torch.float32),
        logp_blank.new_empty(logp_label.shape if with_gradient else empty, dtype=torch.float32),
    )


def _log_probs_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, occupancy_blank, occupancy_label = output
    ctx.mark_non_differentiable(occupancy_blank, occupancy_label)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(occupancy_blank, occupancy_label)
    ctx.dtypes = inputs[0].dtype, inputs[1].dtype
    ctx.fastemit_lambda = inputs[5]


def _log_probs_backward(ctx: Any, d_losses: Tensor | None, *_: Any) -> tuple[Any, ...]:
    if d_losses is None:
        return (None,) * 7
    occupancy_blank, occupancy_label = ctx.saved_tensors
    scale = -d_losses[:, None, None]
    # 0 where an occupancy is 0, as padding's and an impossible utterance's are, even when the upstream gradient is inf.
    d_blank = torch.where(occupancy_blank == 0, 0, scale * occupancy_blank)
    d_label = torch.where(occupancy_label == 0, 0, scale * (1 + ctx.fastemit_lambda) * occupancy_label)
    return d_blank.to(ctx.dtypes[0]), d_label.to(ctx.dtypes[1]), *(None,) * 5


log_probs_loss_operator.register_autograd(_log_probs_backward, setup_context=_log_probs_context)
