"""The pipeline in order, as operators of torch.library: joint -> log_probs -> lattice -> losses [B], and back.

    forward     log_probs_fwd (joint included) -> lattice_fwd -> lattice_bwd (the occupancies)
    backward    live_rows, then for each tile of these { joint_fwd -> log_probs_bwd -> weight_bwd -> hidden_bwd
                -> joint_bwd }

What lives through a tile: hidden [tile, H], in the backward pass also d_logits [tile, V].  What is kept from forward
to backward: three numbers a row (lse and two occupancies; untiled: the logits too, in the compute dtype).
Packed tensors have `rows` rows: N where the host knows it, else its bound B T U1.  No step waits for the device, but
for the check of lengths and labels, which a kernel makes before log_probs_fwd and whose verdict is waited for behind
the launch of that.
Before: backends.py.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rnnt.derivative import undifferentiable
from rnnt.problem import Alignment, JointProblem, lse_dtype
from rnnt.scale import scale_of
from rnnt.triton.config import ceil_to, configs
from rnnt.triton.host_copy import HostCopy
from rnnt.triton.joint import joint_bwd, joint_fwd
from rnnt.triton.lattice import losses_and_occupancies
from rnnt.triton.live_rows import LiveCount, live_rows
from rnnt.triton.log_probs import log_probs_bwd, log_probs_fwd
from rnnt.triton.operands import Operands, weight_operand
from rnnt.triton.output_layer import hidden_bwd, weight_bwd, weight_shares
from rnnt.triton.packing import pack, place_utterances, unpack
from rnnt.triton.tiles import backward_tile
from rnnt.triton.upstream import gradient_scales

# Lattices of more rows are not scored before the check: until N is known, tensors have room for padding too.
UNCHECKED_ROWS = 2**21


def joint_loss(problem: JointProblem) -> Tensor:
    alignment = problem.alignment
    on_host = alignment.check is not None and alignment.check.on_host
    if _watched() or on_host or problem.tile_rows is None or alignment.rows > UNCHECKED_ROWS:
        problem = problem.checked()
    arguments = (
        *_joint_arguments(problem), problem.fastemit_lambda, problem.clamp, problem.occupancy_threshold,
        _wanted(problem),
    )  # fmt: skip
    if torch.compiler.is_compiling():
        losses, *_ = joint_loss_operator(*arguments)
    else:
        losses, *_ = _JointLoss.apply(*arguments, problem.alignment)
    return losses


def joint_log_probs(problem: JointProblem) -> tuple[Tensor, Tensor]:
    apply = joint_log_probs_operator if torch.compiler.is_compiling() else _JointLogProbs.apply
    logp_blank, logp_label, *_ = apply(*_joint_arguments(problem))
    return logp_blank, logp_label


def _wanted(problem: JointProblem) -> bool:
    inputs = [problem.encoder, problem.predictor, problem.linear_weight, problem.linear_bias]
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)


def _joint_arguments(problem: JointProblem) -> tuple[Any, ...]:
    alignment = problem.alignment
    return (
        problem.encoder, problem.predictor, problem.linear_weight, problem.linear_bias,
        alignment.targets, alignment.encoder_lengths, alignment.target_lengths, problem.seed,
        alignment.blank, alignment.rows, problem.activation, problem.dropout_p,
        problem.tile_rows if isinstance(problem.tile_rows, int) else 0, problem.tile_rows is None,
        problem.compute_dtype,
    )  # fmt: skip


def _watched() -> bool:
    """Whether something looks at operators, as a compiler or a dispatch mode does: nobody else needs them, and calling
    what is in them takes the host a third of the time."""
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0


# The two joint operators, their shared forward and backward passes.


def _operands(
    encoder: Tensor, predictor: Tensor, linear_weight: Tensor, linear_bias: Tensor | None,
    targets: Tensor, encoder_lengths: Tensor, target_lengths: Tensor, seed: Tensor | None,
    blank: int, rows: int, activation: str, dropout_p: float, dtype: torch.dtype, offsets: Tensor | None = None,
) -> Operands:  # fmt: skip
    alignment = Alignment(targets.contiguous(), encoder_lengths, target_lengths, blank, encoder.shape[1], rows)
    if offsets is None:
        offsets, target_lengths, _ = place_utterances(alignment)
        alignment = replace(alignment, target_lengths=target_lengths)
    weight, bias = weight_operand(linear_weight, dtype), None if linear_bias is None else linear_bias.contiguous()
    return Operands(encoder, predictor, weight, bias, alignment, offsets, seed, activation, dropout_p)


def _score(x: Operands, tile_rows: int, keep_logits: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """logp_blank, logp_label [rows] float32, lse [rows]; logits [rows, V padded] when kept, else empty."""
    rows, device = x.alignment.rows, x.weight.device
    logp_blank, logp_label = (torch.empty(rows, dtype=torch.float32, device=device) for _ in range(2))
    lse = torch.empty(rows, dtype=lse_dtype(x.weight.dtype), device=device)
    logits = x.weight.new_empty((rows if keep_logits else 0, x.padded_classes))
    log_probs_fwd(x, tile_rows, logp_blank, logp_label, lse, logits if keep_logits else None)
    return logp_blank, logp_label, lse, logits


def _loss_forward(
    encoder: Tensor, predictor: Tensor, linear_weight: Tensor, linear_bias: Tensor | None,
    targets: Tensor, encoder_lengths: Tensor, target_lengths: Tensor, seed: Tensor | None,
    blank: int, rows: int, activation: str, dropout_p: float,
    tile_rows: int, untiled: bool, dtype: torch.dtype,
    fastemit_lambda: float, clamp: float, occupancy_threshold: float, with_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """losses [B]; for the backward pass occupancy_blank, occupancy_label, lse [rows], offsets and, untiled, logits."""
    x = _operands(
        encoder, predictor, linear_weight, linear_bias, targets, encoder_lengths, target_lengths, seed,
        blank, rows, activation, dropout_p, dtype,
    )  # fmt: skip
    scores = _score(x, tile_rows, untiled and with_gradient)
    return _losses(x, scores, rows, with_gradient)


def _losses(
    x: Operands, scores: tuple[Tensor, Tensor, Tensor, Tensor], rows: int, with_gradient: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What _loss_forward returns, of its scores; rows: N, which may have been unknown when there was room made for
    these."""
    *planes, logits = scores
    logp_blank, logp_label, lse = planes if rows == len(planes[0]) else [plane[:rows] for plane in planes]
    losses, occupancy_blank, occupancy_label = losses_and_occupancies(
        logp_blank, logp_label, x.offsets, x.alignment.encoder_lengths, x.alignment.target_lengths, x.columns,
        with_gradient,
    )  # fmt: skip
    return losses, occupancy_blank, occupancy_label, lse, x.offsets, logits


joint_loss_operator = torch.library.custom_op("rnnt::triton_joint_loss", _loss_forward, mutates_args=())


@joint_loss_operator.register_fake
def _(
    encoder, predictor, linear_weight, linear_bias, targets, encoder_lengths, target_lengths, seed,
    blank, rows, activation, dropout_p, tile_rows, untiled, dtype,
    fastemit_lambda, clamp, occupancy_threshold, with_gradient,
):  # type: ignore[no-untyped-def]  # fmt: skip
    kept = rows if with_gradient else 0
    padded = ceil_to(linear_weight.shape[0], configs(dtype).pad_v)
    return (
        encoder.new_empty(encoder.shape[0], dtype=torch.float32),
        encoder.new_empty(kept, dtype=torch.float32),
        encoder.new_empty(kept, dtype=torch.float32),
        encoder.new_empty(rows, dtype=lse_dtype(dtype)),
        targets.new_empty(encoder.shape[0] + 1, dtype=torch.int64),
        encoder.new_empty((kept if untiled else 0, padded), dtype=dtype),
    )


def _log_probs_forward(
    encoder: Tensor, predictor: Tensor, linear_weight: Tensor, linear_bias: Tensor | None,
    targets: Tensor, encoder_lengths: Tensor, target_lengths: Tensor, seed: Tensor | None,
    blank: int, rows: int, activation: str, dropout_p: float,
    tile_rows: int, untiled: bool, dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """logp_blank [B, T, U1], logp_label [B, T, U]; for the backward pass lse [rows], offsets and, untiled, logits."""
    x = _operands(
        encoder, predictor, linear_weight, linear_bias, targets, encoder_lengths, target_lengths, seed,
        blank, rows, activation, dropout_p, dtype,
    )  # fmt: skip
    logp_blank, logp_label, lse, logits = _score(x, tile_rows, untiled)
    dense_blank = unpack(logp_blank, x.alignment)
    dense_label = unpack(logp_label, x.alignment)[:, :, :-1].contiguous()
    return dense_blank, dense_label, lse, x.offsets, logits


joint_log_probs_operator = torch.library.custom_op("rnnt::triton_joint_log_probs", _log_probs_forward, mutates_args=())


@joint_log_probs_operator.register_fake
def _(
    encoder, predictor, linear_weight, linear_bias, targets, encoder_lengths, target_lengths, seed,
    blank, rows, activation, dropout_p, tile_rows, untiled, dtype,
):  # type: ignore[no-untyped-def]  # fmt: skip
    utterances, frames, _ = encoder.shape
    columns = predictor.shape[1]
    padded = ceil_to(linear_weight.shape[0], configs(dtype).pad_v)
    return (
        encoder.new_empty((utterances, frames, columns), dtype=torch.float32),
        encoder.new_empty((utterances, frames, columns - 1), dtype=torch.float32),
        encoder.new_empty(rows, dtype=lse_dtype(dtype)),
        targets.new_empty(utterances + 1, dtype=torch.int64),
        encoder.new_empty((rows if untiled else 0, padded), dtype=dtype),
    )


def _backward(
    encoder: Tensor, predictor: Tensor, linear_weight: Tensor, linear_bias: Tensor | None,
    targets: Tensor, encoder_lengths: Tensor, target_lengths: Tensor, seed: Tensor | None,
    blank: int, rows: int, activation: str, dropout_p: float,
    tile_rows: int, untiled: bool, dtype: torch.dtype,
    weight_blank: Tensor, weight_label: Tensor, lse: Tensor, offsets: Tensor, logits: Tensor, upstream: Tensor,
    fastemit_lambda: float, clamp: float, occupancy_threshold: float, needed: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of encoder, predictor, linear_weight, linear_bias (needed or not: four bools; empty where not).

    weight_blank, weight_label [rows]: minus the derivative of one utterance's loss by its log-probabilities, before
    FastEmit; upstream [B]: what multiplies them.
    """
    x = _operands(
        encoder, predictor, linear_weight, linear_bias, targets, encoder_lengths, target_lengths, seed,
        blank, rows, activation, dropout_p, dtype, offsets,
    )  # fmt: skip
    need_encoder, need_predictor, need_weight, need_bias = needed
    float32, device = torch.float32, encoder.device
    tile = backward_tile(x, tile_rows)
    shares = weight_shares(x) if need_weight else 0
    bias_shares = tile // x.configs.log_probs_bwd.block_rows if need_bias else 0
    d_encoder = encoder.new_zeros(encoder.shape if need_encoder else 0)
    shapes = [
        predictor.shape if need_predictor else (0,),
        (shares, x.padded_classes, x.padded_features),
        (bias_shares, x.padded_classes),
    ]
    sizes = [math.prod(shape) for shape in shapes]
    sums = torch.zeros(sum(sizes), dtype=float32, device=device).split(sizes)
    d_predictor, d_weight, d_bias = (total.view(shape) for total, shape in zip(sums, shapes, strict=True))

    row, slot, count = live_rows(weight_blank, weight_label, occupancy_threshold)
    live_count = LiveCount(count)
    scales = gradient_scales(upstream, x.weight, dropout_p, 1 + fastemit_lambda)

    hidden = torch.empty((tile, x.padded_features), dtype=dtype, device=device)
    d_logits = torch.empty((tile, x.padded_classes), dtype=dtype, device=device)
    label = torch.empty(tile, dtype=torch.int32, device=device)
    frame = torch.empty(tile, dtype=torch.int64, device=device)
    scale = torch.empty(tile, dtype=float32, device=device)
    steps = [
        joint_fwd(x, row, count, scales.upstream, hidden, label, frame, scale),
        log_probs_bwd(
            x, hidden, row, count, label, scale, logits if untiled else None, lse,
            weight_blank, weight_label, 1 + fastemit_lambda, clamp, d_logits, d_bias if need_bias else None,
        ),
    ]  # fmt: skip
    if need_weight:
        steps.append(weight_bwd(x, d_logits, hidden, count, d_weight))
    if need_encoder or need_predictor:
        steps.append(hidden_bwd(x, d_logits, hidden, row, count, scales.state_scale))  # hidden is d_pre from here on
        d_states = d_encoder if need_encoder else None, d_predictor if need_predictor else None
        steps.append(joint_bwd(x, hidden, frame, slot, count, scales.state_unit, *d_states))
    for first in range(0, rows, tile):
        if live_count.end_before(first):
            break
        for step in steps:
            step(first)
    del hidden, d_logits, steps

    classes, features = linear_weight.shape
    return (
        d_encoder,
        _finished(d_predictor, scales.state_unit, predictor),
        _finished(
            d_weight.sum(0)[:classes, :features] if need_weight else d_weight.flatten(), scales.unit, linear_weight
        ),
        _finished(
            d_bias.sum(0)[:classes] if need_bias else d_bias.flatten(),
            scales.unit,
            linear_weight if linear_bias is None else linear_bias,
        ),
    )


def _finished(total: Tensor, unit: Tensor, like: Tensor) -> Tensor:
    """A float32 sum times unit, in the dtype of its input."""
    return torch.mul(total, unit, out=like.new_empty(total.shape))


joint_bwd_operator = torch.library.custom_op("rnnt::triton_joint_bwd", _backward, mutates_args=())


@joint_bwd_operator.register_fake
def _(
    encoder, predictor, linear_weight, linear_bias, targets, encoder_lengths, target_lengths, seed,
    blank, rows, activation, dropout_p, tile_rows, untiled, dtype,
    weight_blank, weight_label, lse, offsets, logits, upstream, fastemit_lambda, clamp, occupancy_threshold, needed,
):  # type: ignore[no-untyped-def]  # fmt: skip
    bias = linear_weight.new_empty(linear_weight.shape[0]) if linear_bias is None else linear_bias
    inputs = encoder, predictor, linear_weight, bias
    return tuple(
        torch.empty(x.shape if need else (0,), dtype=x.dtype, device=x.device)
        for x, need in zip(inputs, needed, strict=True)
    )


def _joint_context(ctx: Any, inputs: tuple[Any, ...], rows: int, *kept: Tensor) -> None:
    tensors, ctx.numbers = inputs[:8], (inputs[8], rows, *inputs[10:15])
    ctx.mark_non_differentiable(*kept)
    ctx.save_for_backward(*tensors, *kept)
    ctx.set_materialize_grads(False)


def _joint_backward(
    ctx: Any, tensors: Sequence[Tensor], weight_blank: Tensor, weight_label: Tensor,
    lse: Tensor, offsets: Tensor, logits: Tensor, upstream: Tensor,
    fastemit_lambda: float, clamp: float, occupancy_threshold: float,
) -> Sequence[Tensor | None]:  # fmt: skip
    """Gradients of the four float inputs."""
    needed = [need and x is not None for need, x in zip(ctx.needs_input_grad[:4], tensors[:4], strict=True)]
    backward: Callable[..., tuple[Tensor, ...]] = joint_bwd_operator if _watched() else _backward
    gradients = backward(
        *tensors, *ctx.numbers, weight_blank, weight_label, lse, offsets, logits, upstream.float().contiguous(),
        fastemit_lambda, clamp, occupancy_threshold, needed,
    )  # fmt: skip
    return [gradient if need else None for gradient, need in zip(gradients, needed, strict=True)]


def _joint_loss_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    lse = output[3]
    _joint_context(ctx, inputs, lse.shape[0], *output[1:])
    ctx.options = inputs[15:18]


def _joint_loss_backward(ctx: Any, d_losses: Tensor | None, *_: Any, once: bool = False) -> tuple[Any, ...]:
    """once: under create_graph=True, gradients are ones that raise when differentiated."""
    if d_losses is None:
        return (None,) * 19
    *tensors, weight_blank, weight_label, lse, offsets, logits = ctx.saved_tensors  # once: checkpointing allows no more
    kept = weight_blank, weight_label, lse, offsets, logits
    gradients = _joint_backward(ctx, tensors, *kept, d_losses, *ctx.options)
    if once and torch.is_grad_enabled():
        gradients = undifferentiable(gradients, [*tensors[:4], d_losses])
    return *gradients, *(None,) * 15


joint_loss_operator.register_autograd(_joint_loss_backward, setup_context=_joint_loss_context)


class _JointLoss(torch.autograd.Function):
    """The operator with its derivative, at a third of the host's time that an operator's own derivative takes, and with
    the check of lengths and labels in it."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        *arguments, alignment = inputs
        if _watched():
            results = joint_loss_operator(*arguments)
        elif alignment.check is None:
            results = _loss_forward(*arguments)
        else:
            placed = place_utterances(alignment, alignment.check)
            verdict = HostCopy(placed.verdict)
            tile_rows, dtype = arguments[12], arguments[14]
            operands = (*arguments[:6], placed.target_lengths, *arguments[7:12], dtype, placed.offsets)
            x = _operands(*operands)
            scores = _score(x, tile_rows, keep_logits=False)
            rows, *wrong = verdict.arrived().tolist()  # the device is at work on the scores meanwhile
            if any(wrong):
                alignment.check.rows()  # says what is wrong
            results = _losses(x, scores, rows, with_gradient=arguments[18])
        _joint_loss_context(ctx, inputs, results)
        return results

    @staticmethod
    def backward(ctx: Any, *d_results: Any) -> tuple[Any, ...]:
        return *_joint_loss_backward(ctx, *d_results, once=True), None


def _joint_log_probs_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    lse = output[2]
    _joint_context(ctx, inputs, lse.shape[0], *output[2:])


def _joint_log_probs_backward(
    ctx: Any, d_blank: Tensor | None, d_label: Tensor | None, *_: Any, once: bool = False
) -> tuple[Any, ...]:
    """once: as in _joint_loss_backward."""
    given = d_blank, d_label
    if d_blank is None and d_label is None:
        return (None,) * 15
    *tensors, lse, offsets, logits = ctx.saved_tensors
    encoder, predictor, _, _, targets, encoder_lengths, target_lengths, _ = tensors
    blank, rows = ctx.numbers[:2]
    alignment = Alignment(targets, encoder_lengths, target_lengths, blank, encoder.shape[1], rows)
    shape = (encoder.shape[0], encoder.shape[1], predictor.shape[1])
    d_blank = encoder.new_zeros(shape, dtype=torch.float32) if d_blank is None else d_blank
    d_label = encoder.new_zeros((*shape[:2], shape[2] - 1), dtype=torch.float32) if d_label is None else d_label
    weight_blank, weight_label = pack(-d_blank, -d_label, alignment)
    upstream = encoder.new_ones(shape[0], dtype=torch.float32)
    if ctx.numbers[-1] == torch.float16:
        scale = scale_of(weight_blank, weight_label)
        upstream, weight_blank, weight_label = upstream * scale, weight_blank / scale, weight_label / scale
    weights = weight_blank, weight_label
    gradients = _joint_backward(ctx, tensors, *weights, lse, offsets, logits, upstream, 0.0, 0.0, 0.0)
    if once and torch.is_grad_enabled():
        gradients = undifferentiable(gradients, [*tensors[:4], *given])
    return *gradients, *(None,) * 11


joint_log_probs_operator.register_autograd(_joint_log_probs_backward, setup_context=_joint_log_probs_context)


class _JointLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        results = (joint_log_probs_operator if _watched() else _log_probs_forward)(*arguments)
        _joint_log_probs_context(ctx, arguments, results)
        return results

    @staticmethod
    def backward(ctx: Any, *d_results: Any) -> tuple[Any, ...]:
        return _joint_log_probs_backward(ctx, *d_results, once=True)
