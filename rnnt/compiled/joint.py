"""The joint network's hidden layer at the rows of one tile, and the way of its gradient back to frames and states.

    hidden[row] = dropout(activation(encoder[frame of row] + predictor[state of row]))

    d_encoder[frame]   = sum of d_pre over the frame's rows          d_pre: gradient before the activation
    d_predictor[state] = sum of d_pre over the state's rows

encoder [B T, H], predictor [B U1, H] -> hidden [rows, H] in the compute dtype; the sum and the activation are taken in
float32 (float64 stays float64).  d_pre [rows, H] is in the compute dtype, its sums are in float32 or float64.

`joint` is traced into the compiled tile, so that the gathered rows never reach memory.  Left to autograd, their
gradient would be scattered by atomic additions, whose order changes from run to run.  So encoder and predictor are
constants in there, and gradients are taken at `Anchors`, zeros that own no memory, in the same order at every run.
IndexSums on the CPU: d_pre comes out of the tile and goes to index_add_, which has an order there.  GatherSums on a
GPU, where it adds atomically: every frame and every state gathers, still in the tile, what there is of its rows.

Graves et al. 2013, arXiv:1303.5778.  Before: layout.py.  After: log_probs.py.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from rnnt.compiled.tiles import TileRows, in_memory, mark_dynamic, nodes
from rnnt.dropout import keep_under_keys
from rnnt.problem import Alignment


class Anchors(NamedTuple):
    """Where a tile's gradient is asked for: zeros of no memory, and for those of GatherSums the places of nodes."""

    rows: Tensor | None = None  # [rows, H] in the compute dtype
    frames: Tensor | None = None  # [b, T, H] float32 or float64, of the b utterances that have rows in the tile
    states: Tensor | None = None  # [b, U1, H]
    place: Tensor | None = None  # [b, T, U1] of each node in the tile; outside [0, rows) where it is not in it

    def leaves(self) -> list[Tensor]:
        return [x for x in self[:3] if x is not None]


def joint(
    encoder: Tensor, predictor: Tensor, anchors: Anchors, rows: TileRows,
    activation: str, dropout_p: float, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """hidden [rows, H] in `dtype`."""
    wide = _wide(dtype)
    pre = encoder[rows.frame].to(wide) + predictor[rows.state].to(wide)
    if anchors.rows is not None:
        pre = pre + anchors.rows
    if anchors.place is not None:
        pre = Gathered.apply(pre, anchors.frames, anchors.states, anchors.place, dtype)
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
        self, node: Tensor, alignment: Alignment, tile: int, features: int, needed: list[bool], dtype: torch.dtype
    ) -> None:
        """node: of all rows of the pass, ascending; tile: rows of one; dtype: of d_pre."""
        lengths = alignment.frames, alignment.columns
        self.sums = [
            node.new_zeros((alignment.utterances, length, features if need else 0), dtype=_wide(dtype))
            for length, need in zip(lengths, needed, strict=True)
        ]
        zeros = torch.zeros((), dtype=dtype, device=node.device).expand(tile, features)
        self.anchors = Anchors(rows=zeros.requires_grad_()) if any(needed) else Anchors()

    def anchors_of(self, number: int) -> Anchors:
        """For tile `number` of the pass."""
        return self.anchors

    def add(self, number: int, integers: Tensor, gradients: list[Tensor]) -> None:
        """integers [fields, rows]: as in Block; gradients: of the leaves of the tile's anchors."""
        rows = TileRows(*integers.unbind(0))
        for d_pre in gradients:
            for total, index in zip(self.sums, (rows.frame, rows.state), strict=True):
                if total.shape[2] > 0:
                    total.view(-1, total.shape[2]).index_add_(0, index, d_pre.to(total.dtype))

    def results(self) -> list[Tensor]:
        return self.sums


class GatherSums:
    """The same on a GPU: sums over nodes in place of rows.

    position[b, t, u] is a node's place among all rows of the pass, -1 where it has none, so that a frame gathers over
    u, and a state over t, what of its nodes lies in the tile: in all utterances from that of the tile's first row to
    that of its last.  No dimension of position is shorter than 2, see mark_dynamic.
    """

    def __init__(
        self, node: Tensor, alignment: Alignment, tile: int, features: int, needed: list[bool], dtype: torch.dtype
    ) -> None:
        self.alignment, self.tile = alignment, tile
        self.position = positions(node, alignment)
        utterances, *lengths = self.position.shape
        self.sums = [
            node.new_zeros((utterances, length, features if need else 0), dtype=_wide(dtype))
            for length, need in zip(lengths, needed, strict=True)
        ]
        self.zero = self.sums[0].new_zeros(())
        self.spans = utterance_spans(node, tile, alignment)

    def anchors_of(self, number: int) -> Anchors:
        start, count = self.spans[number]
        frames, states = (
            mark_dynamic(self.zero.expand(count, *x.shape[1:]).requires_grad_(), 0, 1) if x.shape[2] > 0 else None
            for x in self.sums
        )
        if frames is None and states is None:
            return Anchors()
        place = mark_dynamic(self.position.narrow(0, start, count) - number * self.tile, 0, 1, 2)
        return Anchors(None, frames, states, place)

    def add(self, number: int, integers: Tensor, gradients: list[Tensor]) -> None:
        for total, part in zip([x for x in self.sums if x.shape[2] > 0], gradients, strict=True):
            total.narrow(0, *self.spans[number]).add_(part)

    def results(self) -> list[Tensor]:
        lengths = self.alignment.frames, self.alignment.columns
        return [x[: self.alignment.utterances, :length] for x, length in zip(self.sums, lengths, strict=True)]


class Gathered(torch.autograd.Function):
    """pre [rows, H] itself; its gradient goes to the frames' and the states' anchors, as the sums over each of them."""

    @staticmethod
    def forward(
        ctx: Any, pre: Tensor, frames: Tensor | None, states: Tensor | None, place: Tensor, dtype: torch.dtype
    ) -> Tensor:
        ctx.save_for_backward(place)
        ctx.dtype = dtype
        return pre.view_as(pre)

    @staticmethod
    def backward(ctx: Any, d_pre: Tensor) -> tuple[Tensor | None, ...]:
        (place,) = ctx.saved_tensors
        wide, rows = d_pre.dtype, len(d_pre)
        d_pre = in_memory(d_pre.to(ctx.dtype))
        inside = (place >= 0) & (place < rows)
        d_pre = torch.where(inside[..., None], d_pre[place.clamp(0, rows - 1)], 0)  # [b, T, U1, H], never in memory
        frames, states = (
            d_pre.to(wide).sum(dim) if need else None
            for dim, need in zip((2, 1), ctx.needs_input_grad[1:3], strict=True)
        )
        return None, frames, states, None, None


def positions(node: Tensor, alignment: Alignment) -> Tensor:
    """[B, T, U1] int32: each node's place in `node`, -1: none; filled up to 2 in each dimension."""
    sizes = alignment.utterances, alignment.frames, alignment.columns
    place = torch.arange(len(node), dtype=torch.int32, device=node.device)
    position = place.new_full((nodes(alignment),), -1).scatter_(0, node, place).view(sizes)
    missing = [more for size in reversed(sizes) for more in (0, max(2 - size, 0))]
    return torch.nn.functional.pad(position, missing, value=-1) if any(missing) else position


def utterance_spans(node: Tensor, tile: int, alignment: Alignment) -> list[tuple[int, int]]:
    """First utterance of each tile and number of its utterances, at least 2; read from the device (a host sync) unless
    all nodes are rows."""
    if alignment.host_sync:
        edges = torch.cat([node[::tile], node[tile - 1 :: tile], node[-1:]]).tolist()
    else:
        edges = [*range(0, len(node), tile), *range(tile - 1, len(node), tile), len(node) - 1]
    found = [edge // (alignment.frames * alignment.columns) for edge in edges]
    tiles = -(-len(node) // tile)
    most = max(alignment.utterances - 2, 0)
    return [
        (min(first, most), max(last - min(first, most) + 1, 2))
        for first, last in zip(found[:tiles], found[tiles:], strict=False)
    ]


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
