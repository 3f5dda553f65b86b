"""Lattice nodes in tiles of one static size, and functions of a tile compiled once each.

    frame = node div U1,   utterance = frame div T,   state = utterance U1 + node mod U1

A tile's rows are nodes of the planes [B, T, U1], by their flat index, in ascending order.  Its size depends on the
shapes of the output layer alone, never on a batch's lengths, so that a compiled function serves a whole training run;
what is missing in the last tile is filled up with rows of node 0 that are not valid.  Integers are looked up for a
block of tiles at a time and reach a tile as one tensor.
Before: layout.py, tiling.py.  After: loss.py, dense_loss.py.
"""

import functools
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rnnt.dropout import row_keys
from rnnt.layout import dense_mask, row_offsets
from rnnt.problem import Alignment
from rnnt.tiling import tile_size

# Bytes of a tile's intermediates, and the most rows of one: a core's cache on the CPU; elsewhere work enough to hide
# the launches, which takes more where 16-bit products are quick.  Rows that are looked up at once.
WORKSPACE = {"cpu": 4 * 2**20, "cuda": 192 * 2**20}
WORKSPACE_16_BITS = {"cpu": 4 * 2**20, "cuda": 336 * 2**20}
LARGEST_TILE = {"cpu": 512, "cuda": 2**17}
BLOCK = {"cpu": 2**18, "cuda": 2**20}


class TileRows(NamedTuple):
    """What a tile reads of its rows, [rows] int64 each."""

    frame: Tensor  # index into [B T, H]
    state: Tensor  # index into [B U1, H]
    label: Tensor  # -1: none
    row: Tensor | None = None  # index into the products that are kept; like the keys None where nobody asks
    key_1: Tensor | None = None  # of the dropout mask
    key_2: Tensor | None = None


class Block(NamedTuple):
    """Rows of several tiles."""

    integers: Tensor  # [tiles, fields, rows] int64: each tile's TileRows
    node: Tensor  # [tiles, rows] int64, index into a flat plane [B T U1]
    utterance: Tensor  # [tiles, rows] int64
    valid: Tensor  # [tiles, rows] bool; the others are of node 0


class LiveNodes(NamedTuple):
    """The nodes that take part in the backward pass, ascending."""

    node: Tensor  # [rows] int64, index into a flat plane [B T U1]
    place: Tensor  # [B, T, U1] int32: of each node in `node`; -1: it is not in there
    counts: list[int]  # [B], of each utterance


def compiled(function: Callable[..., Any], constants: tuple[Any, ...]) -> Callable[..., Any]:
    """function(constants, ...) as one graph of torch.compile, which never falls back to eager execution.

    torch.compile counts recompilations per code object and refuses at a limit, so each set of constants gets its own,
    and so does each number of threads.  The constants fix all that a call could differ in but the lengths of dimensions
    marked as dynamic, so no more than those is checked at each call.
    """
    return graph(function, constants, torch.get_num_threads())


@functools.cache
def graph(function: Callable[..., Any], constants: tuple[Any, ...], _threads: int) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        return function(constants, *arguments)

    from torch._inductor import config  # takes a second

    call.__code__ = call.__code__.replace(co_name=f"{function.__name__}_{next(_numbers)}")
    options = dict(OPTIONS)  # of which torch.compile takes some out
    if hasattr(config, "deterministic"):  # since torch 2.10
        options["deterministic"] = True  # sums in the order of one fixed kernel, not of the one that was quicker today
    return first_call_alone(torch.compile(call, fullgraph=True, dynamic=False, options=options))


def first_call_alone(call: Callable[..., Any]) -> Callable[..., Any]:
    """Threads that come together would each compile it."""
    lock, warm = threading.Lock(), False

    def wait_for_first(*arguments: Any) -> Any:
        nonlocal warm
        if warm:
            return call(*arguments)
        with lock:
            found = call(*arguments)
            warm = True
        return found

    return wait_for_first


_numbers = itertools.count()


def _guards(guards: Sequence[Any]) -> list[bool]:
    """Which of them are checked at each call: the lengths of dynamic dimensions, and PyTorch's global switches."""
    return [guard.guard_type in ("SHAPE_ENV", "GLOBAL_STATE") for guard in guards]


# Inductor computes an elementwise value that is used twice, or takes many operations, anew, where it would by default
# write it to memory in float32 (a product's gradient is laid over the product then); sums of up to 17 terms, the most
# that the lattice has, are written out; and indices, which are made here, are not checked for every element.
OPTIONS: dict[str, Any] = {
    "guard_filter_fn": _guards,
    "realize_reads_threshold": 16,
    "realize_opcount_threshold": 200,
    "unroll_reductions_threshold": 18,
    "assert_indirect_indexing": False,
}


def mark_dynamic(x: Tensor, *dims: int) -> Tensor:
    """x as a compiled function takes it whose `dims` differ from call to call; none may be of length 1, for which
    torch.compile makes a graph of its own."""
    for dim in dims:
        torch._dynamo.maybe_mark_dynamic(x, dim)
    return x


def in_memory(x: Tensor) -> Tensor:
    """x, within a compiled function, computed once, where Inductor would compute it anew wherever it is read: a view by
    strides makes it write x to memory."""
    x = x.contiguous()
    return x.as_strided(x.shape, x.stride())


def kind(device: torch.device) -> str:
    return "cpu" if device.type == "cpu" else "cuda"


def static_size(tile_rows: int | str | None, row_bytes: int, dtype: torch.dtype, device: torch.device) -> int:
    """Rows of a tile."""
    workspace = WORKSPACE_16_BITS if dtype.itemsize == 2 else WORKSPACE
    size = tile_size(tile_rows, row_bytes, workspace[kind(device)])
    return size if isinstance(tile_rows, int) else min(size, LARGEST_TILE[kind(device)])


def blocks(
    alignment: Alignment, node: Tensor, size: int, seed: Tensor | None = None, numbered: bool = False
) -> Iterator[Block]:
    """The given nodes [any] int64 in tiles of `size`.

    seed: of dropout; numbered: whether a row's index into the kept products is asked for.
    """
    count = max(BLOCK[kind(node.device)] // size, 1) * size
    for part in node.split(count):
        yield _block(alignment, part, size, seed, numbered)


def _block(alignment: Alignment, node: Tensor, size: int, seed: Tensor | None, numbered: bool) -> Block:
    frames, columns, past = alignment.frames, alignment.columns, nodes(alignment)
    if missing := -len(node) % size:
        node = torch.nn.functional.pad(node, (0, missing), value=past)
    node = node.view(-1, size)
    valid = node < past
    node = torch.where(valid, node, 0)
    if not alignment.host_sync:  # nodes outside the lengths are among them
        valid &= dense_mask(alignment).flatten()[node]
        node = torch.where(valid, node, 0)
    frame = node // columns
    utterance = frame // frames
    state = node - (frame - utterance) * columns
    labels = torch.nn.functional.pad(alignment.targets, (0, 1), value=-1)  # [B, U1]
    has_label = torch.arange(columns, device=node.device) < alignment.target_lengths[:, None]
    label = torch.where(has_label, labels, -1).flatten()[state]
    fields = [frame, state, label]
    if numbered or seed is not None:
        t, u = frame - utterance * frames, state - utterance * columns
        row = row_offsets(alignment)[utterance] + t * (alignment.target_lengths[utterance] + 1) + u
        # Not in the tile: Inductor computes an integer expression anew at every use, and a hash uses each step twice.
        keys = (row, row) if seed is None else row_keys(seed, row)
        fields += [node if alignment.rows == past else row, *keys]  # the place in all_nodes
    return Block(torch.stack(fields, 1), node, utterance, valid)


def all_nodes(alignment: Alignment) -> Tensor:
    """The nodes inside the lengths [N], in the order of rows; where the host does not know N, all [B T U1]."""
    node = torch.arange(nodes(alignment), device=alignment.targets.device)
    if alignment.rows == len(node):
        return node
    inside = dense_mask(alignment).flatten()
    row = torch.where(inside, inside.cumsum(0) - 1, alignment.rows)
    return torch.empty_like(node[: alignment.rows + 1]).scatter_(0, row, node)[:-1]


def live_nodes(blank: Tensor, label: Tensor, alignment: Alignment) -> LiveNodes:
    """The nodes that have a weight [B, T, U1] other than 0 (NaN is one); where the host may not wait all [B T U1]."""
    sizes = alignment.utterances, alignment.frames, alignment.columns
    if not alignment.host_sync:
        node = torch.arange(nodes(alignment), device=blank.device)
        return LiveNodes(node, node.int().view(sizes), [sizes[1] * sizes[2]] * sizes[0])
    live = ((blank != 0) | (label != 0)).flatten(1)
    place = live.flatten().cumsum(0, dtype=torch.int32).view(sizes) - 1
    place = torch.where(live.view(sizes), place, -1)
    counts = live.sum(1).tolist()  # waits for the device
    return LiveNodes(torch.nonzero_static(live.flatten(), size=sum(counts))[:, 0], place, counts)


def nodes(alignment: Alignment) -> int:
    return alignment.utterances * alignment.frames * alignment.columns


def plane(values: Sequence[Tensor], node: Tensor, alignment: Alignment) -> Tensor:
    """[B, T, U1] of the values [rows] of each tile of all_nodes; 0 outside the lengths."""
    found = torch.cat([*values])[: len(node)]
    if len(node) < nodes(alignment):
        found = found.new_zeros(nodes(alignment)).index_copy_(0, node, found)
    found = found.view(alignment.utterances, alignment.frames, alignment.columns)
    return found if alignment.host_sync else torch.where(dense_mask(alignment), found, 0)
