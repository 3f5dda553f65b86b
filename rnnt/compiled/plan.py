"""Peak memory of one training call: a tile, the planes, the sums of the gradients.

Bytes, with n = B T U1, N rows (all of them live), D = T + U diagonals, R rows of a tile, r rows of a block of tiles, V
padded as loss.py does it, s bytes of the compute dtype, w of the planes and sums (4, float64: 8), and
S = B T H + B U1 H + V H + V.  The largest of these moments, with the output layer's copy (V H s + V w) where
there are tiles:

    rows       2 n w + 8 N + 89 r                    planes, a block's integers while they are looked up
    scores     2 n w + 8 N + 49 r + R (H + V) s      untiled: + R V s, the tile before
    lattice    2 n w + 16 B D (U1 + 1) + 66 n        scores and gathered planes in float64
    live rows  2 n w + 67 N                          the nodes with a weight, as indices
    again      4 n w + 8 N + 89 r + S w              the same of live rows
    gradients  4 n w + 8 N + 49 r + S w + tile       and, where there was a tile before, its gradients: R H w + V H s
    finish     4 n w + 8 N + 49 r + S w + S s        results beside sums; 16 bits: + the largest sum once more

untiled with the products N V s, N in whole tiles.  A tile's gradients take, whichever is more,

    16 bits, tiled      R (H (4 + s) + V (4 + 2 s))    or   R (H (4 + s) + V s) + V H s
    16 bits, untiled    R V (4 + 2 s)                  or   R (H (4 + 2 s) + 2 V s) + V H s
    32 or 64, tiled     R (2 H + V) s + V H s               untiled: + R V s

and, on a GPU, adding d_pre [R, H] to its frames and states 2 R H w + V H s + B T H w.
Before: rnnt/plan.py.  Beside: loss.py, tiles.py, whose sizes these are.
"""

import torch

from rnnt.compiled.loss import _kept_rows, _padded, _size, clipped_tile_rows
from rnnt.compiled.tiles import BLOCK, nodes
from rnnt.problem import JointProblem

INTEGER = 8  # bytes
ROW = 6 * INTEGER + 1  # what is kept of each row of a block: the fields of TileRows without dropout's keys, validity
ROW_LOOKED_UP = ROW + 5 * INTEGER
LATTICE_NODE = 8 * 8 + 2  # eight float64 or int64 planes and two masks when the occupancies have been found
LIVE_ROW = 8 * INTEGER + 3


def plan(problem: JointProblem) -> tuple[int | None, dict[str, int]]:
    """Rows of a tile of the backward pass (None: untiled), and the bytes of each kind at the peak."""
    alignment, weight, dtype = problem.alignment, problem.linear_weight, problem.compute_dtype
    untiled = problem.tile_rows is None
    rows, n = alignment.rows, nodes(alignment)
    features, classes = weight.shape[1], _padded(len(weight))
    narrow, wide = dtype.itemsize, torch.promote_types(dtype, torch.float32).itemsize
    layer = {"output layer's copy": classes * (features * narrow + wide)}
    kept = {"kept products": _kept_rows(rows, weight, dtype) * classes * narrow if untiled else 0}

    def sizes(tile: int) -> tuple[int, int]:
        """Rows and their integers in a block of tiles."""
        return min(-(-rows // tile) * tile, max(BLOCK // tile, 1) * tile), INTEGER * rows

    tile_rows = clipped_tile_rows(problem)
    tile = _size(weight, dtype, tile_rows)
    block, every = sizes(tile)
    scored = tile * (features + classes * (2 if untiled and tile < rows else 1)) * narrow
    planes = 2 * n * wide
    lattice = 16 * alignment.utterances * (alignment.frames + alignment.columns - 1) * (alignment.columns + 1)
    moments = [
        {"planes": planes, "rows": every + ROW_LOOKED_UP * block, **layer},
        {"planes": planes, "rows": every + ROW * block, "tile workspace": scored, **layer},
        {"planes": planes, "lattice": lattice + LATTICE_NODE * n},
        {"planes": planes, "rows": LIVE_ROW * rows},
    ]

    tile = _size(weight, dtype, tile_rows, backward=True)
    block, every = sizes(tile)
    gradients = [x.numel() for x in (problem.encoder, problem.predictor, weight, problem.linear_bias) if x is not None]
    states, layer_gradient = tile * features * wide, classes * features * narrow
    product = tile * classes * narrow if untiled else 0
    before = states + layer_gradient if tile < rows else 0
    workspace = _workspace(tile, features, classes, narrow, untiled) + product + before
    if problem.device.type != "cpu":
        added = 2 * states + layer_gradient + product + gradients[0] * wide
        workspace = max(workspace, added)
    running = {"planes": 2 * planes, "rows": every + ROW * block, **layer}
    running["sums of gradients"] = sum(gradients) * wide
    results = sum(gradients) * narrow + (max(gradients) * wide if narrow < wide else 0)
    moments += [
        running | {"rows": every + ROW_LOOKED_UP * block},
        running | {"tile workspace": workspace},
        running | {"tile workspace": states + layer_gradient + product, "gradients": results},
    ]
    return None if untiled else tile, max(moments, key=lambda parts: sum(parts.values())) | kept


def _workspace(tile: int, features: int, classes: int, narrow: int, untiled: bool) -> int:
    """A tile's intermediates in the backward pass, without the product where it is kept."""
    hidden, scores, layer = tile * features, tile * classes, classes * features
    if narrow >= 4:
        return (2 * hidden + scores + layer) * narrow
    if untiled:
        return max(scores * (4 + narrow), hidden * (4 + 2 * narrow) + (scores + layer) * narrow)
    return hidden * (4 + narrow) + max(scores * (4 + 2 * narrow), (scores + layer) * narrow)
