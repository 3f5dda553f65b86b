"""The joint network's hidden layer at the rows of one tile, and the way of its gradient back to frames and states.

    hidden[row] = dropout(activation(encoder[frame of row] + predictor[state of row]))

    d_encoder[frame]   = sum of d_pre over the frame's rows          d_pre: gradient before the activation
    d_predictor[state] = sum of d_pre over the state's rows

encoder [B T, H], predictor [B U1, H] -> hidden [rows, H] in the compute dtype; the sum and the activation are taken in
float32 (float64 stays float64).  d_pre [rows, H] is in the compute dtype, its sums are in float32 or float64.

`joint` is traced into the compiled tile, so that the gathered rows never reach memory.  Left to autograd, their
gradient would be scattered by atomic additions, whose order changes from run to run.  So encoder and predictor are
constants in there, and gradients are taken at `Anchors`, zeros that are not in memory, in the same order at every run.
IndexSums on the CPU: d_pre comes out of the tile and goes to index_add_, which has an order there.  GatherSums on a
GPU, where it adds atomically: every frame and every state gathers, still in the tile, what there is of its rows.

Graves et al. 2013, arXiv:1303.5778.  Before: layout.py.  After: log_probs.py.
"""

import bisect
import itertools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rnnt.compiled.tiles import LiveNodes, TileRows, in_memory, mark_dynamic
from rnnt.dropout import keep_under_keys
from rnnt.problem import Alignment


class Places(NamedTuple):
    """Which row of the pass each node is, -1: none, in the b utterances that have rows in the tile; what GatherSums
    asks a tile for."""

    frames: Tensor | None  # [b, U1, T] int32; None where no sum is needed
    states: Tensor | None  # [b, T, U1]
    start: Tensor  # [] int32: row of the pass that is the tile's first


class Anchors(NamedTuple):
    """Where a tile's gradient is asked for, zeros."""

    rows: Tensor | None = None  # [rows, H] in the compute dtype
    frames: Tensor | None = None  # [b, T, H] float32 or float64, with places
    states: Tensor | None = None  # [b, U1, H]
    places: Places | None = None

    def leaves(self) -> list[Tensor]:
        return [x for x in self[:3] if x is not None]


def anchors_at(places: Places | None, rows: int, features: int, dtype: torch.dtype, device: torch.device) -> Anchors:
    """Of a tile, for GatherSums, or without places for IndexSums."""
    if places is None:
        return Anchors(rows=torch.zeros((rows, features), dtype=dtype, device=device).requires_grad_())
    frames, states = (
        None if x is None else x.new_zeros((x.shape[0], x.shape[2], features), dtype=_wide(dtype)).requires_grad_()
        for x in places[:2]
    )
    return Anchors(None, frames, states, places)


def joint(
    encoder: Tensor, predictor: Tensor, anchors: Anchors, rows: TileRows,
    activation: str, dropout_p: float, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """hidden [rows, H] in `dtype`."""
    wide = _wide(dtype)
    pre = encoder[rows.frame].to(wide) + predictor[rows.state].to(wide)
    if anchors.rows is not None:
        pre = pre + anchors.rows
    if anchors.places is not None:
        pre = Gathered.apply(pre, anchors.frames, anchors.states, *anchors.places, dtype)
    hidden = getattr(torch, activation)(pre)
    if dropout_p > 0:
        assert rows.key_1 is not None
        assert rows.key_2 is not None
        keep = keep_under_keys(rows.key_1, rows.key_2, hidden.shape[-1], dropout_p)
        hidden = torch.where(keep, hidden / (1 - dropout_p), 0)
    return hidden.to(dtype)


def matrix(x: Tensor) -> Tensor:
    """encoder [B, T, H] or predictor [B, U1, H] as a compiled tile takes it: [B T, H], of any length."""
    x = x.detach().reshape(-1, x.shape[-1]).contiguous()
    return mark_dynamic(torch.cat([x, x]) if len(x) == 1 else x, 0)


class IndexSums:
    """Sums for d_encoder [B, T, H] and d_predictor [B, U1, H] on the CPU; one that is not needed has no features."""

    def __init__(
        self, live: LiveNodes, alignment: Alignment, tile: int, features: int, needed: list[bool], dtype: torch.dtype
    ) -> None:
        """live: the rows of the pass; tile: rows of one; dtype: of d_pre."""
        lengths = alignment.frames, alignment.columns
        self.sums = [
            live.node.new_zeros((alignment.utterances, length, features if need else 0), dtype=_wide(dtype))
            for length, need in zip(lengths, needed, strict=True)
        ]
        self.lengths = lengths

    def places_of(self, number: int) -> Places | None:
        """For tile `number` of the pass."""
        return None

    def add(self, number: int, node: Tensor, gradients: list[Tensor]) -> None:
        """node [rows]: -1 where there is none; gradients: of the tile's anchors."""
        frames, columns = self.lengths
        node = node.clamp(min=0)
        frame = node // columns
        state = frame // frames * columns + node - frame * columns
        for d_pre in gradients:
            for total, index in zip(self.sums, (frame, state), strict=True):
                if total.shape[2] > 0:
                    total.view(-1, total.shape[2]).index_add_(0, index, d_pre.to(total.dtype))

    def results(self) -> list[Tensor]:
        return self.sums


class GatherSums:
    """The same on a GPU: sums over nodes in place of rows.

    Every node's place in the tile, or that it is not in it, is known, so that a frame gathers over u, and a state over
    t, what of its nodes lies in the tile: in all utterances from that of the tile's first row to that of its last.  The
    nodes that are summed lie a whole row of places apart: where they were neighbours, Inductor's kernel took four times
    as long.  No dimension of places is shorter than 2, see mark_dynamic.
    """

    def __init__(
        self, live: LiveNodes, alignment: Alignment, tile: int, features: int, needed: list[bool], dtype: torch.dtype
    ) -> None:
        self.alignment = alignment
        place = filled_up(live.place)
        utterances, *lengths = place.shape
        self.sums = [
            place.new_zeros((utterances, length, features if need else 0), dtype=_wide(dtype))
            for length, need in zip(lengths, needed, strict=True)
        ]
        self.places = [x if need else None for x, need in zip((place.mT.contiguous(), place), needed, strict=True)]
        self.spans = utterance_spans(live.counts, tile)
        self.starts = torch.arange(0, tile * len(self.spans), tile, dtype=torch.int32, device=place.device).unbind(0)

    def places_of(self, number: int) -> Places:
        frames, states = (
            None if x is None else mark_dynamic(x.narrow(0, *self.spans[number]), 0, 1, 2) for x in self.places
        )
        return Places(frames, states, self.starts[number])

    def add(self, number: int, node: Tensor, gradients: list[Tensor]) -> None:
        for total, part in zip([x for x in self.sums if x.shape[2] > 0], gradients, strict=True):
            total.narrow(0, *self.spans[number]).add_(part)

    def results(self) -> list[Tensor]:
        lengths = self.alignment.frames, self.alignment.columns
        return [x[: self.alignment.utterances, :length] for x, length in zip(self.sums, lengths, strict=True)]


class Gathered(torch.autograd.Function):
    """pre [rows, H] itself; its gradient goes to the frames' and the states' anchors, as the sums over each of them."""

    @staticmethod
    def forward(
        ctx: Any, pre: Tensor, frames: Tensor | None, states: Tensor | None,
        frame_places: Tensor | None, state_places: Tensor | None, start: Tensor, dtype: torch.dtype,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(frame_places, state_places, start)
        ctx.dtype = dtype
        return pre.view_as(pre)

    @staticmethod
    def backward(ctx: Any, d_pre: Tensor) -> tuple[Tensor | None, ...]:
        *both, start = ctx.saved_tensors
        padded = torch.nn.functional.pad(in_memory(d_pre.to(ctx.dtype)), (0, 0, 0, 1))  # a row of zeros, not in memory
        frames, states = (
            None if places is None else padded[_within(places - start, d_pre.shape[0])].to(d_pre.dtype).sum(1)
            for places in both
        )
        return None, frames, states, None, None, None, None


def _within(places: Tensor, rows: int) -> Tensor:
    """Those in [0, rows), and `rows` for the others."""
    return torch.where((places >= 0) & (places < rows), places, rows)


def filled_up(place: Tensor) -> Tensor:
    """[B, T, U1], with nodes that are not there up to 2 in each dimension."""
    missing = [more for size in reversed(place.shape) for more in (0, max(2 - size, 0))]
    return torch.nn.functional.pad(place, missing, value=-1) if any(missing) else place


def utterance_spans(counts: list[int], tile: int) -> list[tuple[int, int]]:
    """First utterance of each tile and number of its utterances, at least 2; counts: rows of each utterance."""
    ends = list(itertools.accumulate(counts))
    spans = []
    for start in range(0, ends[-1], tile):
        first, last = (bisect.bisect_right(ends, row) for row in (start, min(start + tile, ends[-1]) - 1))
        first = min(first, max(len(counts) - 2, 0))
        spans.append((first, max(last - first + 1, 2)))
    return spans


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
