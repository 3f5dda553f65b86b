"""Log-probabilities of the two arcs that leave each row's node, and their gradient, without logits in memory.

    logits     = hidden weight^T + bias
    lse        = log sum_v exp(logits[v])
    logp_blank = logits[blank] - lse,   logp_label = logits[label] - lse

With w_blank and w_label the weights of the two arcs (occupancies, at the scale of one utterance's loss):

    d_logits   = (w_blank + w_label) softmax(logits) - w_blank [v = blank] - w_label [v = label]
                 clamped to [-clamp, clamp] when clamp > 0, then times the row's scale
    d_bias     = sum over rows of d_logits

hidden [tile, H padded] and d_logits [tile, V padded] in the compute dtype; logp_blank, logp_label, lse [N] float32;
products and sums in float32.  A program of the forward kernel scores one block of rows and classes and leaves its
maximum and sum of exponentials, from which a second, small kernel makes the log-sum-exp; logits stay in registers.
The backward kernel computes them again and turns them into d_logits before they leave.
Blockwise maximum and sum: Milakov and Gimelshein 2018, arXiv:1805.02867.  Before: joint.py.  After: lattice.py, and
backwards output_layer.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rnnt.triton.config import interpreted_dot, precision
from rnnt.triton.launch import TileLaunch
from rnnt.triton.operands import Operands, blocks_of


@triton.jit
def block_logits(
    hidden, weight, bias_ptr, row, v, padded_features,
    PRECISION: tl.constexpr, WIDEN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """logits [BLOCK_ROWS, BLOCK_V] float32 of the rows from row and the classes from v (int32); hidden and weight are
    tensor descriptors."""
    logits = tl.zeros([BLOCK_ROWS, BLOCK_V], tl.float32)
    for h in range(0, padded_features, BLOCK_H):
        x = hidden.load([row, h])  # [BLOCK_ROWS, BLOCK_H]
        w = weight.load([v, h])  # [BLOCK_V, BLOCK_H]
        if WIDEN:
            x, w = x.to(tl.float32), w.to(tl.float32)
        logits = tl.dot(x, w.T, logits, input_precision=PRECISION)
    return logits + tl.load(bias_ptr + v + tl.arange(0, BLOCK_V))[None, :]


@triton.jit(do_not_specialize=["first", "blank", "blocks_v"])
def log_probs_fwd_kernel(
    first: tl.int64,
    hidden, weight, bias_ptr, label_ptr, count_ptr,
    highest_ptr, total_ptr, logp_blank_ptr, logp_label_ptr, logits_ptr,
    blank, padded_features, padded_classes, blocks_v,
    KEEP_LOGITS: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Owns BLOCK_ROWS packed rows x BLOCK_V classes; reads their hidden rows and the classes' weights.

    Writes the block's maximum logit and sum of exp(logit - maximum) of each row, and the logits of blank and label
    where the block holds them.
    """
    block_v = tl.program_id(0) % blocks_v
    local = tl.program_id(0) // blocks_v * BLOCK_ROWS
    start = first + local.to(tl.int64)
    count = tl.load(count_ptr)
    if start >= count:
        return
    row = start + tl.arange(0, BLOCK_ROWS)
    mask_row = row < count
    label = tl.load(label_ptr + local + tl.arange(0, BLOCK_ROWS))
    v = block_v * BLOCK_V
    logits = block_logits(
        hidden, weight, bias_ptr, local, v, padded_features, PRECISION, WIDEN, BLOCK_ROWS, BLOCK_V, BLOCK_H
    )
    offs_v = v + tl.arange(0, BLOCK_V)
    if KEEP_LOGITS:
        offs_kept = row[:, None] * padded_classes + offs_v[None, :]
        tl.store(logits_ptr + offs_kept, logits.to(logits_ptr.dtype.element_ty), mask=mask_row[:, None])
    highest = tl.max(logits, axis=1)
    finite = tl.where(highest == float("-inf"), 0.0, highest)  # -inf - -inf is NaN
    total = tl.sum(tl.exp(logits - finite[:, None]), axis=1)
    offs_part = block_v * tl.num_programs(0) // blocks_v * BLOCK_ROWS + local + tl.arange(0, BLOCK_ROWS)
    tl.store(highest_ptr + offs_part, highest)
    tl.store(total_ptr + offs_part, total)
    label_logit = tl.sum(tl.where(offs_v[None, :] == label[:, None], logits, 0.0), axis=1)
    mask_label = mask_row & (label >= v) & (label < v + BLOCK_V)
    tl.store(logp_label_ptr + row, label_logit, mask=mask_label)
    if (blank >= v) & (blank < v + BLOCK_V):
        blank_logit = tl.sum(tl.where((offs_v == blank)[None, :], logits, 0.0), axis=1)
        tl.store(logp_blank_ptr + row, blank_logit, mask=mask_row)


@triton.jit(do_not_specialize=["first", "blocks_v", "tile"])
def log_probs_combine_kernel(
    first: tl.int64,
    highest_ptr, total_ptr, label_ptr, count_ptr,
    logp_blank_ptr, logp_label_ptr, lse_ptr,
    blocks_v, tile,
    BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    """Owns BLOCK_ROWS packed rows; reads the maxima and sums of their class blocks; writes their log-sum-exp and turns
    the two logits into log-probabilities."""
    local = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    row = first + local.to(tl.int64)
    mask_row = (row < tl.load(count_ptr)) & (local < tile)
    highest = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_ROWS], tl.float32)
    for block in range(blocks_v):
        offs = block * tile + local
        block_highest = tl.load(highest_ptr + offs, mask=mask_row, other=float("-inf"))
        block_total = tl.load(total_ptr + offs, mask=mask_row, other=0.0)
        higher = tl.maximum(highest, block_highest)
        finite = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(highest - finite) + block_total * tl.exp(block_highest - finite)
        highest = higher
    lse = highest + tl.log(tl.where(total == 0, 1.0, total))  # -inf where every logit is
    has_label = tl.load(label_ptr + local, mask=mask_row, other=-1) >= 0
    blank_logit = tl.load(logp_blank_ptr + row, mask=mask_row, other=0.0)
    label_logit = tl.load(logp_label_ptr + row, mask=has_label, other=0.0)
    tl.store(lse_ptr + row, lse, mask=mask_row)
    tl.store(logp_blank_ptr + row, blank_logit - lse, mask=mask_row)
    tl.store(logp_label_ptr + row, tl.where(has_label, label_logit - lse, 0.0), mask=mask_row)


def log_probs_fwd(
    x: Operands, hidden: Tensor, label: Tensor,
    logp_blank: Tensor, logp_label: Tensor, lse: Tensor, logits: Tensor | None,
) -> list[TileLaunch]:  # fmt: skip
    """Score the packed rows first .. first + tile, whose hidden [tile, H padded] and label [tile] are given, into the
    outputs [N]; logits [N, V padded], when given, are kept too."""
    config = x.configs.log_probs_fwd
    tile, blocks_v = hidden.shape[0], triton.cdiv(x.padded_classes, config.block_v)
    highest, total = torch.empty((2, blocks_v, tile), dtype=torch.float32, device=hidden.device).unbind(0)
    score = TileLaunch(
        log_probs_fwd_kernel, (tile // config.block_rows * blocks_v,),
        blocks_of(hidden, config.block_rows, config.block_h), blocks_of(x.weight, config.block_v, config.block_h),
        x.bias, label, x.offsets[-1:],
        highest, total, logp_blank, logp_label, logits,
        x.alignment.blank, x.padded_features, x.padded_classes, blocks_v,
        KEEP_LOGITS=logits is not None, PRECISION=precision(hidden.dtype), WIDEN=interpreted_dot(),
        BLOCK_ROWS=config.block_rows, BLOCK_V=config.block_v, BLOCK_H=config.block_h,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    rows = x.configs.rows
    combine = TileLaunch(
        log_probs_combine_kernel, (triton.cdiv(tile, rows.block_rows),),
        highest, total, label, x.offsets[-1:],
        logp_blank, logp_label, lse,
        blocks_v, tile,
        BLOCK_ROWS=rows.block_rows, num_warps=rows.num_warps,
    )  # fmt: skip
    return [score, combine]


@triton.jit(do_not_specialize=["first", "blank", "blocks_v"])
def log_probs_bwd_kernel(
    first: tl.int64,
    hidden, weight, bias_ptr, row_ptr, count_ptr, label_ptr, scale_ptr,
    logits_ptr, lse_ptr, weight_blank_ptr, weight_label_ptr,
    d_logits, d_bias_ptr,
    blank, clamp, padded_features, padded_classes, blocks_v,
    CLAMP: tl.constexpr, KEPT_LOGITS: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Owns BLOCK_ROWS live rows x BLOCK_V classes of d_logits; reads kept logits, or hidden and the output layer.

    Rows past the count are written as zeros, so that the weight's gradient needs no mask.  The block's share of d_bias
    is added to the running sums of the program's place in the tile, which no other program touches.
    """
    block_v = tl.program_id(0) % blocks_v
    block_row = tl.program_id(0) // blocks_v
    local = block_row * BLOCK_ROWS
    start = first + local.to(tl.int64)
    count = tl.load(count_ptr)
    if start >= count:
        return
    v = block_v * BLOCK_V
    offs_v = v + tl.arange(0, BLOCK_V)
    slot = start + tl.arange(0, BLOCK_ROWS)
    mask_row = slot < count
    row = tl.load(row_ptr + tl.where(mask_row, slot, start)).to(tl.int64)
    label = tl.load(label_ptr + local + tl.arange(0, BLOCK_ROWS))
    scale = tl.load(scale_ptr + local + tl.arange(0, BLOCK_ROWS))
    lse = tl.load(lse_ptr + row)
    w_blank = tl.load(weight_blank_ptr + row)
    w_label = tl.load(weight_label_ptr + row)
    if KEPT_LOGITS:
        logits = tl.load(logits_ptr + row[:, None] * padded_classes + offs_v[None, :]).to(tl.float32)
    else:
        logits = block_logits(
            hidden, weight, bias_ptr, local, v, padded_features, PRECISION, WIDEN, BLOCK_ROWS, BLOCK_V, BLOCK_H
        )
    lse = tl.where(lse == float("-inf"), 0.0, lse)
    gradient = (w_blank + w_label)[:, None] * tl.exp(logits - lse[:, None])  # [BLOCK_ROWS, BLOCK_V]
    gradient -= tl.where(offs_v[None, :] == label[:, None], w_label[:, None], 0.0)
    gradient -= tl.where((offs_v == blank)[None, :], w_blank[:, None], 0.0)
    if CLAMP:
        gradient = tl.minimum(tl.maximum(gradient, -clamp), clamp)
    gradient = tl.where(mask_row[:, None], gradient * scale[:, None], 0.0)
    d_logits.store([local, v], gradient.to(d_logits.dtype))
    if BIAS:
        bias_ptrs = d_bias_ptr + block_row.to(tl.int64) * padded_classes + offs_v
        tl.store(bias_ptrs, tl.load(bias_ptrs) + tl.sum(gradient, axis=0))


def log_probs_bwd(
    x: Operands, hidden: Tensor, row: Tensor, count: Tensor, label: Tensor, scale: Tensor,
    logits: Tensor | None, lse: Tensor, weight_blank: Tensor, weight_label: Tensor, clamp: float,
    d_logits: Tensor, d_bias: Tensor | None,
) -> TileLaunch:  # fmt: skip
    """Fill d_logits [tile, V padded] for the live rows first .. first + tile, and add their sums to d_bias.

    label, scale [tile] from joint_live_fwd; weight_blank, weight_label [N] float32;
    d_bias [blocks of rows in a tile, V padded] float32, or None.
    """
    config = x.configs.log_probs_bwd
    tile, blocks_v = d_logits.shape[0], triton.cdiv(x.padded_classes, config.block_v)
    return TileLaunch(
        log_probs_bwd_kernel, (tile // config.block_rows * blocks_v,),
        blocks_of(hidden, config.block_rows, config.block_h), blocks_of(x.weight, config.block_v, config.block_h),
        x.bias, row, count, label, scale,
        logits, lse, weight_blank, weight_label,
        blocks_of(d_logits, config.block_rows, config.block_v), d_bias,
        x.alignment.blank, clamp, x.padded_features, x.padded_classes, blocks_v,
        CLAMP=clamp > 0, KEPT_LOGITS=logits is not None, BIAS=d_bias is not None,
        PRECISION=precision(hidden.dtype), WIDEN=interpreted_dot(),
        BLOCK_ROWS=config.block_rows, BLOCK_V=config.block_v, BLOCK_H=config.block_h,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
