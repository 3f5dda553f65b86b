"""Log-likelihood of all alignments through each utterance's T x U1 lattice, and the occupancy of each arc.

    alpha[0,0]    = 0
    alpha[t,u]    = logaddexp(alpha[t-1,u] + logp_blank[t-1,u], alpha[t,u-1] + logp_label[t,u-1])
    log Z         = alpha[T-1,U] + logp_blank[T-1,U]
    gamma[T-1,U]  = 0
    gamma[t,u]    = logaddexp(gamma[t+1,u] + logp_blank[t,u], gamma[t,u+1] + logp_label[t,u])

Outside the lattice both are -inf.  gamma is beta without the last blank.  Derivative of log Z, an occupancy in [0, 1]:

    blank[t,u] = exp(alpha[t,u] + logp_blank[t,u] + gamma[t+1,u] - alpha[T-1,U])        last node: exactly 1
    label[t,u] = exp(alpha[t,u] + logp_label[t,u] + gamma[t,u+1] - alpha[T-1,U])

gamma is alpha of the lattice seen from its last node, so both run side by side.  The nodes of one anti-diagonal
d = t + u depend on the one before alone: T + U1 - 1 steps over [2 B, U1], of two operations each, an addition that
reads every predecessor twice (as the start of a blank and of a label) and a logaddexp of the two.  On a GPU, where a
step takes as long as its launches, the diagonals are cut into blocks that advance side by side.  What leads through a
block is found first, for all blocks at once, from its diagonals in pairs, fours, eights, ...:

    paths through 2 k diagonals [u, m1 + m2] = logsumexp of  late [u, m2] + early [u - k + m2, m1]

where [u, m] stands for the paths from column u - k + m to column u; then one block after another gets its first scores.

logp_blank [B, T, U1], logp_label [B, T, U], natural log -> losses [B] and weights [B, T, U1], the occupancies that the
gradient is made of: FastEmit's lambda is in those of label arcs, and nodes below the threshold have none.  Scores are
float64 whatever comes in: near -10^4 an ulp of float32 is 10^-3, and a float64 lattice is small beside a tile.
Graves 2012, arXiv:1211.3711, eq. 16-20; FastEmit: Yu et al. 2020, arXiv:2010.11148.
Before: log_probs.py.  After: loss.py.
"""

import torch
from torch import Tensor

from rnnt.layout import dense_mask, label_mask
from rnnt.problem import Alignment, loss_dtype

BLOCK = 32  # diagonals, a power of two: shorter blocks are more in turn, longer ones more arithmetic


def losses_and_weights(
    logp_blank: Tensor, logp_label: Tensor, alignment: Alignment, fastemit_lambda: float = 0.0,
    occupancy_threshold: float = 0.0, with_gradient: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """losses [B], weights of blank arcs and of label arcs [B, T, U1] (empty without gradient); float32 or float64.

    Where no alignment is possible the loss is inf and every weight 0.
    """
    dtype = loss_dtype(logp_blank, logp_label)
    scores = scan(logp_blank, logp_label, alignment, sides=2 if with_gradient else 1)
    b = torch.arange(len(logp_blank), device=logp_blank.device)
    last_frame, last_column = alignment.encoder_lengths - 1, alignment.target_lengths
    log_z = scores[last_frame + last_column, b, 1 + last_column] + logp_blank[b, last_frame, last_column]
    losses = torch.where(log_z == -torch.inf, torch.inf, -log_z).to(dtype)
    if not with_gradient:
        return losses, losses.new_empty((0, 0, 0)), losses.new_empty((0, 0, 0))
    blank, label = (x.to(dtype) for x in occupancies(scores, logp_blank, logp_label, alignment))
    # NaN stays: a loss that is NaN has gradients that are.
    left_out = (log_z == -torch.inf)[:, None, None] | (blank + label < occupancy_threshold)
    return losses, torch.where(left_out, 0, blank), torch.where(left_out, 0, label * (1 + fastemit_lambda))


def occupancies(scores: Tensor, logp_blank: Tensor, logp_label: Tensor, alignment: Alignment) -> tuple[Tensor, Tensor]:
    """Of blank arcs and of label arcs, [B, T, U1] float64; 0 outside the lengths."""
    utterances, frames, columns = logp_blank.shape
    device = logp_blank.device
    b = torch.arange(utterances, device=device)[:, None, None]
    t = torch.arange(frames, device=device)[None, :, None]
    u = torch.arange(columns, device=device)[None, None, :]
    last_frame = alignment.encoder_lengths[:, None, None] - 1
    last_column = alignment.target_lengths[:, None, None]
    last = (t == last_frame) & (u == last_column)

    alpha = scores[t + u, b, 1 + u]  # [B, T, U1]
    alpha = alpha - scores[last_frame + last_column, b, 1 + last_column]
    # Both successors of a node lie on one diagonal: (t + 1, u) at column U - u of the reversed lattice, (t, u + 1) at
    # the column before it, whose border is -inf.
    diagonal = (last_frame + last_column - (t + u + 1)).clamp(min=0)
    column = (1 + last_column - u).clamp(min=0)
    after_blank = scores[diagonal, utterances + b, column]
    after_label = scores[diagonal, utterances + b, (column - 1).clamp(min=0)]

    blank = torch.exp(alpha + torch.where(last, 0, logp_blank + after_blank))
    label = torch.exp(alpha + torch.nn.functional.pad(logp_label, (0, 1)) + after_label)
    label_inside = torch.nn.functional.pad(label_mask(alignment), (0, 1))
    return torch.where(dense_mask(alignment), blank, 0), torch.where(label_inside, label, 0)


def scan(logp_blank: Tensor, logp_label: Tensor, alignment: Alignment, sides: int) -> Tensor:
    """alpha [>= D, B, 1 + U1] by diagonal d = t + u and column 1 + u; with two sides, [>= D, 2 B, 1 + U1], gamma below
    it, by diagonal and column of the reversed lattice.  Column 0 is the border, -inf.  float64."""
    utterances, _, columns = logp_blank.shape
    arcs = arcs_by_diagonal(logp_blank, logp_label, alignment, sides)[1:]  # [D - 1, sides B, 2, U1]
    length = BLOCK if logp_blank.device.type != "cpu" and len(arcs) > BLOCK else max(len(arcs), 1)
    blocks = -(-len(arcs) // length)
    scores = arcs.new_full((1 + blocks * length, sides * utterances, 1 + columns), -torch.inf, dtype=torch.float64)
    scores[0, :, 1] = 0
    if blocks == 0:
        return scores
    arcs = torch.nn.functional.pad(arcs, (0, 0, 0, 0, 0, 0, 0, blocks * length - len(arcs)), value=-torch.inf)
    arcs = arcs.unflatten(0, (blocks, length))
    if blocks > 1:
        scores[length:-1:length] = starts(scores[0], arcs[:-1])
    before, after = (x.unflatten(0, (blocks, length)) for x in (scores[:-1], scores[1:]))
    through = torch.empty_like(arcs[:, 0], dtype=torch.float64)
    through_label, through_blank = through.unbind(2)
    # Of each diagonal, all blocks at once; a predecessor is read at column u - 1 and at column u.
    predecessors, nodes = before.unfold(3, columns, 1).unbind(1), after[..., 1:].unbind(1)
    for predecessor, arc, node in zip(predecessors, arcs.unbind(1), nodes, strict=True):
        torch.add(predecessor, arc, out=through)
        torch.logaddexp(through_label, through_blank, out=node)
    return scores


def starts(scores: Tensor, arcs: Tensor) -> Tensor:
    """Scores [blocks, rows, 1 + U1] of the diagonal after each block, from the scores [rows, 1 + U1] of the one before
    the first; arcs [blocks, length, rows, 2, U1]."""
    columns, length = arcs.shape[4], arcs.shape[1]
    paths = arcs.double().transpose(3, 4)  # of one diagonal: the label's arc, the blank's arc
    while paths.shape[1] > 1:
        paths = joined(paths[:, 0::2], paths[:, 1::2])
    found = scores.new_full((1 + len(arcs), len(scores), length + columns), -torch.inf)
    found[0, :, length:] = scores[:, 1:]
    sources = found.unfold(2, 1 + length, 1)  # [1 + blocks, rows, U1, 1 + length]
    for source, path, after in zip(
        sources.unbind(0), paths[:, 0].unbind(0), found[1:, :, length:].unbind(0), strict=False
    ):
        torch.logsumexp(source + path, 2, out=after)
    return found[1:, :, length - 1 :]


def joined(early: Tensor, late: Tensor) -> Tensor:
    """Log-likelihood [..., U1, 2 k + 1] of all paths through 2 k diagonals, from those [..., U1, k + 1] through the
    early k of them and the late k.  Entry m of column u: paths from column u - k + m to column u."""
    columns, k = early.shape[-2], early.shape[-1] - 1
    early = torch.nn.functional.pad(early, (0, 0, k, 0), value=-torch.inf)
    paths = early.new_full((*late.shape[:-1], 2 * k + 1), -torch.inf)
    through = torch.empty_like(paths[..., : k + 1])
    # For each m of the late ones: where they come from, themselves, and the paths they are a part of.
    befores, afters = early.unfold(-2, columns, 1).transpose(-1, -2).unbind(-3), late[..., None].unbind(-2)
    for before, after, part in zip(befores, afters, paths.unfold(-1, k + 1, 1).unbind(-2), strict=True):
        torch.add(before, after, out=through)
        torch.logaddexp(part, through, out=part)
    return paths


def arcs_by_diagonal(logp_blank: Tensor, logp_label: Tensor, alignment: Alignment, sides: int) -> Tensor:
    """[D, sides B, 2, U1]: the label and the blank arc that enter node (d - u, u); -inf where there is none."""
    utterances, frames, columns = logp_blank.shape
    device = logp_blank.device
    b = torch.arange(utterances, device=device)[:, None]
    u = torch.arange(columns, device=device)
    t = torch.arange(frames + columns - 1, device=device)[:, None, None] - u  # [D, 1, U1]
    length, labels = alignment.encoder_lengths[:, None], alignment.target_lengths[:, None]
    column_inside = u <= labels
    blank_inside = (t >= 1) & (t < length) & column_inside  # [D, B, U1]
    label_inside = (t >= 0) & (t < length) & column_inside & (u >= 1)

    dtype = torch.promote_types(logp_blank.dtype, logp_label.dtype)
    arcs = logp_blank.new_empty((len(t), sides, utterances, 2, columns), dtype=dtype)
    # Into (t, u) of the reversed lattice lead the arcs that leave node (T - 1 - t, U - u).
    reversed_t, reversed_u = (length - 1 - t).clamp(0, frames - 1), (labels - u).clamp(min=0)
    sources = (
        ((t - 1).clamp(0, frames - 1), u, t.clamp(0, frames - 1), (u - 1).clamp(min=0)),
        (reversed_t, reversed_u, reversed_t, reversed_u),
    )
    for side, (blank_t, blank_u, label_t, label_u) in enumerate(sources[:sides]):
        arcs[:, side, :, 1] = torch.where(blank_inside, logp_blank[b, blank_t, blank_u], -torch.inf)
        if columns == 1:
            arcs[:, side, :, 0] = -torch.inf
        else:
            label = logp_label[b, label_t, label_u.clamp(max=columns - 2)]
            arcs[:, side, :, 0] = torch.where(label_inside, label, -torch.inf)
    return arcs.flatten(1, 2)
