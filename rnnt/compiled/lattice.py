"""Log-likelihood of all alignments through each utterance's T x U1 lattice, and the occupancy of each arc.

    alpha[0,0]    = 0
    alpha[t,u]    = logaddexp(alpha[t-1,u] + logp_blank[t-1,u], alpha[t,u-1] + logp_label[t,u-1])
    log Z         = alpha[T-1,U] + logp_blank[T-1,U]
    gamma[T-1,U]  = 0
    gamma[t,u]    = logaddexp(gamma[t+1,u] + logp_blank[t,u], gamma[t,u+1] + logp_label[t,u])

Outside the lattice both are -inf.  gamma is beta without the last blank.  Derivative of log Z, an occupancy in [0, 1]:

    blank[t,u] = exp(alpha[t,u] + logp_blank[t,u] + gamma[t+1,u] - alpha[T-1,U])        last node: exactly 1
    label[t,u] = exp(alpha[t,u] + logp_label[t,u] + gamma[t,u+1] - alpha[T-1,U])

gamma is alpha of the lattice seen from its last node, so both run side by side, as 2 B *sides*.  The nodes of one
anti-diagonal d = t + u depend on the one before alone.  On the CPU the diagonals are taken in turn.  On a GPU, where a
step takes as long as its launches, `advance` takes CHUNK of them in one graph of some 20 kernels, each a sum of a few
exponentials, by

    paths[u, m], m = 0 .. k:  log-likelihood of all paths through k diagonals from column u - k + m to column u

Paths through 2 k diagonals are joined from those through k, up to BLOCK diagonals; scores go from block to block, and
from there to the middle of each block, of each half, of each quarter.

logp_blank, logp_label [B, T, U1] (its last column is not read), natural log -> losses [B] and weights [B, T, U1], the
occupancies that the gradient is made of: FastEmit's lambda is in those of label arcs, and nodes below the threshold
have none.  Scores are float64 whatever comes in: near -10^4 an ulp of float32 is 10^-3, and a float64 lattice is small
beside a tile.
Graves 2012, arXiv:1211.3711, eq. 16-20; FastEmit: Yu et al. 2020, arXiv:2010.11148.
Before: log_probs.py.  After: loss.py.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from rnnt.compiled.tiles import compiled, in_memory, mark_dynamic
from rnnt.problem import Alignment, loss_dtype

BLOCK = 16  # diagonals, a power of two: shorter blocks are more in turn, longer ones more arithmetic
CHUNK = 16 * BLOCK


class Sides(NamedTuple):
    """The lattices of the utterances and, below them, the same seen from their last nodes, [2 B] int64 each.

    Of either, the nodes are t in [0, frames), u in [0, labels]; node (t, u) lies at first + step (t U1 + u).
    """

    first: Tensor  # index into a flat plane [B T U1]
    step: Tensor  # 1, or -1
    frames: Tensor
    labels: Tensor


class Planes(NamedTuple):
    """What `advance` is specialised on."""

    dtype: torch.dtype
    device: torch.device


class Weights(NamedTuple):
    """What `losses_and_occupancies` is specialised on."""

    dtype: torch.dtype
    device: torch.device
    threshold: float


def losses_and_weights(
    logp_blank: Tensor, logp_label: Tensor, alignment: Alignment, fastemit_lambda: float = 0.0,
    occupancy_threshold: float = 0.0, with_gradient: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """losses [B], weights of blank arcs and of label arcs [B, T, U1] (empty without gradient); float32 or float64.

    Where no alignment is possible the loss is inf and every weight 0.
    """
    dtype = loss_dtype(logp_blank, logp_label)
    utterances, frames, columns = logp_blank.shape
    missing = max(2 - columns, 0)  # no dimension of what is compiled is shorter than 2, see mark_dynamic
    blank, label = (pad(x, (0, missing)) if missing else x for x in (logp_blank.to(dtype), logp_label.to(dtype)))
    lengths = torch.stack((alignment.encoder_lengths, alignment.target_lengths)).repeat(1, 2)
    lengths = mark_dynamic(lengths, 1)
    scan = scores_in_turn if blank.device.type == "cpu" else scores_by_chunks
    scores = mark_dynamic(scan(blank, label, lengths), 0, 1, 2)
    call = compiled(losses_and_occupancies, Weights(dtype, blank.device, occupancy_threshold))
    losses, blank, label = call(scores, flat(blank), flat(label), lengths)
    losses = losses[:utterances]
    if not with_gradient:
        return losses, losses.new_empty((0, 0, 0)), losses.new_empty((0, 0, 0))
    blank, label = (x.view(utterances, frames, -1)[:, :, :columns].contiguous() for x in (blank, label))
    return losses, blank, label if fastemit_lambda == 0 else label * (1 + fastemit_lambda)


def flat(plane: Tensor) -> Tensor:
    return mark_dynamic(plane.flatten().contiguous(), 0)  # flattened, a plane of every V-th element is a view still


def sides_of(lengths: Tensor, frames: int, columns: int) -> Sides:
    """In planes [B, frames, columns]; lengths [2, 2 B]: in frames and in labels, of each utterance twice."""
    frame_lengths, labels = lengths.unbind(0)
    side = torch.arange(len(labels), device=lengths.device)
    from_last = side >= len(labels) // 2
    first = torch.where(from_last, side - len(labels) // 2, side) * (frames * columns)
    first = torch.where(from_last, first + (frame_lengths - 1) * columns + labels, first)
    return Sides(first, torch.where(from_last, -1, 1), frame_lengths, labels)


def scores_in_turn(blank: Tensor, label: Tensor, lengths: Tensor) -> Tensor:
    """alpha and, below it, gamma [D, 2 B, U1] by diagonal d = t + u and column u of each side.  float64."""
    _, frames, columns = blank.shape
    diagonals = frames + columns - 1
    diagonal = torch.arange(1, diagonals, device=blank.device)
    sides = sides_of(lengths, frames, columns)
    label_arcs, blank_arcs = arcs(blank.flatten(), label.flatten(), sides, diagonal, columns)
    # Column 0 is the border, -inf, so that a predecessor is read at column u and at column u + 1.
    scores = label_arcs.new_full((diagonals, lengths.shape[1], 1 + columns), -torch.inf, dtype=torch.float64)
    scores[0, :, 1] = 0
    for before, by_label, by_blank, after in zip(
        scores[:-1].unbind(0), label_arcs.unbind(0), blank_arcs.unbind(0), scores[1:].unbind(0), strict=True
    ):
        torch.logaddexp(before[:, :-1] + by_label, before[:, 1:] + by_blank, out=after[:, 1:])
    return scores[:, :, 1:].contiguous()


def scores_by_chunks(blank: Tensor, label: Tensor, lengths: Tensor) -> Tensor:
    """The same, by compiled chunks of diagonals, with more of them at the end."""
    _, frames, columns = blank.shape
    chunks = -(-(frames + columns - 1) // CHUNK)
    call = compiled(advance, Planes(blank.dtype, blank.device))
    blank, label = flat(blank), flat(label)
    scores = blank.new_empty((chunks * CHUNK, lengths.shape[1], columns), dtype=torch.float64)
    state = torch.full_like(scores[0], -torch.inf)
    state[:, 0] = 0
    for part, start in zip(
        scores.split(CHUNK), torch.arange(0, len(scores), CHUNK, device=blank.device).unbind(0), strict=True
    ):
        found, state = call(mark_dynamic(state, 0, 1), start, blank, label, lengths)
        part.copy_(found)
    return scores


def advance(
    planes: Planes, state: Tensor, start: Tensor, blank: Tensor, label: Tensor, lengths: Tensor
) -> tuple[Tensor, Tensor]:
    """Scores [CHUNK, 2 B, U1] of the diagonals start, start + 1, ..., and [2 B, U1] of the one after them.

    state [2 B, U1]: the first of them; start [] int64; blank and label [B T U1].
    """
    diagonal = start + 1 + torch.arange(CHUNK, device=planes.device)
    sides = sides_of(lengths, _frames(blank, state, lengths), state.shape[1])
    both = arcs(blank, label, sides, diagonal, state.shape[1])
    levels = [in_memory(torch.stack(both, 3))]  # paths through 1, 2, 4, ... BLOCK diagonals
    while len(levels[-1]) > CHUNK // BLOCK:
        levels.append(in_memory(joined(levels[-1][0::2], levels[-1][1::2], planes.dtype)))
    starts = [state]
    for paths in levels.pop().unbind(0):
        starts.append(through(starts[-1], paths))
    after = starts.pop()
    scores = torch.stack(starts)
    for paths in reversed(levels):
        scores = torch.stack((scores, through(scores, paths[0::2])), 1).flatten(0, 1)
    return scores, after


def arcs(blank: Tensor, label: Tensor, sides: Sides, diagonal: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """The label's and the blank's arc [D, 2 B, U1] that enter node (d - u, u), d of `diagonal` [D]; -inf where there
    is none."""
    first, step, frames, labels = (x[:, None] for x in sides)
    u = torch.arange(columns, device=blank.device)
    t = diagonal[:, None, None] - u
    inside = (t < frames) & (u <= labels)
    node = first + step * (t * columns + u)
    # An arc lies at the node that it leaves: one before this, or, seen from the last node, this itself.
    by_label, by_blank = (node - torch.where(step > 0, back, 0) for back in (1, columns))
    last = len(blank) - 1
    by_label = torch.where(inside & (t >= 0) & (u >= 1), label[by_label.clamp(0, last)], -torch.inf)
    by_blank = torch.where(inside & (t >= 1), blank[by_blank.clamp(0, last)], -torch.inf)
    return by_label, by_blank


def joined(early: Tensor, late: Tensor, dtype: torch.dtype) -> Tensor:
    """Paths [..., U1, 2 k + 1] through 2 k diagonals, of those [..., U1, k + 1] through the early k and the late k."""
    columns, k = early.shape[-2], early.shape[-1] - 1
    u = torch.arange(columns, device=early.device)[:, None, None]
    m = torch.arange(2 * k + 1, device=early.device)[:, None]
    late_m = torch.arange(k + 1, device=early.device)
    between, early_m = u - k + late_m, m - late_m  # the column where the late ones begin
    exist = (between >= 0) & (early_m >= 0) & (early_m <= k)
    both = late.double()[..., None, :] + early.double()[..., between.clamp(min=0), early_m.clamp(0, k)]
    return log_sum_exp(torch.where(exist, both, -torch.inf), dtype)


def through(scores: Tensor, paths: Tensor) -> Tensor:
    """Scores [..., U1] of the diagonal after `paths` [..., U1, k + 1] from those of the diagonal before."""
    columns, k = paths.shape[-2], paths.shape[-1] - 1
    source = torch.arange(columns, device=paths.device)[:, None] - k + torch.arange(k + 1, device=paths.device)
    both = scores[..., source.clamp(min=0)] + paths.double()
    return log_sum_exp(torch.where(source >= 0, both, -torch.inf), torch.float64)


def log_sum_exp(x: Tensor, dtype: torch.dtype) -> Tensor:
    """[...] float64 of [..., n]; the exponentials are taken in `dtype`, of differences from the largest."""
    largest = x.amax(-1)
    largest = torch.where(largest.abs() == torch.inf, 0, largest)
    return largest + (x - largest[..., None]).to(dtype).exp().double().sum(-1).log()


def losses_and_occupancies(
    weights: Weights, scores: Tensor, blank: Tensor, label: Tensor, lengths: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """losses [2 B], of which the second half is the first but for rounding, and occupancies of blank arcs and of label
    arcs [B T U1]; 0 outside the lengths and below the threshold.

    scores [>= D, 2 B, U1], blank and label [B T U1].
    """
    utterances, columns, plane_frames = lengths.shape[1] // 2, scores.shape[2], _frames(blank, scores, lengths)
    first, _, frames, labels = sides_of(lengths, plane_frames, columns)
    side = torch.arange(2 * utterances, device=lengths.device)
    end = frames - 1 + labels
    last = scores[end, side, labels]  # of alpha at the last node, of gamma at the first: the same but for rounding
    log_z = last + blank[torch.where(side < utterances, first + (frames - 1) * columns + labels, first)]

    node = torch.arange(len(blank), device=blank.device)
    t, u = node // columns, node % columns
    b = (t // plane_frames).clamp(min=0)  # says to Inductor of torch 2.8 what it cannot prove
    t = t - b * plane_frames
    frames, labels, end, last = frames[b], labels[b], end[b], last[b]
    inside, has_label, is_last = (t < frames) & (u <= labels), u < labels, t + u == end
    alpha = scores[torch.where(inside, t + u, 0), b, u] - last
    # Both successors lie on one diagonal of the other side: (t + 1, u) at column U - u, (t, u + 1) at the one before.
    other, diagonal = utterances + b, torch.where(inside, end - (t + u + 1), 0).clamp(min=0)
    column = (labels - u).clamp(min=0)
    after_blank = torch.where(t + 1 < frames, scores[diagonal, other, column], -torch.inf)
    after_label = torch.where(has_label, scores[diagonal, other, (column - 1).clamp(min=0)], -torch.inf)
    by_blank = torch.exp((alpha + torch.where(is_last, 0, blank + after_blank)).to(weights.dtype))
    by_label = torch.exp((alpha + label + after_label).to(weights.dtype))
    by_label = torch.where(has_label, by_label, 0)
    # NaN stays: a loss that is NaN has gradients that are.
    left_out = ~inside | (log_z[b] == -torch.inf) | (by_blank + by_label < weights.threshold)
    losses = torch.where(log_z == -torch.inf, torch.inf, -log_z).to(weights.dtype)
    return losses, torch.where(left_out, 0, by_blank), torch.where(left_out, 0, by_label)


def _frames(plane: Tensor, scores: Tensor, lengths: Tensor) -> int:
    """T of a flat plane [B T U1], scores [..., U1] and lengths [2, 2 B]."""
    return len(plane) // scores.shape[-1] // (lengths.shape[1] // 2)
