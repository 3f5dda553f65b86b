"""The public functions: check, choose a backend, reduce.

    joint_rnnt_loss            joint -> log_probs -> lattice -> loss
    joint_log_probs            joint -> log_probs
    rnnt_loss                           log_probs -> lattice -> loss
    rnnt_loss_from_log_probs                         lattice -> loss

    loss[b] = -log sum over alignments of  prod over their arcs of  p(blank | t, u) or p(y[u+1] | t, u)

Shapes: B utterances, T frames, U labels, U1 = U + 1, V vocabulary with blank, H joint width.
Losses are float32 (float64 for float64 inputs), gradients have their input's dtype; each can be taken once: a second
derivative raises RuntimeError.  Graves 2012, arXiv:1211.3711; FastEmit: Yu et al. 2020, arXiv:2010.11148.
Before: the user's model, or modules.py.  After: problem.py, validation.py, backends.py.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from rnnt.backends import choose
from rnnt.derivative import differentiable_once
from rnnt.problem import (
    ACTIVATIONS,
    REDUCTIONS,
    Alignment,
    JointProblem,
    LogitsProblem,
    LogProbsProblem,
    check_blank,
    check_clamp,
    check_dropout,
    check_fastemit,
    check_flag,
    check_float,
    check_integers,
    check_name,
    check_occupancy_threshold,
    check_size,
    check_tile_rows,
    compute_dtype,
    loss_dtype,
)
from rnnt.validation import Check, checked_lengths


def rnnt_loss(
    logits: Tensor,
    targets: Tensor,
    logit_lengths: Tensor,
    target_lengths: Tensor,
    blank: int = -1,
    clamp: float = -1,
    reduction: str = "mean",
    fused_log_softmax: bool = True,
    *,
    fastemit_lambda: float = 0.0,
    backend: str = "auto",
    validate: bool = True,
) -> Tensor:
    """Transducer loss of dense scores; its arguments stand in the order of torchaudio.functional.rnnt_loss.

    Args:
        logits: [B, T, U1, V] float; log-probabilities when fused_log_softmax is False.
        targets: [B, U] int32 or int64; entries past target_lengths are not read.
        logit_lengths: [B] int32 or int64 frames of each utterance, 1 <= length <= T; may live on the CPU.
        target_lengths: [B] int32 or int64 labels of each utterance, 0 <= length <= U; may live on the CPU.
        blank: index of the blank, in [-V, V).
        clamp: when > 0, bound of each entry of one utterance's gradient at logits, before the reduction and the
            upstream gradient multiply it.
        reduction: "none" [B], "sum", "mean" (sum / B), "mean_target" (mean of loss / max(labels, 1)) or
            "mean_volume" (sum of losses / sum of max(labels, 1)).  Means of an empty batch are NaN.
        fused_log_softmax: apply log_softmax to logits.
        fastemit_lambda: FastEmit's lambda >= 0; scales the gradient of label arcs, not the value.
        backend: "reference", "compiled", "triton" or "auto".
        validate: check lengths and labels (one host sync when they live on an accelerator).

    Returns:
        Negative log-likelihood in nats, [B] or scalar.  inf, with gradient 0, where every alignment has probability 0.

    Raises:
        ValueError: a shape, length, label, name or number is out of range.  TypeError: a dtype or a layout is.
        ImportError: the named backend's package is missing.
    """
    check_float("logits", logits, ("B", "T", "U1", "V"))
    check_name("reduction", reduction, REDUCTIONS)
    _, frames, columns, classes = logits.shape
    _check_not_empty("logits", logits)
    alignment = _align(
        "logits", logits, frames, columns, targets, "logit_lengths", logit_lengths, target_lengths,
        blank=check_blank(blank, classes), classes=classes, validate=validate,
    ).checked()  # fmt: skip
    problem = LogitsProblem(
        logits=differentiable_once(logits)[0],
        alignment=alignment,
        log_softmax=check_flag("fused_log_softmax", fused_log_softmax),
        fastemit_lambda=check_fastemit(fastemit_lambda),
        clamp=check_clamp(clamp),
    )
    chosen = choose(backend, problem)
    if alignment.utterances == 0:
        return _reduce(_no_losses(logits), alignment, reduction)
    with _without_autocast(logits.device.type):
        return _reduce(chosen.logits_loss(problem), alignment, reduction)


def joint_rnnt_loss(
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
    fastemit_lambda: float = 0.0,
    clamp: float = -1,
    reduction: str = "mean",
    backend: str = "auto",
    tile_rows: int | str | None = "auto",
    occupancy_threshold: float | str = "auto",
    validate: bool = True,
) -> Tensor:
    """Transducer loss of the joint network; the [B, T, U1, V] tensor never exists (but in the reference backend).

        logits[b,t,u] = dropout(activation(encoder[b,t] + predictor[b,u])) linear_weight^T + linear_bias

    Args:
        encoder: [B, T, H] float, projected encoder states.
        predictor: [B, U1, H] float, projected prediction-network states, the start state included.
        linear_weight: [V, H] float, output layer.
        targets, encoder_lengths, target_lengths: as in `rnnt_loss`.
        linear_bias: [V] float, or None.
        activation: "tanh", "relu" or "sigmoid".
        dropout_p: in [0, 1); applied when > 0, after the activation.  The seed comes from torch's generator of the
            input's device; the mask depends on it alone, not on backend or tile_rows.
        blank, fastemit_lambda, clamp, reduction, backend, validate: as in `rnnt_loss`; linear_weight's gradient uses
            the clamped values.
        tile_rows: lattice rows scored at a time, "auto", or None: untiled, joint intermediates are kept.
        occupancy_threshold: lattice nodes whose posterior occupancy (blank arc + label arc of one utterance, in [0, 1])
            is below it are left out of the backward pass.  With D the sum of an utterance's occupancies left out, the
            gradient of its loss at the logits loses at most 2 D in L1 norm, that at linear_bias at most D an entry, at
            linear_weight D max |hidden| (FastEmit: times 1 + lambda).  `rnnt.debug.occupancy_report` measures it.
            "auto": 1e-4 in bfloat16, 1e-5 in float16, 1e-8 in float32, 0 in float64, times clamp where that is below
            1.  0: none is left out.

    Mixed dtypes are promoted as PyTorch promotes them; under autocast, matrix products run in autocast's dtype.

    Returns, raises: as `rnnt_loss`.
    """
    check_name("reduction", reduction, REDUCTIONS)
    problem = _joint_problem(
        encoder, predictor, linear_weight, linear_bias, targets, encoder_lengths, target_lengths,
        activation=activation, dropout_p=dropout_p, blank=blank, fastemit_lambda=fastemit_lambda, clamp=clamp,
        tile_rows=tile_rows, occupancy_threshold=occupancy_threshold, validate=validate,
    )  # fmt: skip
    chosen = choose(backend, problem)
    if not getattr(chosen, "GUARDS_ITSELF", False):
        problem = _guarded(problem)
    if problem.alignment.utterances == 0:
        return _reduce(_no_losses(*_joint_inputs(problem)), problem.alignment, reduction)
    with _without_autocast(problem.device.type):
        return _reduce(chosen.joint_loss(problem), problem.alignment, reduction)


def joint_log_probs(
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
    backend: str = "auto",
    tile_rows: int | str | None = "auto",
    validate: bool = True,
) -> tuple[Tensor, Tensor]:
    """The two log-probabilities that the recursion needs of each node; arguments as in `joint_rnnt_loss`.

    Returns:
        logp_blank [B, T, U1] and logp_label [B, T, U] (of the next label), natural log, float32 (float64 in, float64
        out), 0 outside the lengths.  Differentiable once.
    """
    problem = _joint_problem(
        encoder, predictor, linear_weight, linear_bias, targets, encoder_lengths, target_lengths,
        activation=activation, dropout_p=dropout_p, blank=blank, fastemit_lambda=0.0, clamp=-1,
        tile_rows=tile_rows, occupancy_threshold=0.0, validate=validate,
    )  # fmt: skip
    problem = _guarded(problem)
    chosen = choose(backend, problem)
    alignment = problem.alignment
    if alignment.utterances == 0:
        empty = _no_losses(*_joint_inputs(problem))
        frames, columns = alignment.frames, alignment.columns
        return empty.reshape(0, frames, columns), empty.reshape(0, frames, columns - 1)
    with _without_autocast(problem.device.type):
        return chosen.joint_log_probs(problem)


def rnnt_loss_from_log_probs(
    logp_blank: Tensor,
    logp_label: Tensor,
    encoder_lengths: Tensor,
    target_lengths: Tensor,
    *,
    fastemit_lambda: float = 0.0,
    reduction: str = "mean",
    backend: str = "auto",
    validate: bool = True,
) -> Tensor:
    """Transducer loss of the two planes that `joint_log_probs` gives.

    Args:
        logp_blank: [B, T, U1] float, natural log; not read outside the lengths.
        logp_label: [B, T, U] float, natural log of the next label's probability; not read outside the lengths.
        encoder_lengths, target_lengths, fastemit_lambda, reduction, backend, validate: as in `rnnt_loss`.

    The gradient with respect to a plane is minus the occupancy of its arcs.  Returns, raises: as `rnnt_loss`.
    """
    check_float("logp_blank", logp_blank, ("B", "T", "U1"))
    check_float("logp_label", logp_label, ("B", "T", "U"), logp_blank.device)
    check_name("reduction", reduction, REDUCTIONS)
    utterances, frames, columns = logp_blank.shape
    _check_not_empty("logp_blank", logp_blank)
    check_size("logp_label", "B", utterances, logp_label.shape[0])
    check_size("logp_label", "T", frames, logp_label.shape[1])
    check_size("logp_label", "U = U1 - 1", columns - 1, logp_label.shape[2])
    targets = torch.zeros((1, 1), dtype=torch.int64, device=logp_blank.device).expand(utterances, columns - 1)
    alignment = _align(
        "logp_blank", logp_blank, frames, columns, targets, "encoder_lengths", encoder_lengths, target_lengths,
        blank=0, classes=None, validate=validate,
    ).checked()  # fmt: skip
    logp_blank, logp_label = differentiable_once(logp_blank, logp_label)
    problem = LogProbsProblem(
        logp_blank=logp_blank,
        logp_label=logp_label,
        alignment=alignment,
        fastemit_lambda=check_fastemit(fastemit_lambda),
    )
    chosen = choose(backend, problem)
    if utterances == 0:
        return _reduce(_no_losses(logp_blank, logp_label), alignment, reduction)
    with _without_autocast(logp_blank.device.type):
        return _reduce(chosen.log_probs_loss(problem), alignment, reduction)


def _joint_problem(
    encoder: Tensor, predictor: Tensor, linear_weight: Tensor, linear_bias: Tensor | None,
    targets: Tensor, encoder_lengths: Tensor, target_lengths: Tensor, *,
    activation: str, dropout_p: float, blank: int, fastemit_lambda: float, clamp: float,
    tile_rows: int | str | None, occupancy_threshold: float | str, validate: bool,
) -> JointProblem:  # fmt: skip
    check_float("encoder", encoder, ("B", "T", "H"))
    check_float("predictor", predictor, ("B", "U1", "H"), encoder.device)
    check_float("linear_weight", linear_weight, ("V", "H"), encoder.device)
    _check_not_empty("encoder", encoder)
    _check_not_empty("linear_weight", linear_weight)
    utterances, frames, features = encoder.shape
    classes = linear_weight.shape[0]
    check_size("predictor", "B", utterances, predictor.shape[0])
    check_size("predictor", "H", features, predictor.shape[2])
    check_size("linear_weight", "H", features, linear_weight.shape[1])
    inputs = [encoder, predictor, linear_weight]
    if linear_bias is not None:
        check_float("linear_bias", linear_bias, ("V",), encoder.device)
        check_size("linear_bias", "V", classes, linear_bias.shape[0])
        inputs.append(linear_bias)
    check_name("activation", activation, ACTIVATIONS)
    dropout = check_dropout(dropout_p)
    bound = check_clamp(clamp)
    dtype = compute_dtype(*inputs)
    alignment = _align(
        "predictor", encoder, frames, predictor.shape[1], targets, "encoder_lengths", encoder_lengths, target_lengths,
        blank=check_blank(blank, classes), classes=classes, validate=validate,
    )  # fmt: skip
    seed = torch.randint(2**63 - 1, (1,), device=encoder.device) if dropout > 0 else None
    return JointProblem(
        encoder=encoder,
        predictor=predictor,
        linear_weight=linear_weight,
        linear_bias=linear_bias,
        alignment=alignment,
        activation=activation,
        dropout_p=dropout,
        seed=seed,
        fastemit_lambda=check_fastemit(fastemit_lambda),
        clamp=bound,
        tile_rows=check_tile_rows(tile_rows),
        occupancy_threshold=check_occupancy_threshold(occupancy_threshold, dtype, bound),
        compute_dtype=dtype,
    )


def _guarded(problem: JointProblem) -> JointProblem:
    """With lengths and labels found in range, and inputs whose gradients cannot be differentiated again."""
    encoder, predictor, linear_weight, *bias = differentiable_once(*_joint_inputs(problem))
    return replace(
        problem.checked(),
        encoder=encoder,
        predictor=predictor,
        linear_weight=linear_weight,
        linear_bias=bias[0] if bias else None,
    )


def _joint_inputs(problem: JointProblem) -> list[Tensor]:
    inputs = [problem.encoder, problem.predictor, problem.linear_weight]
    return inputs if problem.linear_bias is None else [*inputs, problem.linear_bias]


def _check_not_empty(name: str, x: Tensor) -> None:
    if x.shape[0] > 0 and 0 in x.shape[1:]:
        raise ValueError(f"{name}: expected no empty dimension but the batch, got {tuple(x.shape)}")
    if name == "linear_weight" and x.shape[0] == 0:
        raise ValueError(f"{name}: expected V >= 1, got {tuple(x.shape)}")


def _align(
    columns_name: str, anchor: Tensor, frames: int, columns: int, targets: Tensor,
    lengths_name: str, encoder_lengths: Tensor, target_lengths: Tensor, *,
    blank: int, classes: int | None, validate: bool,
) -> Alignment:  # fmt: skip
    """Check shapes and dtypes of the integer inputs, say how to check their values (validate), and bring them to the
    anchor's device, contiguous and int64."""
    check_flag("validate", validate)
    check_integers("targets", targets, ("B", "U"))
    check_integers(lengths_name, encoder_lengths, ("B",))
    check_integers("target_lengths", target_lengths, ("B",))
    utterances, device = anchor.shape[0], anchor.device
    check_size("targets", "B", utterances, targets.shape[0])
    check_size(lengths_name, "B", utterances, encoder_lengths.shape[0])
    check_size("target_lengths", "B", utterances, target_lengths.shape[0])
    if columns != targets.shape[1] + 1:
        labels = targets.shape[1]
        raise ValueError(
            f"{columns_name}: expected U1 = {labels + 1} columns (targets has U = {labels}), got {columns}"
        )
    rows = utterances * frames * columns
    check = None
    on_host = encoder_lengths.device.type == "cpu" and target_lengths.device.type == "cpu"
    if not validate and (on_host or device.type == "cpu") and not torch.compiler.is_compiling():
        rows = int((encoder_lengths.long() * (target_lengths.long() + 1)).sum())
    if validate and not torch.compiler.is_compiling():
        check = Check(targets, encoder_lengths, target_lengths, frames, classes, blank, lengths_name)
    targets = targets.to(device, torch.int64, non_blocking=True).contiguous()
    encoder_lengths = encoder_lengths.to(device, torch.int64, non_blocking=True).contiguous()
    target_lengths = target_lengths.to(device, torch.int64, non_blocking=True).contiguous()
    if validate and torch.compiler.is_compiling():
        encoder_lengths, target_lengths = checked_lengths(
            targets, encoder_lengths, target_lengths, frames, classes, blank, lengths_name
        ).unbind(0)
    host_sync = validate or device.type == "cpu"
    return Alignment(targets, encoder_lengths, target_lengths, blank, frames, rows, host_sync, check)


def _no_losses(*inputs: Tensor) -> Tensor:
    """[0] losses of an empty batch, joined to the inputs so that backward gives them zeros."""
    return torch.cat([x.reshape(-1)[:0].to(loss_dtype(*inputs)) for x in inputs])


def _without_autocast(device_type: str) -> AbstractContextManager[None]:
    return torch.autocast(device_type, enabled=False) if torch.is_autocast_enabled(device_type) else nullcontext()


def _reduce(losses: Tensor, alignment: Alignment, reduction: str) -> Tensor:
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    if reduction == "mean":
        return losses.sum() / alignment.utterances if alignment.utterances else losses.mean()
    labels = alignment.target_lengths.clamp(min=1).to(losses.dtype)
    if reduction == "mean_target":
        return (losses / labels).mean()
    return losses.sum() / labels.sum()
