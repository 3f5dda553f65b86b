"""Lattice nodes in tiles of one static size, and functions of a tile compiled once each.

    frame = node div U1,   utterance = frame div T,   state = utterance U1 + node mod U1

A tile's rows are nodes of the planes [B, T, U1], by their flat index, in ascending order.  Its size depends on the
shapes of the output layer alone, never on a batch's lengths, so that a compiled function serves a whole training run;
what is missing in the last tile is filled up with nodes that are asked for by the pass.  A tile looks its nodes up by
itself, within the compiled function, in tables of the whole batch: few operators are left for the host.
Before: layout.py, tiling.py.  After: loss.py, dense_loss.py.
"""

import functools
import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rnnt.dropout import row_keys
from rnnt.layout import dense_mask, row_offsets
from rnnt.problem import Alignment
from rnnt.tiling import tile_size

# Bytes of a tile's intermediates, and the most rows of one: a core's cache on the CPU; elsewhere work enough to hide
# the launches, which takes more where 16-bit products are quick.
WORKSPACE = {"cpu": 4 * 2**20, "cuda": 192 * 2**20}
WORKSPACE_16_BITS = {"cpu": 4 * 2**20, "cuda": 336 * 2**20}
LARGEST_TILE = {"cpu": 512, "cuda": 2**17}


class TileRows(NamedTuple):
    """What a tile reads of its rows, [rows] int64 each."""

    frame: Tensor  # index into [B T, H]
    state: Tensor  # index into [B U1, H]
    label: Tensor  # -1: none
    place: Tensor | None = None  # index into the products that are kept; like the keys None where nobody asks
    key_1: Tensor | None = None  # of the dropout mask
    key_2: Tensor | None = None


class PackedRows(NamedTuple):
    """An order of nodes: (b, t, u) is row offsets[b] + t columns[b] + u."""

    offsets: Tensor  # [B + 1] int64
    columns: Tensor  # [B]


class Tables(NamedTuple):
    """What nodes are looked up in; no dimension is shorter than 2, see mark_dynamic."""

    frames: Tensor  # [1] int64: T, and U1; as lengths of a tensor torch.compile would set 1 apart
    columns: Tensor
    targets: Tensor  # [B U1] int64; no label in the last column
    target_lengths: Tensor  # [B]
    kept: PackedRows | None  # the order of products that are kept
    rows: PackedRows | None  # of packed rows, and the seed [1], where there is dropout
    seed: Tensor | None


class LiveNodes(NamedTuple):
    """The nodes that take part in the backward pass, ascending."""

    node: Tensor  # [rows] int64, index into a flat plane [B T U1]
    place: Tensor  # [B, T, U1] int32: of each node in `node`; -1: it is not in there
    counts: list[int]  # [B], of each utterance


def compiled(
    function: Callable[..., Any], constants: tuple[Any, ...], differentiates: bool = False
) -> Callable[..., Any]:
    """function(constants, ...) as one graph of torch.compile, which never falls back to eager execution.

    differentiates: the function asks autograd for gradients.  Such a one is taken into the graph unseen, and traced
    while it runs, with what autograd does, so that what it returns comes from one graph that knows no autograd.

    torch.compile counts recompilations per code object and refuses at a limit, so each set of constants gets its own,
    and so does each number of threads.  The constants fix all that a call could differ in but the lengths of dimensions
    marked as dynamic, so no more than those is checked at each call.
    """
    return graph(function, constants, differentiates, torch.get_num_threads())


@functools.cache
def graph(
    function: Callable[..., Any], constants: tuple[Any, ...], differentiates: bool, _threads: int
) -> Callable[..., Any]:
    def whole(*arguments: Any) -> Any:
        return function(constants, *arguments)

    run = torch.compiler.allow_in_graph(whole) if differentiates else whole

    def call(*arguments: Any) -> Any:
        return run(*arguments)

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


def tables_of(alignment: Alignment, keep: bool, seed: Tensor | None) -> Tables:
    """keep: whether a row's place among the kept products is asked for; seed: of dropout."""
    targets = torch.nn.functional.pad(alignment.targets, (0, 1))
    lengths = vector(alignment.target_lengths)
    kept = rows = None  # of tensors of their own: a compiled function would take one that comes twice for one input
    if seed is not None:
        rows = PackedRows(vector(row_offsets(alignment)), vector(lengths + 1))
    if keep and alignment.rows == nodes(alignment):  # the order of all_nodes
        starts = torch.arange(alignment.utterances + 1, device=lengths.device) * (alignment.frames * alignment.columns)
        kept = PackedRows(vector(starts), vector(torch.full_like(lengths, alignment.columns)))
    elif keep:
        kept = PackedRows(vector(row_offsets(alignment)), vector(lengths + 1))
    return Tables(
        frames=lengths.new_full((1,), alignment.frames),
        columns=lengths.new_full((1,), alignment.columns),
        targets=vector(targets),
        target_lengths=lengths,
        kept=kept,
        rows=rows,
        seed=seed,
    )


def vector(x: Tensor) -> Tensor:
    """x, flattened, as a compiled function takes it whatever its length; a view, which torch.compile tells apart."""
    return mark_dynamic((torch.cat([x, x]) if x.numel() == 1 else x).contiguous().reshape(-1), 0)


def look_up(tables: Tables, node: Tensor) -> TileRows:
    """The rows of nodes [any] int64, in a compiled function or outside."""
    frames, columns = tables.frames, tables.columns
    frame = node // columns
    utterance = frame // frames
    u = node - frame * columns
    state = utterance * columns + u
    label = torch.where(u < tables.target_lengths[utterance], tables.targets[state], -1)
    fields = [frame, state, label]
    if tables.kept is not None or tables.rows is not None:
        t = frame - utterance * frames
        kept, row = (
            state if order is None else order.offsets[utterance] + t * order.columns[utterance] + u
            for order in (tables.kept, tables.rows)
        )
        fields.append(kept)
        if tables.seed is not None:
            fields += row_keys(tables.seed, in_memory(row), in_memory)
    # Inductor computes an integer expression anew at every use: for each feature, and a hash uses each step twice.
    return TileRows(*in_memory(torch.stack(fields)).unbind(0))


def tiles_of(alignment: Alignment, node: Tensor, size: int, missing: int) -> list[Tensor]:
    """The given nodes [any] int64 in tiles of `size`; missing: the node in place of those that are not there, in the
    last tile and, where the host does not know them, outside the lengths."""
    if not alignment.host_sync:
        node = torch.where(dense_mask(alignment).flatten()[node], node, missing)
    if more := -len(node) % size:
        node = torch.nn.functional.pad(node, (0, more), value=missing)
    return list(node.split(size)) if len(node) > 0 else []


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
