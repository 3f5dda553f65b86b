"""The output layer's two gradient products, over a tile of live rows.

    d_hidden = d_logits weight,   d_pre = d_hidden * d hidden / d (encoder + predictor)
    d_weight = d_logits^T hidden

d_logits [tile, V padded], hidden and d_pre [tile, H padded], weight [V, H] in the compute dtype; products
accumulate in float32, d_weight over all tiles in float32, each block by one program in a fixed order, without atomics.
Before (backwards): log_probs.py.  After: joint.py.
"""

import triton
import triton.language as tl
from torch import Tensor

from rnnt.triton.config import cdiv, interpreted_dot
from rnnt.triton.joint import activation_slope, keep_under_keys, row_keys, seed_keys
from rnnt.triton.launch import Launch
from rnnt.triton.operands import Operands, blocks_of


@triton.jit(do_not_specialize=["first", "drop_threshold", "blocks_h"])
def hidden_bwd_kernel(
    first: tl.int64,
    d_logits, weight, hidden, row_ptr, count_ptr, seed_ptr, scale_ptr,
    padded_classes, blocks_h, dropout_p, drop_threshold,
    ACTIVATION: tl.constexpr, DROPOUT: tl.constexpr, SCALE: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Owns BLOCK_ROWS live rows x BLOCK_H features of hidden, which becomes d_pre; reads d_logits rows and a slice of
    the output layer."""
    block_h = tl.program_id(0) % blocks_h
    local = tl.program_id(0) // blocks_h * BLOCK_ROWS
    start = first + local.to(tl.int64)
    count = tl.load(count_ptr)
    if start >= count:
        return
    h = block_h * BLOCK_H
    d_hidden = tl.zeros([BLOCK_ROWS, BLOCK_H], tl.float32)
    for v in range(0, padded_classes, BLOCK_V):
        g = d_logits.load([local, v])  # [BLOCK_ROWS, BLOCK_V]
        w = weight.load([v, h])  # [BLOCK_V, BLOCK_H]
        if WIDEN:
            g, w = g.to(tl.float32), w.to(tl.float32)
        d_hidden = tl.dot(g, w, d_hidden, input_precision=PRECISION)
    y = hidden.load([local, h]).to(tl.float32)
    if DROPOUT:
        slot = start + tl.arange(0, BLOCK_ROWS)
        row = tl.load(row_ptr + tl.where(slot < count, slot, start)).to(tl.int64)
        seed_key_1, seed_key_2 = seed_keys(seed_ptr)
        key_1, key_2 = row_keys(seed_key_1, seed_key_2, row)
        keep = keep_under_keys(key_1, key_2, h + tl.arange(0, BLOCK_H), drop_threshold)
        slope = activation_slope(y * (1 - dropout_p), ACTIVATION)
        gradient = tl.where(keep, d_hidden * slope / (1 - dropout_p), 0.0)
    else:
        gradient = d_hidden * activation_slope(y, ACTIVATION)
    if SCALE:
        gradient *= tl.load(scale_ptr)
    hidden.store([local, h], gradient.to(hidden.dtype))


def hidden_bwd(
    x: Operands, d_logits: Tensor, hidden: Tensor, row: Tensor, count: Tensor, state_scale: Tensor | None
) -> Launch:
    """Turn hidden [tile, H padded] of the live rows first .. first + tile into their d_pre, times state_scale [1]
    where there is one, in place."""
    config = x.configs.hidden_bwd
    tile, blocks_h = hidden.shape[0], cdiv(x.padded_features, config.block_h)
    return Launch(
        hidden_bwd_kernel, (tile // config.block_rows * blocks_h,),
        blocks_of(d_logits, config.block_rows, config.block_v), blocks_of(x.weight, config.block_v, config.block_h),
        blocks_of(hidden, config.block_rows, config.block_h), row, count, x.seed, state_scale,
        x.padded_classes, blocks_h, x.dropout_p, x.drop_threshold,
        ACTIVATION=x.activation, DROPOUT=x.dropout_p > 0, SCALE=state_scale is not None,
        PRECISION=x.precision, WIDEN=interpreted_dot(),
        BLOCK_ROWS=config.block_rows, BLOCK_V=config.block_v, BLOCK_H=config.block_h,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip


@triton.jit(do_not_specialize=["first", "tile"])
def weight_bwd_kernel(
    first: tl.int64,
    d_logits, hidden, count_ptr,
    d_weight_ptr,
    tile, padded_features, padded_classes,
    PRECISION: tl.constexpr, WIDEN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Owns BLOCK_V classes x BLOCK_H features of one share's running d_weight; adds its share of the tile's rows.

    Share s of S takes every S-th block of rows and has its own sums, so that enough programs run without atomics.
    """
    last = tl.minimum(tile, tl.load(count_ptr) - first).to(tl.int32)
    share = tl.program_id(2)
    begin = share * BLOCK_ROWS
    if begin >= last:
        return
    v, h = tl.program_id(0) * BLOCK_V, tl.program_id(1) * BLOCK_H
    total = tl.zeros([BLOCK_V, BLOCK_H], tl.float32)
    for row in range(begin, last, BLOCK_ROWS * tl.num_programs(2)):
        g = d_logits.load([row, v])  # [BLOCK_ROWS, BLOCK_V]
        y = hidden.load([row, h])  # [BLOCK_ROWS, BLOCK_H]
        if WIDEN:
            g, y = g.to(tl.float32), y.to(tl.float32)
        total = tl.dot(g.T, y, total, input_precision=PRECISION)
    offs_v = share.to(tl.int64) * padded_classes + v + tl.arange(0, BLOCK_V)
    offs_h = h + tl.arange(0, BLOCK_H)
    weight_ptrs = d_weight_ptr + offs_v[:, None] * padded_features + offs_h[None, :]
    tl.store(weight_ptrs, tl.load(weight_ptrs) + total)


def weight_shares(x: Operands) -> int:
    """How many shares of rows the weight's gradient is summed in: enough to fill a large chip with programs."""
    config = x.configs.weight_bwd
    blocks = cdiv(x.padded_classes, config.block_v) * cdiv(x.padded_features, config.block_h)
    return max(1, x.programs_at_once // blocks)


def weight_bwd(x: Operands, d_logits: Tensor, hidden: Tensor, count: Tensor, d_weight: Tensor) -> Launch:
    """Add the tile's share sums to d_weight [shares, V padded, H padded] float32."""
    config = x.configs.weight_bwd
    grid = (
        cdiv(x.padded_classes, config.block_v),
        cdiv(x.padded_features, config.block_h),
        d_weight.shape[0],
    )
    return Launch(
        weight_bwd_kernel, grid,
        blocks_of(d_logits, config.block_rows, config.block_v), blocks_of(hidden, config.block_rows, config.block_h),
        count,
        d_weight,
        hidden.shape[0], x.padded_features, x.padded_classes,
        PRECISION=x.precision, WIDEN=interpreted_dot(),
        BLOCK_ROWS=config.block_rows, BLOCK_V=config.block_v, BLOCK_H=config.block_h,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
