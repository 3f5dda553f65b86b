"""The joint network's hidden layer at every node.

    hidden[b,t,u] = dropout(activation(encoder[b,t] + predictor[b,u]))

encoder [B, T, H], predictor [B, U1, H] -> hidden [B, T, U1, H] in the compute dtype.
Padded frames and states are replaced by zeros, not multiplied by them, so that a NaN there is never read.
Graves 2012, arXiv:1211.3711, section 2.4 (there a sum of logits; the hidden layer is Graves et al. 2013,
arXiv:1303.5778).  Before: layout.py.  After: log_probs.py.
"""

import torch
from torch import Tensor

from rnnt.dropout import keep_mask
from rnnt.layout import dense_rows
from rnnt.problem import JointProblem


def joint(problem: JointProblem) -> Tensor:
    alignment = problem.alignment
    frames, columns = problem.encoder.shape[1], problem.predictor.shape[1]
    device = problem.device
    frame_inside = torch.arange(frames, device=device) < alignment.encoder_lengths[:, None]  # [B, T]
    state_inside = torch.arange(columns, device=device) <= alignment.target_lengths[:, None]  # [B, U1]
    encoder = torch.where(frame_inside[..., None], problem.encoder, 0).to(problem.compute_dtype)
    predictor = torch.where(state_inside[..., None], problem.predictor, 0).to(problem.compute_dtype)
    hidden = getattr(torch, problem.activation)(encoder[:, :, None] + predictor[:, None])  # [B, T, U1, H]
    if problem.seed is not None:
        keep = keep_mask(problem.seed, dense_rows(alignment), hidden.shape[-1], problem.dropout_p)
        hidden = hidden * keep / (1 - problem.dropout_p)
    return hidden
