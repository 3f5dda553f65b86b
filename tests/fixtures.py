"""Inputs without random numbers, and their losses and gradients in float64 (path enumeration agrees to 1e-12).

S: logits from a sine.  J: a joint network from sines.  Z: all logits equal.  P: a ragged batch of two utterances.
"""

import math

import torch
from torch import Tensor

from tests.support import Joint


def _axes(*sizes: int) -> list[Tensor]:
    """One float64 index tensor per axis, shaped to broadcast against the others."""
    axes = torch.meshgrid(
        *(torch.arange(n, dtype=torch.float64) for n in sizes),
        indexing="ij",
    )
    return list(axes)


def sines(B: int, T: int, U: int, V: int) -> Tensor:
    """S: [B, T, U + 1, V] logits."""
    b, t, u, v = _axes(B, T, U + 1, V)
    return torch.sin(1 + 0.5 * b + 0.7 * t + 1.3 * u + 2.1 * v)


def joint_sines(B: int, T: int, U: int, H: int, V: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """J: encoder [B, T, H], predictor [B, U + 1, H], weight [V, H], bias [V]."""
    b, t, h = _axes(B, T, H)
    encoder = torch.sin(1 + b + 0.7 * t + 1.3 * h)
    b, u, h = _axes(B, U + 1, H)
    predictor = torch.cos(0.5 + b + 0.9 * u + 0.6 * h)
    v, h = _axes(V, H)
    weight = 0.5 * torch.sin(0.3 + 1.1 * v + 0.8 * h)
    return encoder, predictor, weight, 0.1 * torch.cos(torch.arange(V, dtype=torch.float64))


TARGETS_P = torch.tensor([[1, 2, 3], [4, 1, 0]])
FRAMES_P = torch.tensor([4, 2])
LABELS_P = torch.tensor([3, 1])
P = (TARGETS_P, FRAMES_P, LABELS_P)


def s_p() -> Tensor:
    """S-P: the logits of batch P; blank is 0."""
    return sines(2, 4, 3, 5)


def j_p() -> Joint:
    """J-P: the joint network of batch P; blank is 0."""
    return Joint(*joint_sines(2, 4, 3, 6, 5), *P)


def uniform_loss(T: int, U: int, V: int) -> float:
    """Z: every path takes T + U arcs of probability 1 / V, and there are C(T + U - 1, U) paths."""
    return (T + U) * math.log(V) - math.log(math.comb(T + U - 1, U))


LOSSES_S_P = [9.04924915, 5.08128761]
GRADIENT_SIZES_S_P = [9.24528174, 4.49291914]  # sum of absolute logit gradients of each utterance
GRADIENT_S_P = {  # of the sum of losses, at (b, t, u)
    (0, 0, 0): [-0.28691914, -0.24226809, 0.05788164, 0.32776322, 0.14354237],
    (1, 0, 0): [-0.13717256, 0.08827274, 0.07922297, 0.37296895, -0.40329210],
}
LOSSES_S_P_BLANK_LAST = [9.37948867, 5.14142845]  # blank 4, targets below
TARGETS_BLANK_LAST = torch.tensor([[1, 2, 3], [3, 1, 0]])
LOSSES_J_P = {"relu": [8.58674004, 5.42756003], "tanh": [11.23853980, 8.04707650]}
GRADIENT_SIZES_J_P = {  # sums of absolute gradients of the sum of losses
    "relu": {
        "d_encoder": 4.68892828,
        "d_predictor": 5.88212499,
        "d_linear_weight": 21.63245588,
        "d_linear_bias": 8.46042960,
    },
    "tanh": {
        "d_encoder": 7.15142162,
        "d_predictor": 8.11062854,
        "d_linear_weight": 31.43783896,
        "d_linear_bias": 10.56321881,
    },
}
