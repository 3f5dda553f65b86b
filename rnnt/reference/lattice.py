"""Log-likelihood of all alignments through each utterance's T x (U + 1) lattice.

    alpha[0,0] = 0
    alpha[t,u] = logaddexp(alpha[t-1,u] + logp_blank[t-1,u], alpha[t,u-1] + logp_label[t,u-1])
    log Z      = alpha[T-1,U] + logp_blank[T-1,U]

Outside the lattice alpha is -inf.  The nodes of one anti-diagonal d = t + u depend only on the one before, so the
recursion takes T + U steps over vectors [B, U1].

logp_blank [B, T, U1], logp_label [B, T, U], natural log -> log Z [B], float64.  Computed in float64 whatever comes
in: a value near -10^4 has an ulp of 10^-3 in float32, and the reference should not add that to what it checks.
Graves 2012, arXiv:1211.3711, eq. 16-18.  Before: log_probs.py.  After: loss.py.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from rnnt.layout import dense_mask, label_mask
from rnnt.problem import Alignment


def log_likelihood(logp_blank: Tensor, logp_label: Tensor, alignment: Alignment) -> Tensor:
    """log Z [B] float64; -inf, with gradient 0, where no alignment is possible."""
    utterances, frames, columns = logp_blank.shape
    blank = torch.where(dense_mask(alignment), logp_blank.double(), 0)
    label = torch.where(label_mask(alignment), logp_label.double(), -torch.inf)

    # Arcs by the anti-diagonal they leave from, D tensors [B, U1] each, with t = d - u.  (Unbound once: the gradient of
    # indexing one diagonal at a time would be D tensors of all diagonals.)
    u = torch.arange(columns, device=blank.device)
    t = torch.arange(frames + columns - 1, device=blank.device)[:, None] - u  # [D, U1]
    inside = (t >= 0) & (t < frames)
    t = t.clamp(0, frames - 1)
    blank_arcs = torch.where(inside, blank[:, t, u], -torch.inf).unbind(1)
    label_arcs = torch.where(inside[:, :-1], label[:, t[:, :-1], u[:-1]], -torch.inf).unbind(1)  # [B, U]

    alpha = torch.where(u == 0, 0.0, -torch.inf).double().expand(utterances, columns)
    alpha = alpha + label[..., :0].sum()  # 0: logp_label is in the graph even with T = 1 and U = 0, and has a gradient
    alphas = [alpha]
    for blank_arc, label_arc in zip(blank_arcs[:-1], label_arcs[:-1], strict=True):
        stay = alpha + blank_arc  # (t-1, u) -> (t, u)
        move = pad(alpha[:, :-1] + label_arc, (1, 0), value=-torch.inf)  # (t, u-1) -> (t, u)
        alpha = logaddexp(stay, move)
        alphas.append(alpha)

    last_frame, last_column = alignment.encoder_lengths - 1, alignment.target_lengths
    b = torch.arange(utterances, device=blank.device)
    return torch.stack(alphas, dim=1)[b, last_frame + last_column, last_column] + blank[b, last_frame, last_column]


def logaddexp(x: Tensor, y: Tensor) -> Tensor:
    """log(exp(x) + exp(y)), with gradient 0 rather than NaN where both are -inf, as the lattice's borders are."""
    neither = (x == -torch.inf) & (y == -torch.inf)
    both = torch.logaddexp(torch.where(neither, 0.0, x), torch.where(neither, 0.0, y))
    return torch.where(neither, -torch.inf, both)
