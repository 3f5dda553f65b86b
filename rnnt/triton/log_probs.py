"""Log-probabilities of the two arcs that leave each row's node, and their gradient, without logits in memory.

    logits     = hidden weight^T + bias
    lse        = log sum_v exp(logits[v])
    logp_blank = logits[blank] - lse,   logp_label = logits[label] - lse

With w_blank and w_label the weights of the two arcs (occupancies, at the scale of one utterance's loss):

    d_logits   = (w_blank + w_label) softmax(logits) - w_blank [v = blank] - w_label [v = label]
                 clamped to [-clamp, clamp] when clamp > 0, then times the row's scale
    d_hidden   = d_logits weight,   d_pre = d_hidden * d hidden / d (encoder + predictor)
    d_weight   = d_logits^T hidden,   d_bias = sum over rows of d_logits

hidden, d_pre [tile, H padded] and d_logits [tile, V padded] in the compute dtype; logp_blank, logp_label, lse [N]
float32; products accumulate in float32, d_weight and d_bias over all tiles in float32.  A program of the forward
kernel holds one block of rows and passes over the classes with a running maximum and sum, so that logits stay in
registers; the backward kernel computes them again and turns them into d_logits before they leave.
Running maximum: Milakov and Gimelshein 2018, arXiv:1805.02867.  Before: joint.py.  After: lattice.py.
"""

import triton
import triton.language as tl
from torch import Tensor

from rnnt.triton.config import interpreted_dot, precision
from rnnt.triton.joint import activation_slope, keep_mask, locate
from rnnt.triton.operands import Operands


@triton.jit
def row_label(b, u, columns, targets_ptr, labels):
    """The next label of each row, -1 where there is none (u = U_b)."""
    return tl.load(targets_ptr + b * labels + u, mask=u + 1 < columns, other=-1)


@triton.jit
def block_logits(
    hidden_ptr, weight_ptr, bias_ptr, offs_row, offs_v, padded_features,
    PRECISION: tl.constexpr, WIDEN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """logits [BLOCK_ROWS, BLOCK_V] float32 of local rows offs_row (int64) and classes offs_v."""
    total = tl.zeros([BLOCK_ROWS, BLOCK_V], tl.float32)
    offs_h = tl.arange(0, BLOCK_H)
    hidden_ptrs = hidden_ptr + offs_row[:, None] * padded_features + offs_h[None, :]
    weight_ptrs = weight_ptr + offs_v.to(tl.int64)[None, :] * padded_features + offs_h[:, None]
    for _ in range(0, padded_features, BLOCK_H):
        hidden = tl.load(hidden_ptrs)  # [BLOCK_ROWS, BLOCK_H]
        weight = tl.load(weight_ptrs)  # [BLOCK_H, BLOCK_V]
        if WIDEN:
            hidden, weight = hidden.to(tl.float32), weight.to(tl.float32)
        total = tl.dot(hidden, weight, total, input_precision=PRECISION)
        hidden_ptrs += BLOCK_H
        weight_ptrs += BLOCK_H
    return total + tl.load(bias_ptr + offs_v)[None, :]


@triton.jit(do_not_specialize=["first", "utterances", "search_steps", "labels", "blank"])
def log_probs_fwd_kernel(
    hidden_ptr, weight_ptr, bias_ptr, targets_ptr, offsets_ptr, target_lengths_ptr,
    logp_blank_ptr, logp_label_ptr, lse_ptr, logits_ptr,
    first, utterances, search_steps, labels, blank, padded_features, padded_classes,
    KEEP_LOGITS: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Owns BLOCK_ROWS packed rows; reads their hidden rows and the whole output layer; writes their three scalars."""
    count = tl.load(offsets_ptr + utterances)
    local = tl.program_id(0).to(tl.int64) * BLOCK_ROWS
    start = first + local
    if start >= count:
        return
    row = start + tl.arange(0, BLOCK_ROWS)
    mask_row = row < count
    b, _, u, columns = locate(tl.where(mask_row, row, start), offsets_ptr, target_lengths_ptr, utterances, search_steps)
    label = row_label(b, u, columns, targets_ptr, labels)
    offs_row = local + tl.arange(0, BLOCK_ROWS)

    highest = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_ROWS], tl.float32)
    blank_logit = tl.zeros([BLOCK_ROWS], tl.float32)
    label_logit = tl.zeros([BLOCK_ROWS], tl.float32)
    for v in range(0, padded_classes, BLOCK_V):
        offs_v = v + tl.arange(0, BLOCK_V)
        logits = block_logits(
            hidden_ptr, weight_ptr, bias_ptr, offs_row, offs_v, padded_features,
            PRECISION, WIDEN, BLOCK_ROWS, BLOCK_V, BLOCK_H,
        )  # fmt: skip
        if KEEP_LOGITS:
            offs_kept = row[:, None] * padded_classes + offs_v[None, :]
            tl.store(logits_ptr + offs_kept, logits.to(logits_ptr.dtype.element_ty), mask=mask_row[:, None])
        higher = tl.maximum(highest, tl.max(logits, axis=1))
        finite = tl.where(higher == float("-inf"), 0.0, higher)  # -inf - -inf is NaN
        total = total * tl.exp(highest - finite) + tl.sum(tl.exp(logits - finite[:, None]), axis=1)
        highest = higher
        blank_logit += tl.sum(tl.where((offs_v == blank)[None, :], logits, 0.0), axis=1)
        label_logit += tl.sum(tl.where(offs_v[None, :] == label[:, None], logits, 0.0), axis=1)
    lse = highest + tl.log(total)
    tl.store(lse_ptr + row, lse, mask=mask_row)
    tl.store(logp_blank_ptr + row, blank_logit - lse, mask=mask_row)
    tl.store(logp_label_ptr + row, tl.where(label >= 0, label_logit - lse, 0.0), mask=mask_row)


def log_probs_fwd(
    x: Operands, hidden: Tensor, first: int,
    logp_blank: Tensor, logp_label: Tensor, lse: Tensor, logits: Tensor | None,
) -> None:  # fmt: skip
    """Score the packed rows first .. first + tile, whose hidden [tile, H padded] is given, into the outputs [N];
    logits [N, V padded], when given, are kept too."""
    config = x.configs.log_probs_fwd
    log_probs_fwd_kernel[(triton.cdiv(hidden.shape[0], config.block_rows),)](
        hidden, x.weight, x.bias, x.alignment.targets, x.offsets, x.alignment.target_lengths,
        logp_blank, logp_label, lse, logits,
        first, x.utterances, x.search_steps, x.columns - 1, x.alignment.blank, x.padded_features, x.padded_classes,
        KEEP_LOGITS=logits is not None, PRECISION=precision(hidden.dtype), WIDEN=interpreted_dot(),
        BLOCK_ROWS=config.block_rows, BLOCK_V=config.block_v, BLOCK_H=config.block_h,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip


@triton.jit(do_not_specialize=["first", "utterances", "search_steps", "labels", "blank"])
def log_probs_bwd_kernel(
    hidden_ptr, weight_ptr, bias_ptr, targets_ptr, offsets_ptr, target_lengths_ptr,
    row_ptr, count_ptr, logits_ptr, lse_ptr, weight_blank_ptr, weight_label_ptr, scale_ptr,
    d_logits_ptr,
    first, utterances, search_steps, labels, blank, clamp, padded_features, padded_classes,
    CLAMP: tl.constexpr, KEPT_LOGITS: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Owns BLOCK_ROWS live rows x BLOCK_V classes of d_logits; reads kept logits, or hidden and the output layer.

    Rows past the count are written as zeros, so that the weight's gradient needs no mask.
    """
    count = tl.load(count_ptr)
    local = tl.program_id(0).to(tl.int64) * BLOCK_ROWS
    start = first + local
    if start >= count:
        return
    offs_v = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    slot = start + tl.arange(0, BLOCK_ROWS)
    mask_row = slot < count
    row = tl.load(row_ptr + tl.where(mask_row, slot, start)).to(tl.int64)
    b, _, u, columns = locate(row, offsets_ptr, target_lengths_ptr, utterances, search_steps)
    label = row_label(b, u, columns, targets_ptr, labels)
    offs_row = local + tl.arange(0, BLOCK_ROWS)
    if KEPT_LOGITS:
        logits = tl.load(logits_ptr + row[:, None] * padded_classes + offs_v[None, :]).to(tl.float32)
    else:
        logits = block_logits(
            hidden_ptr, weight_ptr, bias_ptr, offs_row, offs_v, padded_features,
            PRECISION, WIDEN, BLOCK_ROWS, BLOCK_V, BLOCK_H,
        )  # fmt: skip
    lse = tl.load(lse_ptr + row)
    lse = tl.where(lse == float("-inf"), 0.0, lse)
    w_blank = tl.load(weight_blank_ptr + row)
    w_label = tl.load(weight_label_ptr + row)
    d_logits = (w_blank + w_label)[:, None] * tl.exp(logits - lse[:, None])  # [BLOCK_ROWS, BLOCK_V]
    d_logits -= tl.where((offs_v == blank)[None, :], w_blank[:, None], 0.0)
    d_logits -= tl.where(offs_v[None, :] == label[:, None], w_label[:, None], 0.0)
    if CLAMP:
        d_logits = tl.minimum(tl.maximum(d_logits, -clamp), clamp)
    d_logits = tl.where(mask_row[:, None], d_logits * tl.load(scale_ptr + b)[:, None], 0.0)
    offs = offs_row[:, None] * padded_classes + offs_v[None, :]
    tl.store(d_logits_ptr + offs, d_logits.to(d_logits_ptr.dtype.element_ty))


def log_probs_bwd(
    x: Operands, hidden: Tensor, row: Tensor, count: Tensor, first: int, logits: Tensor | None, lse: Tensor,
    weight_blank: Tensor, weight_label: Tensor, scale: Tensor, clamp: float, d_logits: Tensor,
) -> None:  # fmt: skip
    """Fill d_logits [tile, V padded] for the live rows first .. first + tile.

    weight_blank, weight_label [N] float32; scale [B] float32, of each utterance's rows.
    """
    config = x.configs.log_probs_bwd
    grid = (triton.cdiv(d_logits.shape[0], config.block_rows), triton.cdiv(x.padded_classes, config.block_v))
    log_probs_bwd_kernel[grid](
        hidden, x.weight, x.bias, x.alignment.targets, x.offsets, x.alignment.target_lengths,
        row, count, logits, lse, weight_blank, weight_label, scale,
        d_logits,
        first, x.utterances, x.search_steps, x.columns - 1, x.alignment.blank, clamp,
        x.padded_features, x.padded_classes,
        CLAMP=clamp > 0, KEPT_LOGITS=logits is not None, PRECISION=precision(hidden.dtype), WIDEN=interpreted_dot(),
        BLOCK_ROWS=config.block_rows, BLOCK_V=config.block_v, BLOCK_H=config.block_h,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip


@triton.jit(do_not_specialize=["first", "drop_threshold"])
def hidden_bwd_kernel(
    d_logits_ptr, weight_ptr, hidden_ptr, row_ptr, count_ptr, seed_ptr,
    d_pre_ptr,
    first, padded_features, padded_classes, dropout_p, drop_threshold,
    ACTIVATION: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Owns BLOCK_ROWS live rows x BLOCK_H features of d_pre; reads d_logits rows, a slice of the output layer and
    the same block of hidden (which d_pre may overwrite)."""
    count = tl.load(count_ptr)
    local = tl.program_id(0).to(tl.int64) * BLOCK_ROWS
    start = first + local
    if start >= count:
        return
    offs_row = local + tl.arange(0, BLOCK_ROWS)
    offs_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    offs_v = tl.arange(0, BLOCK_V)
    d_logits_ptrs = d_logits_ptr + offs_row[:, None] * padded_classes + offs_v[None, :]
    weight_ptrs = weight_ptr + offs_v.to(tl.int64)[:, None] * padded_features + offs_h[None, :]
    step = BLOCK_V * padded_features.to(tl.int64)
    d_hidden = tl.zeros([BLOCK_ROWS, BLOCK_H], tl.float32)
    for _ in range(0, padded_classes, BLOCK_V):
        d_logits = tl.load(d_logits_ptrs)  # [BLOCK_ROWS, BLOCK_V]
        weight = tl.load(weight_ptrs)  # [BLOCK_V, BLOCK_H]
        if WIDEN:
            d_logits, weight = d_logits.to(tl.float32), weight.to(tl.float32)
        d_hidden = tl.dot(d_logits, weight, d_hidden, input_precision=PRECISION)
        d_logits_ptrs += BLOCK_V
        weight_ptrs += step
    offs = offs_row[:, None] * padded_features + offs_h[None, :]
    hidden = tl.load(hidden_ptr + offs).to(tl.float32)
    if DROPOUT:
        slot = start + tl.arange(0, BLOCK_ROWS)
        row = tl.load(row_ptr + tl.where(slot < count, slot, start)).to(tl.int64)
        keep = keep_mask(seed_ptr, row, offs_h, drop_threshold)
        slope = activation_slope(hidden * (1 - dropout_p), ACTIVATION)
        d_pre = tl.where(keep, d_hidden * slope / (1 - dropout_p), 0.0)
    else:
        d_pre = d_hidden * activation_slope(hidden, ACTIVATION)
    tl.store(d_pre_ptr + offs, d_pre.to(d_pre_ptr.dtype.element_ty))


def hidden_bwd(x: Operands, d_logits: Tensor, hidden: Tensor, row: Tensor, count: Tensor, first: int) -> Tensor:
    """d_pre [tile, H padded] of the live rows first .. first + tile, written over hidden."""
    config = x.configs.hidden_bwd
    grid = (triton.cdiv(hidden.shape[0], config.block_rows), triton.cdiv(x.padded_features, config.block_h))
    hidden_bwd_kernel[grid](
        d_logits, x.weight, hidden, row, count, x.seed,
        hidden,
        first, x.padded_features, x.padded_classes, x.dropout_p, x.drop_threshold,
        ACTIVATION=x.activation, DROPOUT=x.dropout_p > 0, PRECISION=precision(hidden.dtype), WIDEN=interpreted_dot(),
        BLOCK_ROWS=config.block_rows, BLOCK_V=config.block_v, BLOCK_H=config.block_h,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return hidden


@triton.jit(do_not_specialize=["first", "tile"])
def weight_bwd_kernel(
    d_logits_ptr, hidden_ptr, count_ptr,
    d_weight_ptr, d_bias_ptr,
    first, tile, padded_features, padded_classes,
    PRECISION: tl.constexpr, WIDEN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Owns BLOCK_V classes x BLOCK_H features of one share's running d_weight; adds its share of the tile's rows.

    Share s of S takes every S-th block of rows and has its own sums, so that enough programs run without atomics.
    The programs of the first features add the share's d_bias as well.
    """
    last = tl.minimum(tile, tl.load(count_ptr) - first)
    share = tl.program_id(2)
    begin = share.to(tl.int64) * BLOCK_ROWS
    if begin >= last:
        return
    offs_v = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    offs_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    d_weight = tl.zeros([BLOCK_V, BLOCK_H], tl.float32)
    d_bias = tl.zeros([BLOCK_V], tl.float32)
    for r in range(begin, last, BLOCK_ROWS * tl.num_programs(2)):
        offs_row = r + tl.arange(0, BLOCK_ROWS)
        d_logits = tl.load(d_logits_ptr + offs_row[None, :] * padded_classes + offs_v[:, None])  # [BLOCK_V, BLOCK_ROWS]
        hidden = tl.load(hidden_ptr + offs_row[:, None] * padded_features + offs_h[None, :])  # [BLOCK_ROWS, BLOCK_H]
        if WIDEN:
            d_logits, hidden = d_logits.to(tl.float32), hidden.to(tl.float32)
        d_weight = tl.dot(d_logits, hidden, d_weight, input_precision=PRECISION)
        d_bias += tl.sum(d_logits.to(tl.float32), axis=1)
    offs_class = share.to(tl.int64) * padded_classes + offs_v
    weight_ptrs = d_weight_ptr + offs_class[:, None] * padded_features + offs_h[None, :]
    tl.store(weight_ptrs, tl.load(weight_ptrs) + d_weight)
    if tl.program_id(1) == 0:
        bias_ptrs = d_bias_ptr + offs_class
        tl.store(bias_ptrs, tl.load(bias_ptrs) + d_bias)


def weight_shares(x: Operands) -> int:
    """How many shares of rows the weight's gradient is summed in: enough to fill a large chip with programs."""
    config = x.configs.weight_bwd
    blocks = triton.cdiv(x.padded_classes, config.block_v) * triton.cdiv(x.padded_features, config.block_h)
    return max(1, 128 // blocks)


def weight_bwd(
    x: Operands, d_logits: Tensor, hidden: Tensor, count: Tensor, first: int, d_weight: Tensor, d_bias: Tensor
) -> None:
    """Add the tile's share sums to d_weight [shares, V padded, H padded] and d_bias [shares, V padded], float32."""
    config = x.configs.weight_bwd
    grid = (
        triton.cdiv(x.padded_classes, config.block_v),
        triton.cdiv(x.padded_features, config.block_h),
        d_weight.shape[0],
    )
    weight_bwd_kernel[grid](
        d_logits, hidden, count,
        d_weight, d_bias,
        first, hidden.shape[0], x.padded_features, x.padded_classes,
        PRECISION=precision(hidden.dtype), WIDEN=interpreted_dot(),
        BLOCK_ROWS=config.block_rows, BLOCK_V=config.block_v, BLOCK_H=config.block_h,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
