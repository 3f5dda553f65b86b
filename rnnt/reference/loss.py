"""The pipeline in order: joint -> log_probs -> lattice -> losses [B].

Three extras act on gradients alone, and none holds a derivative worked out by hand:

    occupancy_threshold   the occupancies are autograd's derivative of log Z; nodes below the threshold are detached
    fastemit_lambda       the gradient that enters logp_label is scaled by 1 + lambda
    clamp                 autograd's gradient of each utterance at its scores, clamped, then times the upstream gradient

Losses are the negative log-likelihood in nats, float32 (float64 for float64 inputs).
Before: backends.py.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rnnt.layout import dense_mask
from rnnt.problem import Alignment, JointProblem, LogitsProblem, LogProbsProblem, loss_dtype
from rnnt.reference import joint as joint_stage
from rnnt.reference import log_probs as log_probs_stage
from rnnt.reference.lattice import log_likelihood


def joint_loss(problem: JointProblem) -> Tensor:
    logits = log_probs_stage.output_layer(joint_stage.joint(problem), problem)

    def losses(scores: Tensor) -> Tensor:
        planes = log_probs_stage.log_probs(scores, problem.alignment)
        if problem.occupancy_threshold > 0 and torch.is_grad_enabled():
            planes = without_small_occupancies(*planes, problem.alignment, problem.occupancy_threshold)
        return lattice_loss(*planes, problem.alignment, problem.fastemit_lambda)

    return with_clamped_gradient(losses, logits, problem.clamp)


def logits_loss(problem: LogitsProblem) -> Tensor:
    def losses(scores: Tensor) -> Tensor:
        planes = log_probs_stage.log_probs(scores, problem.alignment, problem.log_softmax)
        return lattice_loss(*planes, problem.alignment, problem.fastemit_lambda)

    return with_clamped_gradient(losses, problem.logits, problem.clamp)


def joint_log_probs(problem: JointProblem) -> tuple[Tensor, Tensor]:
    logits = log_probs_stage.output_layer(joint_stage.joint(problem), problem)
    return log_probs_stage.log_probs(logits, problem.alignment)


def log_probs_loss(problem: LogProbsProblem) -> Tensor:
    return lattice_loss(problem.logp_blank, problem.logp_label, problem.alignment, problem.fastemit_lambda)


def lattice_loss(logp_blank: Tensor, logp_label: Tensor, alignment: Alignment, fastemit_lambda: float) -> Tensor:
    """Losses [B]; inf, with gradient 0, where log Z is -inf."""
    if fastemit_lambda > 0:
        logp_label = _ScaleGradient.apply(logp_label, 1 + fastemit_lambda)
    log_z = log_likelihood(logp_blank, logp_label, alignment)
    losses = torch.where(log_z == -torch.inf, torch.inf, -log_z)
    return losses.to(loss_dtype(logp_blank, logp_label))


def without_small_occupancies(
    logp_blank: Tensor, logp_label: Tensor, alignment: Alignment, threshold: float
) -> tuple[Tensor, Tensor]:
    """The same planes, detached at nodes whose occupancy (blank arc + label arc) is below the threshold."""
    (blank_occupancy, label_occupancy), _ = gradient_of(
        lambda blank, label: log_likelihood(blank, label, alignment), logp_blank, logp_label
    )
    occupancy = blank_occupancy + torch.nn.functional.pad(label_occupancy, (0, 1))
    live = ~(occupancy < threshold) & dense_mask(alignment)  # a NaN is live: its loss is NaN, and so are its gradients
    logp_blank = torch.where(live, logp_blank, logp_blank.detach())
    return logp_blank, torch.where(live[..., :-1], logp_label, logp_label.detach())


def gradient_of(function: Callable[..., Tensor], *inputs: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
    """Gradients of function(*inputs).sum() at each input, and function(*inputs); neither is differentiable."""
    inputs = tuple(x.detach() for x in inputs)
    if torch.compiler.is_compiling():  # torch.compile follows torch.func, not torch.autograd.grad

        def total(*x: Tensor) -> tuple[Tensor, Tensor]:
            values = function(*x)
            return values.sum(), values

        return torch.func.grad(total, argnums=tuple(range(len(inputs))), has_aux=True)(*inputs)
    leaves = [x.requires_grad_() for x in inputs]
    # Hooks of a surrounding activation checkpoint are for what outlives this call; nothing here does.
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(_identity, _identity):
        values = function(*leaves)
        return torch.autograd.grad(values.sum(), leaves, allow_unused=True, materialize_grads=True), values.detach()


def _identity(x: Tensor) -> Tensor:
    return x


def with_clamped_gradient(losses: Callable[[Tensor], Tensor], scores: Tensor, clamp: float) -> Tensor:
    """losses(scores) [B], the gradient of each at scores [B, T, U1, V] bounded to [-clamp, clamp] when clamp > 0.

    Utterances share no scores, so the gradient of the sum holds each one's own.
    """
    if clamp == 0 or not (torch.is_grad_enabled() and scores.requires_grad):
        return losses(scores)

    (gradient,), values = gradient_of(losses, scores)
    return _KnownGradient.apply(scores, values, gradient.clamp(-clamp, clamp))


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, scale: float) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
        ctx.scale = inputs[1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.scale, None


class _KnownGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, values: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return values

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return (upstream[:, None, None, None] * gradient).to(gradient.dtype), None, None
