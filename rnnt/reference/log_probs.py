"""Log-probabilities of the two arcs that leave each node.

    logits     = hidden linear_weight^T + linear_bias
    logp       = log_softmax(logits)                       in float32 (float64 stays float64)
    logp_blank[b,t,u] = logp[b,t,u, blank]
    logp_label[b,t,u] = logp[b,t,u, targets[b,u]]

hidden [B, T, U1, H] -> logits [B, T, U1, V] -> logp_blank [B, T, U1], logp_label [B, T, U]; 0 outside the lengths.
Before: joint.py.  After: lattice.py.
"""

import torch
from torch import Tensor

from rnnt.layout import dense_mask, label_mask
from rnnt.problem import Alignment, JointProblem, loss_dtype


def output_layer(hidden: Tensor, problem: JointProblem) -> Tensor:
    """logits [B, T, U1, V] in the compute dtype."""
    bias = None if problem.linear_bias is None else problem.linear_bias.to(problem.compute_dtype)
    return torch.nn.functional.linear(hidden, problem.linear_weight.to(problem.compute_dtype), bias)


def log_probs(scores: Tensor, alignment: Alignment, log_softmax: bool = True) -> tuple[Tensor, Tensor]:
    """logp_blank [B, T, U1], logp_label [B, T, U] of scores [B, T, U1, V]."""
    inside = dense_mask(alignment)
    scores = torch.where(inside[..., None], scores, 0).to(loss_dtype(scores))
    logp = torch.log_softmax(scores, dim=-1) if log_softmax else scores
    logp_blank = torch.where(inside, logp[..., alignment.blank], 0)
    has_label = label_mask(alignment)  # [B, T, U]
    labels = torch.where(has_label, alignment.targets[:, None], 0)
    logp_label = logp[:, :, :-1].gather(-1, labels[..., None])[..., 0]
    return logp_blank, torch.where(has_label, logp_label, 0)
