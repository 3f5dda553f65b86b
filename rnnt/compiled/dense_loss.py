"""The pipeline from dense scores (log_probs -> lattice -> losses [B]) and from the two planes (lattice -> losses [B]).

    d_logits[b,t,u]     = upstream[b] g                  g as in log_probs.py, clamped; zeros outside the lengths
    d_logp_blank[b,t,u] = -upstream[b] occupancy of the blank arc
    d_logp_label[b,t,u] = -upstream[b] (1 + fastemit_lambda) occupancy of the label arc

logits [B, T, U1, V] are read a tile of rows at a time, whatever their strides, and never outside the lengths; their
gradient is the only other tensor of their size.  The passes are operators of torch.library, as in loss.py.
Before: backends.py.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rnnt.compiled import lattice, log_probs
from rnnt.compiled.log_probs import DenseTile
from rnnt.compiled.tiles import all_nodes, compiled, look_up, plane, static_size, tables_of, tiles_of
from rnnt.problem import Alignment, LogitsProblem, LogProbsProblem, loss_dtype


def logits_loss(problem: LogitsProblem) -> Tensor:
    losses, *_ = logits_loss_operator(
        problem.logits, *_arguments(problem.alignment), problem.log_softmax, problem.clamp, problem.fastemit_lambda,
        torch.is_grad_enabled() and problem.logits.requires_grad,
    )  # fmt: skip
    return losses


def log_probs_loss(problem: LogProbsProblem) -> Tensor:
    planes = problem.logp_blank, problem.logp_label
    losses, *_ = log_probs_loss_operator(
        *planes, *_arguments(problem.alignment), problem.fastemit_lambda,
        torch.is_grad_enabled() and any(x.requires_grad for x in planes),
    )  # fmt: skip
    return losses


def _arguments(alignment: Alignment) -> tuple[Any, ...]:
    return alignment.targets, alignment.encoder_lengths, alignment.target_lengths, alignment.blank, alignment.rows


def _tile(logits: Tensor, alignment: Alignment, log_softmax: bool, clamp: float) -> DenseTile:
    classes = logits.shape[3]
    size = static_size("auto", 2 * classes * logits.dtype.itemsize, logits.dtype, logits.device)
    return DenseTile(size, classes, logits.dtype, logits.device, alignment.blank, clamp, log_softmax)


class TileScores(NamedTuple):
    """A tile of the dense scores, and its rows [rows]."""

    scores: Tensor  # [rows, V]
    label: Tensor  # -1: none
    node: Tensor  # index into a flat plane [B T U1]
    utterance: Tensor
    valid: Tensor  # bool; the others are of node 0


def _tiles(logits: Tensor, node: Tensor, size: int, alignment: Alignment) -> Iterator[TileScores]:
    tables = tables_of(alignment, keep=False, seed=None)
    for tile in tiles_of(alignment, node, size, missing=-1):
        there = tile.clamp(min=0)
        rows = look_up(tables, there)
        utterance, u = rows.frame // alignment.frames, rows.state % alignment.columns
        t = rows.frame - utterance * alignment.frames
        yield TileScores(logits[utterance, t, u].contiguous(), rows.label, there, utterance, tile >= 0)


@torch.library.custom_op("rnnt::compiled_logits_loss", mutates_args=())
def logits_loss_operator(
    logits: Tensor, targets: Tensor, encoder_lengths: Tensor, target_lengths: Tensor, blank: int, rows: int,
    log_softmax: bool, clamp: float, fastemit_lambda: float, with_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """losses [B]; for the backward pass, else empty, two weights [B, T, U1]."""
    alignment = Alignment(targets, encoder_lengths, target_lengths, blank, logits.shape[1], rows, host_sync=False)
    with torch.no_grad():
        tile, node = _tile(logits, alignment, log_softmax, clamp), all_nodes(alignment)
        call = compiled(log_probs.dense_score, tile)
        values = [call(found.scores, found.label) for found in _tiles(logits, node, tile.rows, alignment)]
        logp_blank, logp_label = (plane(x, node, alignment) for x in zip(*values, strict=True))
        return lattice.losses_and_weights(
            logp_blank, logp_label, alignment, fastemit_lambda, with_gradient=with_gradient
        )


@torch.library.custom_op("rnnt::compiled_logits_backward", mutates_args=())
def logits_backward_operator(
    logits: Tensor, targets: Tensor, encoder_lengths: Tensor, target_lengths: Tensor, blank: int, rows: int,
    log_softmax: bool, clamp: float, blank_weight: Tensor, label_weight: Tensor, upstream: Tensor,
) -> Tensor:  # fmt: skip
    """d_logits [B, T, U1, V]."""
    alignment = Alignment(targets, encoder_lengths, target_lengths, blank, logits.shape[1], rows, host_sync=False)
    d_logits = torch.zeros(logits.shape, dtype=logits.dtype, device=logits.device)
    blank_weight, label_weight = blank_weight.flatten(), label_weight.flatten()
    with torch.no_grad():
        tile, node = _tile(logits, alignment, log_softmax, clamp), all_nodes(alignment)
        call = compiled(log_probs.dense_gradient, tile)
        for own, found in zip(node.split(tile.rows), _tiles(logits, node, tile.rows, alignment), strict=True):
            weights = (torch.where(found.valid, x[found.node], 0) for x in (blank_weight, label_weight))
            gradient = call(found.scores, found.label, *weights, upstream[found.utterance])
            d_logits.view(-1, tile.classes).index_copy_(0, own, gradient[: len(own)])
    return d_logits


@torch.library.custom_op("rnnt::compiled_log_probs_loss", mutates_args=())
def log_probs_loss_operator(
    logp_blank: Tensor, logp_label: Tensor, targets: Tensor, encoder_lengths: Tensor, target_lengths: Tensor,
    blank: int, rows: int, fastemit_lambda: float, with_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """losses [B]; for the backward pass, else empty, two weights [B, T, U1]."""
    alignment = Alignment(targets, encoder_lengths, target_lengths, blank, logp_blank.shape[1], rows)
    with torch.no_grad():
        logp_label = torch.nn.functional.pad(logp_label, (0, 1))
        return lattice.losses_and_weights(
            logp_blank, logp_label, alignment, fastemit_lambda, with_gradient=with_gradient
        )


@logits_loss_operator.register_fake
def _(logits, *arguments):  # type: ignore[no-untyped-def]
    return _fake(logits.shape[:3], arguments[-1], logits)


@log_probs_loss_operator.register_fake
def _(logp_blank, logp_label, *arguments):  # type: ignore[no-untyped-def]
    return _fake(logp_blank.shape, arguments[-1], logp_blank, logp_label)


@logits_backward_operator.register_fake
def _(logits, *arguments):  # type: ignore[no-untyped-def]
    return torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)


def _fake(shape: tuple[int, ...], with_gradient: bool, *inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    losses = inputs[0].new_empty(shape[0], dtype=loss_dtype(*inputs))
    weights = losses.new_empty(shape if with_gradient else (0, 0, 0))
    return losses, weights, torch.empty_like(weights)


def _logits_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, *weights = output
    ctx.mark_non_differentiable(*weights)
    ctx.save_for_backward(*inputs[:4], *weights)
    ctx.numbers = inputs[4:8]
    ctx.set_materialize_grads(False)


def _logits_backward(ctx: Any, d_losses: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    if d_losses is None:
        return (None,) * 10
    *tensors, blank_weight, label_weight = ctx.saved_tensors
    d_logits = logits_backward_operator(*tensors, *ctx.numbers, blank_weight, label_weight, d_losses)
    return d_logits, *(None,) * 9


def _log_probs_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, *weights = output
    ctx.mark_non_differentiable(*weights)
    ctx.save_for_backward(*weights)
    ctx.dtypes = [x.dtype for x in inputs[:2]]
    ctx.set_materialize_grads(False)


def _log_probs_backward(ctx: Any, d_losses: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    if d_losses is None:
        return (None,) * 9
    blank_weight, label_weight = ctx.saved_tensors
    upstream = -d_losses[:, None, None]
    # 0 where a weight is 0, as padding's and an impossible utterance's are, even when upstream is inf.
    d_blank, d_label = (torch.where(x == 0, 0, upstream * x) for x in (blank_weight, label_weight[:, :, :-1]))
    blank_dtype, label_dtype = ctx.dtypes
    return d_blank.to(blank_dtype), d_label.to(label_dtype), *(None,) * 7


logits_loss_operator.register_autograd(_logits_backward, setup_context=_logits_context)
log_probs_loss_operator.register_autograd(_log_probs_backward, setup_context=_log_probs_context)
