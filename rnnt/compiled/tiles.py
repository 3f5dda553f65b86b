"""Rows in tiles of one static size, and functions of a tile compiled once each.

A tile's size depends on the shapes of the output layer alone, never on a batch's lengths, so that a compiled function
serves a whole training run; what is missing in the last tile is filled up with rows that have no node.  Integers are
looked up for a block of tiles at a time.  Before: layout.py, tiling.py.  After: loss.py, dense_loss.py.
"""

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rnnt.dropout import row_keys
from rnnt.layout import row_offsets, rows_at
from rnnt.problem import Alignment
from rnnt.tiling import tile_size

# Bytes of a tile's intermediates, and the most rows of one: a core's cache on the CPU; elsewhere work enough to hide
# the launches.
WORKSPACE = {"cpu": 4 * 2**20, "cuda": 192 * 2**20}
LARGEST_TILE = {"cpu": 512, "cuda": 2**16}
BLOCK = 2**18


class TileRows(NamedTuple):
    """A tile's rows, [rows] int64 each."""

    utterance: Tensor
    frame: Tensor  # index into [B T, H]
    state: Tensor  # index into [B U1, H]
    label: Tensor  # -1: none
    row: Tensor  # packed index
    key_1: Tensor  # of the dropout mask; meaningless without one
    key_2: Tensor
    node: Tensor  # index into a flat plane [B T U1 + 1], whose last element belongs to the rows without a node


@functools.cache
def compiled(function: Callable[..., Any], constants: tuple[Any, ...]) -> Callable[..., Any]:
    """function(constants, ...) as one graph of torch.compile, which never falls back to eager execution.

    torch.compile counts recompilations per code object and refuses at a limit, so each set of constants gets its own.
    """

    def call(*arguments: Any) -> Any:
        return function(constants, *arguments)

    call.__code__ = call.__code__.replace(co_name=f"{function.__name__}_{next(_numbers)}")
    return torch.compile(call, fullgraph=True, dynamic=False)


_numbers = itertools.count()


def static_size(tile_rows: int | str | None, row_bytes: int, device: torch.device) -> int:
    """Rows of a tile."""
    kind = "cpu" if device.type == "cpu" else "cuda"
    size = tile_size(tile_rows, row_bytes, WORKSPACE[kind])
    return size if isinstance(tile_rows, int) else min(size, LARGEST_TILE[kind])


def tiles(alignment: Alignment, row: Tensor, size: int, seed: Tensor | None = None) -> Iterator[TileRows]:
    """The given rows [any] int64 in tiles of `size`; at least one tile."""
    offsets = row_offsets(alignment)
    past = nodes(alignment)  # no row has this index
    block = max(BLOCK // size, 1) * size
    for start in range(0, max(len(row), 1), block):
        part = row[start : start + block]
        missing = -len(part) % size if len(part) else size
        part = torch.nn.functional.pad(part, (0, missing), value=past)
        utterance, frame, state, label, valid = rows = rows_at(alignment, offsets, part)
        node = torch.where(valid, rows.node(alignment.columns), past)
        # Not in the tile: Inductor computes an integer expression anew at every use, and a hash uses each step twice.
        keys = (part, part) if seed is None else row_keys(seed, part)
        fields = utterance, frame, state, label, part, *keys, node
        yield from map(TileRows, *(x.split(size) for x in fields))


def all_rows(alignment: Alignment) -> Tensor:
    return torch.arange(alignment.rows, device=alignment.targets.device)


def live_rows(blank: Tensor, label: Tensor, alignment: Alignment) -> Tensor:
    """The rows that have a weight [B, T, U1] other than 0 (NaN is one), or all rows where the host may not wait."""
    if not alignment.host_sync:
        return all_rows(alignment)
    b, t, u = torch.where((blank != 0) | (label != 0))
    return row_offsets(alignment)[b] + t * (alignment.target_lengths[b] + 1) + u


def nodes(alignment: Alignment) -> int:
    return alignment.utterances * alignment.frames * alignment.columns


def flat_planes(alignment: Alignment, dtype: torch.dtype) -> Tensor:
    """[2, B T U1 + 1] zeros, float32 or float64: logp_blank and logp_label, for tiles to write to by node."""
    dtype = torch.promote_types(dtype, torch.float32)
    return torch.zeros((2, nodes(alignment) + 1), dtype=dtype, device=alignment.targets.device)


def dense(planes: Tensor, alignment: Alignment) -> tuple[Tensor, Tensor]:
    """logp_blank [B, T, U1], logp_label [B, T, U] of the flat planes."""
    blank, label = planes[:, :-1].view(2, alignment.utterances, alignment.frames, alignment.columns)
    return blank, label[:, :, :-1]


def flat(plane: Tensor) -> Tensor:
    """[B, T, U1] as [B T U1 + 1]: 0 for the rows without a node."""
    return torch.nn.functional.pad(plane.flatten(), (0, 1))
