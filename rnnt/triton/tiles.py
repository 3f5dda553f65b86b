"""How many live rows the backward pass takes at a time, when the caller leaves it open ("auto", and untiled).

A tile's workspace is its hidden and d_logits.  Within it, the two largest kernels decide: log_probs_bwd runs
blocks_v programs a block of rows, hidden_bwd blocks_h, and the chip runs `slots` of them at a time, so a tile that
needs a little more than a whole number of such waves wastes most of one.  Sizes depend on the shapes of the output
layer and the chip alone.  Before: tiling.py.  After: loss.py.
"""

import functools

from rnnt.triton.config import cdiv, ceil_to
from rnnt.triton.operands import Operands

WORKSPACE = 64 * 2**20  # bytes: a whole step's kernels take 3 % longer with 48 MiB, 3 % less with 128 MiB
LARGEST = 128 * 2**20  # for large vocabularies, where 64 MiB hold less than one wave


def backward_tile(x: Operands, tile_rows: int) -> int:
    """Rows of a tile, in whole blocks, of a call's few rows no more than these need; tile_rows 0: left open."""
    return ceil_to(min(tile_rows or balanced_tile(x), x.alignment.rows), x.configs.pad_rows)


def balanced_tile(x: Operands) -> int:
    """Rows of a tile."""
    config = x.configs
    block_rows = config.log_probs_bwd.block_rows
    blocks = _balanced_blocks(
        x.programs_at_once,
        cdiv(x.padded_classes, config.log_probs_bwd.block_v),
        cdiv(x.padded_features, config.hidden_bwd.block_h),
        x.padded_features,
        x.padded_classes,
        block_rows * (x.padded_features + x.padded_classes) * x.weight.dtype.itemsize,
    )
    return blocks * block_rows


@functools.cache
def _balanced_blocks(slots: int, blocks_v: int, blocks_h: int, features: int, classes: int, block_bytes: int) -> int:
    """Blocks of rows, of those that fill three quarters of the workspace or more: the best time a block."""
    most = max(WORKSPACE // block_bytes, min(slots // blocks_h, LARGEST // block_bytes), 1)

    def time(blocks: int) -> float:
        return (cdiv(blocks * blocks_v, slots) * features + cdiv(blocks * blocks_h, slots) * classes) / blocks

    return min(range(most, most * 3 // 4, -1), key=time)
