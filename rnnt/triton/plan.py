"""Peak memory of one training call: a tile of live rows, the sums of the gradients, a few numbers a row.

Bytes, with N rows, R rows of a tile, P rows of hidden that the forward pass works on at once, V and H padded, s bytes
of the compute dtype, l of lse (4, float32: 8), i of a row's index (4, past 2^31 rows 8), G shares of the weight's
gradient and K blocks of rows in a tile, the shares of the bias's.  The largest of

    scores     (8 + l) N + P H s                blank, label, lse; hidden
    lattice    (32 + l) N                       the same, alpha and beta in float64, two occupancies
    backward   (8 + l) N + 2 i N + B T H s + 4 (B U1 H + G V H + K V) + R (H + V) s + 16 R
                                                lse and occupancies; live rows; gradients and their sums; a tile
    finish     the same without the tile, + 4 V H + (B U1 H + V H + V) s

each with the logits N V s where they are kept, and a copy of the output layer where its rows are not aligned or
products are TF32's.
Before: rnnt/plan.py.  Beside: loss.py, whose tensors these are.
"""

from rnnt.problem import JointProblem, lse_dtype
from rnnt.triton.config import cdiv
from rnnt.triton.live_rows import index_type
from rnnt.triton.log_probs import forward_programs
from rnnt.triton.operands import Operands, aligned_features
from rnnt.triton.output_layer import weight_shares
from rnnt.triton.tiles import backward_tile

FLOAT32 = 4


def plan(problem: JointProblem, multiprocessors: int = 132) -> tuple[int | None, dict[str, int]]:
    """Rows of a tile of the backward pass (None: untiled), and the bytes of each kind at the peak.

    multiprocessors: of the GPU; an H100's or H200's where none is named.
    """
    alignment, untiled = problem.alignment, problem.tile_rows is None
    tile_rows = problem.tile_rows if isinstance(problem.tile_rows, int) else 0
    x = Operands(
        problem.encoder, problem.predictor, problem.linear_weight, problem.linear_bias, alignment,
        alignment.encoder_lengths, problem.seed, problem.activation, problem.dropout_p, multiprocessors,
    )  # fmt: skip
    rows, narrow = alignment.rows, problem.compute_dtype.itemsize
    tile = backward_tile(x, tile_rows)
    working = forward_programs(x, tile_rows) * x.configs.log_probs_fwd.block_rows
    layer, states = x.padded_classes * x.padded_features, problem.predictor.numel()
    bias = 0 if problem.linear_bias is None else x.padded_classes
    sums = states + weight_shares(x) * layer + cdiv(tile, x.configs.log_probs_bwd.block_rows) * bias
    index = 2 * index_type(rows).itemsize
    kept_numbers = 2 * FLOAT32 + lse_dtype(problem.compute_dtype).itemsize  # of a row
    running = {
        "rows": (kept_numbers + index) * rows,
        "sums of gradients": FLOAT32 * sums,
        "gradients": problem.encoder.numel() * narrow,
    }
    workspace = tile * (x.padded_features + x.padded_classes) * narrow + 16 * tile
    results = (states + problem.linear_weight.numel() + bias) * narrow
    moments = [
        {"rows": kept_numbers * rows, "tile workspace": working * x.padded_features * narrow},
        {"rows": (kept_numbers + 2 * FLOAT32) * rows, "lattice": 2 * 8 * rows},
        running | {"tile workspace": workspace},
        running | {"gradients": running["gradients"] + results, "tile workspace": FLOAT32 * layer},
    ]
    kept = {
        "kept logits": rows * x.padded_classes * narrow if untiled else 0,
        "output layer's copy": _copied_features(x) * x.classes * narrow,
    }
    return None if untiled else tile, max(moments, key=lambda parts: sum(parts.values())) | kept


def _copied_features(x: Operands) -> int:
    """Features of a row of the output layer's copy, which is aligned or rounded to TF32; 0 where it needs none."""
    aligned = aligned_features(x.features, x.weight.dtype)
    return 0 if aligned == x.features and x.precision != "tf32" else aligned
