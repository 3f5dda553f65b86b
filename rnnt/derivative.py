"""A guard that lets gradients pass once and makes a second derivative an error.

The backends' backward passes are closed forms over values saved in the forward pass; differentiating them again would
treat those values as constants and give a wrong number.  The guard is an identity in front of each differentiable
input: with `create_graph=True` the gradient it returns carries a node that raises when it is differentiated, whether
or not the upstream gradient was a constant.
"""

from typing import Any

import torch
from torch import Tensor


class _Raise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradient: Tensor, _anchor: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, _gradient: Tensor) -> Any:
        raise RuntimeError("rnnt: the transducer loss has no second derivative; its gradient cannot be differentiated")


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        if torch.is_grad_enabled():  # create_graph=True
            (x,) = ctx.saved_tensors
            return _Raise.apply(gradient, x)
        return gradient


def differentiable_once(x: Tensor) -> Tensor:
    """x, as an input whose gradient cannot be differentiated again."""
    if torch.compiler.is_compiling() or not (torch.is_grad_enabled() and x.requires_grad):
        return x  # a captured graph already refuses a second derivative
    return _Once.apply(x)
