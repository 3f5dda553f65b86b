"""Log-probabilities of the two arcs that leave each row's node, and their gradient, without logits in memory.

    logits     = hidden weight^T + bias
    lse        = log sum_v exp(logits[v])
    logp_blank = logits[blank] - lse,   logp_label = logits[label] - lse

With w_blank and w_label the weights of the two arcs (occupancies, at the scale of one utterance's loss):

    d_logits   = (w_blank + w_label) softmax(logits) - w_blank [v = blank] - w_label [v = label]
                 clamped to [-clamp, clamp] when clamp > 0, then times the row's scale
    d_bias     = sum over rows of d_logits

weight [V, H], hidden [rows, H padded] and d_logits [tile, V padded] in the compute dtype; logp_blank, logp_label,
lse [N], float32, or float64 where products are float32 and an ulp of it is more than the log-probability of a
near-certain class may be off; products and sums in float32.  Padded classes have logits of -inf, and so probability 0.

Forward, one launch: a program computes the hidden rows of one block (joint.py), which stay in the cache, and goes
through all classes with a running maximum and sum of exponentials; logits stay in registers.  The backward kernel
computes logits again and turns them into d_logits before they leave.
Running maximum and sum: Milakov and Gimelshein 2018, arXiv:1805.02867.  Before: joint.py.  After: lattice.py, and
backwards output_layer.py.
"""

import functools
from types import ModuleType

import torch
import triton
import triton.language as tl
from torch import Tensor

from rnnt.backends import interpreting
from rnnt.triton.config import cdiv, class_blocks, interpreted_dot
from rnnt.triton.joint import locate, round_to_tf32, write_hidden
from rnnt.triton.launch import Launch, launch
from rnnt.triton.operands import Operands, blocks_of

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)  # exp(x) = exp2(x LOG2_E)


@triton.jit
def class_bias(bias_ptr, offs_v, classes, BIAS: tl.constexpr):
    """The classes' bias in float32, -inf past the last one."""
    inside = offs_v < classes
    if BIAS:
        bias = tl.load(bias_ptr + offs_v, mask=inside, other=float("-inf")).to(tl.float32)
    else:
        bias = tl.where(inside, 0.0, float("-inf"))
    return bias


@triton.jit
def score_classes(
    hidden_ptrs, weight, bias_ptr, logits_ptr,
    highest, total, blank_logit, label_logit,
    row, mask_row, label, v, blank, padded_features, classes, padded_classes,
    BIAS: tl.constexpr, KEEP_LOGITS: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """The running values of a block of rows (maximum, sum of exponentials, logits of blank and label), after the
    BLOCK_V classes from v."""
    offs_v = v + tl.arange(0, BLOCK_V)
    logits = tl.zeros([BLOCK_ROWS, BLOCK_V], tl.float32) + class_bias(bias_ptr, offs_v, classes, BIAS)[None, :]
    for h in range(0, padded_features, BLOCK_H):
        x = tl.load(hidden_ptrs + h)  # [BLOCK_ROWS, BLOCK_H]
        w = weight.load([v, h])  # [BLOCK_V, BLOCK_H]
        if WIDEN:
            x, w = x.to(tl.float32), w.to(tl.float32)
        logits = tl.dot(x, w.T, logits, input_precision=PRECISION)
    if KEEP_LOGITS:
        kept = logits.to(logits_ptr.dtype.element_ty)
        offs_kept = row[:, None] * padded_classes + offs_v[None, :]
        mask_kept = mask_row[:, None] & (offs_v < classes)[None, :]
        tl.store(logits_ptr + offs_kept, kept, mask=mask_kept)
        logits = kept.to(tl.float32)  # the loss is that of the logits which the backward pass sees
    higher = tl.maximum(highest, tl.max(logits, axis=1))
    finite = tl.where(higher == float("-inf"), 0.0, higher)  # -inf - -inf is NaN
    total = total * tl.exp2((highest - finite) * LOG2_E)
    total += tl.sum(tl.exp2((logits - finite[:, None]) * LOG2_E), axis=1)
    label_logit += tl.sum(tl.where(offs_v[None, :] == label[:, None], logits, 0.0), axis=1)
    if (blank >= v) & (blank < v + BLOCK_V):
        blank_logit += tl.sum(tl.where((offs_v == blank)[None, :], logits, 0.0), axis=1)
    return higher, total, blank_logit, label_logit


@triton.jit(do_not_specialize=["utterances", "search_steps", "labels", "blank", "drop_threshold"])
def log_probs_fwd_kernel(
    encoder_ptr, predictor_ptr, targets_ptr, count_ptr, offsets_ptr, target_lengths_ptr, seed_ptr,
    hidden_ptr, weight, weight_tail, class_ptr, bias_ptr,
    logp_blank_ptr, logp_label_ptr, lse_ptr, logits_ptr,
    encoder_stride_b, encoder_stride_t, encoder_stride_h,
    predictor_stride_b, predictor_stride_u, predictor_stride_h,
    utterances, search_steps, labels, blank, features, padded_features, classes, padded_classes, whole_classes,
    dropout_p, drop_threshold,
    ACTIVATION: tl.constexpr, DROPOUT: tl.constexpr, BIAS: tl.constexpr, KEEP_LOGITS: tl.constexpr,
    PRECISION: tl.constexpr, WIDEN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_V: tl.constexpr, TAIL: tl.constexpr, BLOCK_H: tl.constexpr, JOINT_H: tl.constexpr,
):  # fmt: skip
    """Owns every P-th block of BLOCK_ROWS packed rows (P programs), and the same rows of hidden_ptr as scratch; reads
    encoder and predictor states and the output layer, in blocks of BLOCK_V classes and a last one of TAIL.  Writes the
    rows' lse and two log-probabilities.

    A single last class (TAIL 1, 16 bits) is scored along with the joint: a matrix product would take as long for it as
    for 64, but would add in the order of the backward pass, whose rounding a near-certain class shows in float32.
    """
    count = tl.load(count_ptr)
    place = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    hidden_ptrs = hidden_ptr + place.to(tl.int64)[:, None] * padded_features + tl.arange(0, BLOCK_H)[None, :]
    for block in range(tl.program_id(0), tl.cdiv(count, BLOCK_ROWS), tl.num_programs(0)):
        row = block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS).to(tl.int64)  # block is int64, as count
        mask_row = row < count
        b, t, u, columns = locate(tl.where(mask_row, row, 0), offsets_ptr, target_lengths_ptr, utterances, search_steps)
        label = tl.load(targets_ptr + b * labels + u, mask=u + 1 < columns, other=-1).to(tl.int32)
        last_logit = write_hidden(
            encoder_ptr, predictor_ptr, seed_ptr, hidden_ptr, class_ptr,
            row, b, t, u, mask_row, place.to(tl.int64),
            encoder_stride_b, encoder_stride_t, encoder_stride_h,
            predictor_stride_b, predictor_stride_u, predictor_stride_h,
            features, padded_features, dropout_p, drop_threshold,
            ACTIVATION, DROPOUT, TAIL == 1, PRECISION, JOINT_H,
        )  # fmt: skip
        tl.debug_barrier()  # all threads read what all have written
        highest = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_ROWS], tl.float32)
        blank_logit = tl.zeros([BLOCK_ROWS], tl.float32)
        label_logit = tl.zeros([BLOCK_ROWS], tl.float32)
        if TAIL == 1:
            if BIAS:
                last_logit += tl.load(bias_ptr + whole_classes).to(tl.float32)
            if KEEP_LOGITS:
                kept = last_logit.to(logits_ptr.dtype.element_ty)
                tl.store(logits_ptr + row * padded_classes + whole_classes, kept, mask=mask_row)
                last_logit = kept.to(tl.float32)
            highest = last_logit
            total = tl.where(last_logit == float("-inf"), 0.0, 1.0)
            blank_logit = tl.where(blank == whole_classes, last_logit, 0.0)
            label_logit = tl.where(label == whole_classes, last_logit, 0.0)
        for v in range(0, whole_classes, BLOCK_V):
            highest, total, blank_logit, label_logit = score_classes(
                hidden_ptrs, weight, bias_ptr, logits_ptr,
                highest, total, blank_logit, label_logit,
                row, mask_row, label, v, blank, padded_features, classes, padded_classes,
                BIAS, KEEP_LOGITS, PRECISION, WIDEN, BLOCK_ROWS, BLOCK_V, BLOCK_H,
            )  # fmt: skip
        if TAIL > 1:
            highest, total, blank_logit, label_logit = score_classes(
                hidden_ptrs, weight_tail, bias_ptr, logits_ptr,
                highest, total, blank_logit, label_logit,
                row, mask_row, label, whole_classes, blank, padded_features, classes, padded_classes,
                BIAS, KEEP_LOGITS, PRECISION, WIDEN, BLOCK_ROWS, TAIL, BLOCK_H,
            )  # fmt: skip
        rest = tl.log2(tl.where(total == 0, 1.0, total)) / LOG2_E  # total is 0 where every logit is -inf, as lse is
        lse = highest.to(lse_ptr.dtype.element_ty) + rest
        tl.store(lse_ptr + row, lse, mask=mask_row)
        tl.store(logp_blank_ptr + row, blank_logit - lse, mask=mask_row)
        tl.store(logp_label_ptr + row, tl.where(label >= 0, label_logit - lse, 0.0), mask=mask_row)
        tl.debug_barrier()  # before the next block's rows overwrite these


def forward_programs(x: Operands, tile_rows: int) -> int:
    """How many run at once, each on a block of rows' hidden of its own."""
    config = x.configs.log_probs_fwd
    programs = x.programs_at_once // (2 if config.alone else 1)
    programs = min(programs, cdiv(x.alignment.rows, config.block_rows))
    return min(programs, cdiv(tile_rows, config.block_rows)) if tile_rows else programs


@functools.cache
def resident_kernel(device: torch.device) -> ModuleType | None:
    """resident.py where it runs: on Hopper, by a Triton (3.5 or newer) that has Gluon."""
    if interpreting() or torch.cuda.get_device_capability(device) != (9, 0):
        return None
    try:
        from rnnt.triton import resident
    except (ImportError, AttributeError):
        return None
    return resident


def log_probs_fwd(
    x: Operands, tile_rows: int, logp_blank: Tensor, logp_label: Tensor, lse: Tensor, logits: Tensor | None
) -> None:
    """Score all packed rows, joint included, into the outputs [rows]; logits [rows, V padded], when given, are kept.

    tile_rows: most rows of hidden that exist at once; 0: as many as the chip works on at once.
    """
    resident = resident_kernel(x.encoder.device)
    if resident is not None and logits is None and resident.fits(x):
        resident.log_probs_fwd(x, logp_blank, logp_label, lse)
        return
    config, device = x.configs.log_probs_fwd, x.encoder.device
    programs = forward_programs(x, tile_rows)
    hidden = torch.empty((programs * config.block_rows, x.padded_features), dtype=x.weight.dtype, device=device)
    whole, tail = class_blocks(x.classes, config.block_v, single=x.weight.dtype.itemsize == 2)
    launch(
        log_probs_fwd_kernel, (programs,),
        x.encoder, x.predictor, x.alignment.targets, x.offsets[-1:], x.offsets, x.alignment.target_lengths, x.seed,
        hidden, blocks_of(x.weight, config.block_v, config.block_h),
        blocks_of(x.weight, tail, config.block_h) if tail > 1 else None, x.weight[whole] if tail == 1 else None, x.bias,
        logp_blank, logp_label, lse, logits,
        *x.encoder.stride(), *x.predictor.stride(),
        x.utterances, x.search_steps, x.columns - 1, x.alignment.blank,
        x.features, x.padded_features, x.classes, x.padded_classes, whole,
        x.dropout_p, x.drop_threshold,
        ACTIVATION=x.activation, DROPOUT=x.dropout_p > 0, BIAS=x.bias is not None, KEEP_LOGITS=logits is not None,
        PRECISION=x.precision, WIDEN=interpreted_dot(),
        BLOCK_ROWS=config.block_rows, BLOCK_V=config.block_v, TAIL=tail, BLOCK_H=config.block_h,
        JOINT_H=x.configs.joint_fwd.block_h,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip


@triton.jit
def block_logits(
    hidden, weight, bias_ptr, row, v, padded_features, classes,
    BIAS: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """logits [BLOCK_ROWS, BLOCK_V] float32 of the rows from row and the classes from v (int32); hidden and weight are
    tensor descriptors."""
    bias = class_bias(bias_ptr, v + tl.arange(0, BLOCK_V), classes, BIAS)
    logits = tl.zeros([BLOCK_ROWS, BLOCK_V], tl.float32) + bias[None, :]
    for h in range(0, padded_features, BLOCK_H):
        x = hidden.load([row, h])  # [BLOCK_ROWS, BLOCK_H]
        w = weight.load([v, h])  # [BLOCK_V, BLOCK_H]
        if WIDEN:
            x, w = x.to(tl.float32), w.to(tl.float32)
        logits = tl.dot(x, w.T, logits, input_precision=PRECISION)
    return logits


@triton.jit
def logits_minus_lse(logits, lse):
    """In float32; a float64 lse is subtracted in two parts."""
    lse = tl.where(lse == float("-inf"), 0.0, lse)
    coarse = lse.to(tl.float32)
    difference = logits - coarse
    if lse.dtype == tl.float64:
        difference -= (lse - coarse).to(tl.float32)
    return difference


@triton.jit(do_not_specialize=["first", "blank", "blocks_v"])
def log_probs_bwd_kernel(
    first: tl.int64,
    hidden, weight, bias_ptr, row_ptr, count_ptr, label_ptr, scale_ptr,
    logits_ptr, lse_ptr, weight_blank_ptr, weight_label_ptr,
    d_logits, d_bias_ptr,
    blank, label_factor, clamp, padded_features, classes, padded_classes, blocks_v,
    CLAMP: tl.constexpr, KEPT_LOGITS: tl.constexpr, BIAS: tl.constexpr, D_BIAS: tl.constexpr,
    PRECISION: tl.constexpr, WIDEN: tl.constexpr,
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
    w_label = tl.load(weight_label_ptr + row) * label_factor
    if KEPT_LOGITS:
        offs_kept = row[:, None] * padded_classes + offs_v[None, :]
        mask_kept = (offs_v < classes)[None, :]
        logits = tl.load(logits_ptr + offs_kept, mask=mask_kept, other=float("-inf")).to(tl.float32)
    else:
        logits = block_logits(
            hidden, weight, bias_ptr, local, v, padded_features, classes,
            BIAS, PRECISION, WIDEN, BLOCK_ROWS, BLOCK_V, BLOCK_H,
        )  # fmt: skip
    gradient = (w_blank + w_label)[:, None] * tl.exp2(logits_minus_lse(logits, lse[:, None]) * LOG2_E)
    gradient -= tl.where(offs_v[None, :] == label[:, None], w_label[:, None], 0.0)
    if (blank >= v) & (blank < v + BLOCK_V):
        gradient -= tl.where((offs_v == blank)[None, :], w_blank[:, None], 0.0)
    if CLAMP:
        gradient = tl.minimum(tl.maximum(gradient, -clamp), clamp)
    gradient *= scale[:, None]
    if start + BLOCK_ROWS > count:
        gradient = tl.where(mask_row[:, None], gradient, 0.0)
    rounded = gradient.to(d_logits.dtype)
    if PRECISION == "tf32":
        rounded = round_to_tf32(rounded)
    d_logits.store([local, v], rounded)
    if D_BIAS:
        bias_ptrs = d_bias_ptr + block_row.to(tl.int64) * padded_classes + offs_v
        mask_v = offs_v < padded_classes
        tl.store(bias_ptrs, tl.load(bias_ptrs, mask=mask_v, other=0.0) + tl.sum(gradient, axis=0), mask=mask_v)


def log_probs_bwd(
    x: Operands, hidden: Tensor, row: Tensor, count: Tensor, label: Tensor, scale: Tensor,
    logits: Tensor | None, lse: Tensor, weight_blank: Tensor, weight_label: Tensor, label_factor: float, clamp: float,
    d_logits: Tensor, d_bias: Tensor | None,
) -> Launch:  # fmt: skip
    """Fill d_logits [tile, V padded] for the live rows first .. first + tile, and add their sums to d_bias.

    label, scale [tile] from joint_fwd; weight_blank, weight_label [N] float32, the latter times label_factor;
    d_bias [blocks of rows in a tile, V padded] float32, or None.
    """
    config = x.configs.log_probs_bwd
    tile, blocks_v = d_logits.shape[0], cdiv(x.padded_classes, config.block_v)
    return Launch(
        log_probs_bwd_kernel, (tile // config.block_rows * blocks_v,),
        blocks_of(hidden, config.block_rows, config.block_h), blocks_of(x.weight, config.block_v, config.block_h),
        x.bias, row, count, label, scale,
        logits, lse, weight_blank, weight_label,
        blocks_of(d_logits, config.block_rows, config.block_v), d_bias,
        x.alignment.blank, label_factor, clamp, x.padded_features, x.classes, x.padded_classes, blocks_v,
        CLAMP=clamp > 0, KEPT_LOGITS=logits is not None, BIAS=x.bias is not None, D_BIAS=d_bias is not None,
        PRECISION=x.precision, WIDEN=interpreted_dot(),
        BLOCK_ROWS=config.block_rows, BLOCK_V=config.block_v, BLOCK_H=config.block_h,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
