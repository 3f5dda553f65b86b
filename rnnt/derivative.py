"""A guard that lets gradients pass once and makes a second derivative an error.

The backends' backward passes are closed forms over values saved in the forward pass; differentiating them again would
treat those values as constants and give a wrong number.  The guard is an identity in front of the differentiable
inputs: with `create_graph=True` the gradient it returns carries a node that raises when it is differentiated, whether
or not the upstream gradient was a constant.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class _Raise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradient: Tensor, *_inputs: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, _gradient: Tensor) -> Any:
        raise RuntimeError("rnnt: the transducer loss has no second derivative; its gradient cannot be differentiated")


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*inputs)
        ctx.set_materialize_grads(False)
        return tuple(x.view_as(x) for x in inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        if not torch.is_grad_enabled():  # no create_graph=True
            return gradients
        return undifferentiable(gradients, ctx.saved_tensors)


def undifferentiable(gradients: Sequence[Tensor | None], inputs: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """A backward pass's results under create_graph=True, as ones that raise when differentiated by an input; upstream
    gradients are inputs too, as loss weights may lie behind them."""
    given = [x for x in inputs if x is not None]
    return tuple(None if g is None else _Raise.apply(g, *given) for g in gradients)


def differentiable_once(*inputs: Tensor) -> list[Tensor]:
    """The inputs, as ones whose gradients cannot be differentiated again."""
    found = list(inputs)
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return found  # a captured graph already refuses a second derivative
    guarded = [i for i, x in enumerate(inputs) if x.requires_grad]
    if guarded:
        for i, x in zip(guarded, _Once.apply(*(inputs[i] for i in guarded)), strict=True):
            found[i] = x
    return found
