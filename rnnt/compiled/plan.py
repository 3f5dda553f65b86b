"""Peak memory of one training call: a tile, the planes, the sums of the gradients.

Bytes, with n = B T U1, N rows (all of them live), R rows of a tile, b utterances that a tile reaches,
d = 2 B U1 (T + U) scores of the lattice (on a GPU in whole chunks of c), V padded as loss.py does it, s bytes of the
compute dtype, w of the planes and sums (4, float64: 8), l of lse (4, 16 bits aside 8), p its parts (1 or 2), and
S = B T H + B U1 H + V H + V.  The largest of these moments, with the output layer's copy (V H s + V w) where there are
tiles:

    scores     8 N + N k + R ((H + V) s + 24)        k = 2 w + l: two planes and lse
    planes     8 N + 2 N k                           planes beside the tiles' scores
    lattice    n k + 40 d                            on the CPU: arcs, and where they are found
               n k + 8 d + (40 + 2 w) c              on a GPU: scores, and a chunk's paths
               n (k + 2 w) + 8 d                     occupancies; FastEmit: n w more
    live rows  n k + 9 n + 8 N                       the nodes with a weight
    gradients  n k + 4 n + 8 N + S w + R (24 + (4 + p) w) + tile
    finish     n k + 4 n + 8 N + S w + G             results, of G bytes, beside their sums

untiled with the products N V s, N in whole tiles.  A tile's gradients take V H s and, whichever is more,

    its matrix products    on a GPU R (2 H + V) s, tiled at 16 bits R (H + V) s, on the CPU R (H (w + s) + V s)
    its sums               R H (w + s) on the CPU, R H s + b (T + U1) H w on a GPU, where 4 n more tell frames' places

and 400 KB that oneDNN takes for a 16-bit product on the CPU.  In float16 V H w, and on the CPU R (H + V) w more.
Before: rnnt/plan.py.  Beside: loss.py, tiles.py, whose sizes these are.
"""

import torch

from rnnt.compiled.lattice import BLOCK, CHUNK
from rnnt.compiled.loss import _kept_rows, _padded, _size, clipped_tile_rows
from rnnt.compiled.tiles import nodes
from rnnt.problem import JointProblem, lse_dtype

INTEGER = 8  # bytes
ROW = 3 * INTEGER  # of each row of a tile: the fields of TileRows without a place and keys
SCORE = 8
ARC = 40  # on the CPU: indices of its node and of where it is read, masks, and its value
PLACE = 4
ONEDNN = 400_000


def plan(problem: JointProblem) -> tuple[int | None, dict[str, int]]:
    """Rows of a tile of the backward pass (None: untiled), and the bytes of each kind at the peak."""
    alignment, weight, dtype = problem.alignment, problem.linear_weight, problem.compute_dtype
    untiled = problem.tile_rows is None
    rows, n = alignment.rows, nodes(alignment)
    features, classes = weight.shape[1], _padded(len(weight))
    narrow, wide = dtype.itemsize, torch.promote_types(dtype, torch.float32).itemsize
    layer = {"output layer's copy": classes * (features * narrow + wide)}
    kept = {"kept products": _kept_rows(rows, weight, dtype) * classes * narrow if untiled else 0}
    every = INTEGER * rows
    tile_rows = clipped_tile_rows(problem)
    tile = _size(weight, dtype, tile_rows)
    scored = tile * ((features + classes) * narrow + ROW)
    lse = lse_dtype(dtype).itemsize
    plane = 2 * wide + lse  # of a node: the two planes, later weights, and lse
    planes = plane * n
    moments = [
        {"planes": plane * rows, "rows": every, "tile workspace": scored, **layer},
        {"planes": plane * rows + planes, "rows": every, **layer},
        {"planes": planes, "lattice": _lattice(problem, wide)},
        {"planes": planes + (2 + (problem.fastemit_lambda != 0)) * n * wide, "lattice": SCORE * _scores(problem)},
        {"planes": planes, "rows": every + (1 + 2 * PLACE) * n},
    ]

    tile = _size(weight, dtype, tile_rows, backward=True)
    every += PLACE * n
    floats = [x for x in (problem.encoder, problem.predictor, weight, problem.linear_bias) if x is not None]
    sums, results = sum(x.numel() for x in floats) * wide, sum(x.numel() * x.element_size() for x in floats)
    half = problem.compute_dtype == torch.float16
    states, layer_gradient = tile * features, classes * features * (wide if half else narrow)
    if problem.device.type == "cpu":
        saved, added = states * wide + (ONEDNN if narrow < wide else 0), states * wide
        saved += tile * (features + classes) * wide if half else 0
    else:
        saved = 0 if narrow < wide and not untiled else states * narrow
        utterances = min(tile // (alignment.frames * alignment.columns) + 2, alignment.utterances)
        added = utterances * (alignment.frames + alignment.columns) * features * wide
        every += PLACE * n
    workspace = max((states + tile * classes) * narrow + saved, states * narrow + added) + layer_gradient
    workspace += (ROW + (4 + lse // wide) * wide) * tile
    running = {"planes": planes, "rows": every, **layer}
    running["sums of gradients"] = sums
    moments += [
        running | {"tile workspace": workspace},
        running | {"tile workspace": layer_gradient, "gradients": results},
    ]
    return None if untiled else tile, max(moments, key=lambda parts: sum(parts.values())) | kept


def _scores(problem: JointProblem) -> int:
    """Of both sides of the lattice."""
    columns = max(problem.alignment.columns, 2)
    diagonals = problem.alignment.frames + columns - 1
    if problem.device.type != "cpu":
        diagonals = -(-diagonals // CHUNK) * CHUNK
    return 2 * problem.alignment.utterances * columns * diagonals


def _lattice(problem: JointProblem, wide: int) -> int:
    """Bytes while its scores are found."""
    if problem.device.type == "cpu":
        return ARC * _scores(problem)
    chunk = 2 * problem.alignment.utterances * max(problem.alignment.columns, 2) * CHUNK
    paths = sum(SCORE * (1 + 1 / k) for k in (2**i for i in range(1, BLOCK.bit_length()))) + 2 * wide
    return SCORE * _scores(problem) + int(paths * chunk)
