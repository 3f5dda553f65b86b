"""log_probs_fwd for Hopper, with a block's hidden rows resident in shared memory through its pass over the classes.

The same results as log_probs.py's kernel by the same steps.  Hidden rows never leave the multiprocessor, and while the
tensor cores are at a block's last classes, for which they read hidden a slice at a time for the last time, the slices
behind them are overwritten with the next block's hidden, which hides a part of the joint's time.  Written in Gluon,
Triton's language with explicit layouts and barriers: Triton itself cannot address shared memory in a loop.
Before: joint.py.  After: lattice.py.  Beside: log_probs.py, for all other chips, widths and data types.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from rnnt.triton.config import ceil_to, class_blocks
from rnnt.triton.joint import activate, keep_under_keys, row_keys, seed_keys
from rnnt.triton.launch import launch
from rnnt.triton.operands import Operands, multiprocessors_of

BLOCK_ROWS, BLOCK_V, BLOCK_H, WARPS = 128, 256, 64, 8
SHARED_MEMORY = 227 * 1024 - 2048  # bytes of a multiprocessor for hidden and weights; the rest is for exchanges
LOG2_E = gl.constexpr(1.4426950408889634)
# Renamed in Triton 3.7 and 3.8.
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
copy_to_shared = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared


@gluon.jit
def place_rows(
    encoder_ptr, predictor_ptr, targets_ptr, first, offs_row, count, offsets_ptr, target_lengths_ptr,
    encoder_stride_b, encoder_stride_t, predictor_stride_b, predictor_stride_u, utterances, search_steps, labels,
    LONG: gl.constexpr,
):  # fmt: skip
    """Where the encoder and predictor states of the packed rows first + offs_row start, and the rows' next labels
    (-1: none); for rows past the count: those of the block's first row, or of row 0.

    The tensor cores wait for this, so the utterance is searched for once a block, and rows are divided in 32 bits
    unless an utterance has more of them (LONG).
    """
    start = gl.where(first < count, first, 0)
    low = 0
    high = utterances - 1
    for _ in range(search_steps):  # the last utterance whose offset is not past the block's first row
        middle = (low + high + 1) // 2
        past = gl.load(offsets_ptr + middle) > start
        high = gl.where(past, middle - 1, high)
        low = gl.where(past, low, middle)
    row = first + offs_row
    row = gl.where(row < count, row, start)
    last = gl.minimum(start + offs_row.shape[0], count) - 1
    b = low + offs_row * 0
    end = gl.load(offsets_ptr + low + 1)
    while end <= last:
        b += (row >= end).to(gl.int32)
        low += 1
        end = gl.load(offsets_ptr + low + 1)
    b = b.to(gl.int64)
    columns = gl.load(target_lengths_ptr + b) + 1
    local = row - gl.load(offsets_ptr + b)
    if LONG:
        t = local // columns
        u = local - t * columns
    else:
        t = local.to(gl.int32) // columns.to(gl.int32)
        u = local.to(gl.int32) - t * columns.to(gl.int32)
    t = t.to(gl.int64)
    u = u.to(gl.int64)
    label = gl.load(targets_ptr + b * labels + u, mask=u + 1 < columns, other=-1).to(gl.int32)
    encoder_rows = encoder_ptr + (b * encoder_stride_b + t * encoder_stride_t)
    return encoder_rows, predictor_ptr + (b * predictor_stride_b + u * predictor_stride_u), label


@gluon.jit
def load_states(
    encoder_rows, predictor_rows, offs_h, encoder_stride_h, predictor_stride_h, features, RAGGED: gl.constexpr
):
    """[rows, BLOCK_H] each; zeros past the last feature."""
    if RAGGED:
        mask = (offs_h < features)[None, :]
        x = gl.load(encoder_rows[:, None] + (offs_h * encoder_stride_h)[None, :], mask=mask, other=0.0)
        y = gl.load(predictor_rows[:, None] + (offs_h * predictor_stride_h)[None, :], mask=mask, other=0.0)
    else:
        x = gl.load(encoder_rows[:, None] + (offs_h * encoder_stride_h)[None, :])
        y = gl.load(predictor_rows[:, None] + (offs_h * predictor_stride_h)[None, :])
    return x, y


@gluon.jit
def write_slice(
    x, y, hidden, product, class_ptr, key_1, key_2, offs_h, features, dropout_scale, drop_threshold,
    ACTIVATION: gl.constexpr, DROPOUT: gl.constexpr, TAIL: gl.constexpr,
):  # fmt: skip
    """Write hidden of encoder states x and predictor states y [rows, BLOCK_H] to shared memory, and return product plus
    its share of the product with one class's weights (TAIL)."""
    value = activate(x.to(gl.float32) + y.to(gl.float32), ACTIVATION)
    if DROPOUT:
        value = gl.where(keep_under_keys(key_1, key_2, offs_h, drop_threshold), value * dropout_scale, 0.0)
    rounded = value.to(hidden.dtype)
    hidden.store(rounded)
    fence_async_shared()  # the tensor cores read shared memory past the threads' view of it
    if TAIL:
        weight = gl.load(class_ptr + offs_h, mask=offs_h < features, other=0.0).to(gl.float32)
        product += gl.sum(rounded.to(gl.float32) * weight[None, :], axis=1)
    return product


@gluon.jit
def fetch_weights(number, v, h, total, weight, weights, arrived, STAGES: gl.constexpr):
    """Start copying the weights of the program's product `number`, classes from v and features from h, if there is
    such a product."""
    exists = number < total
    stage = number % STAGES
    mbarrier.expect(arrived.index(stage), weight.block_type.nbytes, pred=exists)
    copy_to_shared(weight, [v, h], arrived.index(stage), weights.index(stage), pred=exists)


@gluon.jit
def multiply(
    logits, slice_h, done, v, h, total, weight, hidden, weights, arrived, features, classes,
    BLOCK_V: gl.constexpr, BLOCK_H: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """logits plus the product of one slice of features, left running; when it returns, the product before is finished
    and the weights of a later one, classes from v and features from h, are on their way.

    done: products that the program has started.  Returns logits, done, v and h for the next product.
    """
    stage = done % STAGES
    mbarrier.wait(arrived.index(stage), (done // STAGES) & 1)
    logits = warpgroup_mma(hidden.index(slice_h), weights.index(stage).permute((1, 0)), logits, is_async=True)
    logits = warpgroup_mma_wait(num_outstanding=1, deps=(logits,))
    barrier()  # all warps are done with the product before: its weights may be overwritten
    fetch_weights(done + STAGES - 1, v, h, total, weight, weights, arrived, STAGES)
    v, h = after(v, h, features, classes, BLOCK_V, BLOCK_H)
    return logits, done + 1, v, h


@gluon.jit
def after(v, h, features, classes, BLOCK_V: gl.constexpr, BLOCK_H: gl.constexpr):
    """Classes and features of the product that follows: all slices of some classes, then the next classes."""
    h += BLOCK_H
    v = gl.where(h < features, v, v + BLOCK_V)
    return gl.where(v < classes, v, 0), gl.where(h < features, h, 0)


@gluon.jit
def load_bias(bias_ptr, v, classes, BIAS: gl.constexpr, BLOCK_V: gl.constexpr, WARPS: gl.constexpr):
    """[BLOCK_V] float32, one thread a class; -inf past the last one."""
    offs_v = v + gl.arange(0, BLOCK_V, gl.BlockedLayout([1], [32], [WARPS], [0]))
    inside = offs_v < classes
    if BIAS:
        bias = gl.load(bias_ptr + offs_v, mask=inside, other=float("-inf")).to(gl.float32)
    else:
        bias = gl.where(inside, 0.0, float("-inf"))
    return bias


@gluon.jit
def reduce_classes(
    logits, highest_log2, total, blank_logit, label_logit, offs_v, label, v, blank, BLOCK_V: gl.constexpr
):
    """The running values of the rows (maximum, sum of exponentials, logits of blank and label) after these classes."""
    higher_log2 = gl.maximum(highest_log2, gl.max(logits, axis=1) * LOG2_E)
    finite_log2 = gl.where(higher_log2 == float("-inf"), 0.0, higher_log2)  # -inf - -inf is NaN
    total = total * gl.exp2(highest_log2 - finite_log2)
    total += gl.sum(gl.exp2(logits * LOG2_E - finite_log2[:, None]), axis=1)
    label_logit += gl.sum(gl.where(offs_v[None, :] == label[:, None], logits, 0.0), axis=1)
    if (blank >= v) & (blank < v + BLOCK_V):
        blank_logit += gl.sum(gl.where((offs_v == blank)[None, :], logits, 0.0), axis=1)
    return higher_log2, total, blank_logit, label_logit


@gluon.jit(do_not_specialize=["utterances", "search_steps", "labels", "blank", "drop_threshold"])
def log_probs_fwd_resident_kernel(
    encoder_ptr, predictor_ptr, targets_ptr, count_ptr, offsets_ptr, target_lengths_ptr, seed_ptr,
    weight, class_ptr, bias_ptr, logp_blank_ptr, logp_label_ptr, lse_ptr,
    encoder_stride_b, encoder_stride_t, encoder_stride_h,
    predictor_stride_b, predictor_stride_u, predictor_stride_h,
    utterances, search_steps, labels, blank, features, classes, whole_classes, dropout_p, drop_threshold,
    ACTIVATION: gl.constexpr, DROPOUT: gl.constexpr, BIAS: gl.constexpr, TAIL: gl.constexpr, RAGGED: gl.constexpr,
    LONG: gl.constexpr, SLICES: gl.constexpr, BLOCK_ROWS: gl.constexpr, BLOCK_V: gl.constexpr, BLOCK_H: gl.constexpr,
    STAGES: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Owns every P-th block of BLOCK_ROWS packed rows (P programs, one a multiprocessor); reads encoder and predictor
    states and the output layer, in blocks of BLOCK_V classes and slices of BLOCK_H features.  Writes the rows' lse and
    two log-probabilities.  With TAIL there is a single class past the blocks, scored along with the joint."""
    by_row: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    by_product: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_V, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, by_row)
    product_row_layout: gl.constexpr = gl.SliceLayout(1, by_product)
    hidden_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_ROWS, BLOCK_H], weight.dtype)
    hidden = gl.allocate_shared_memory(weight.dtype, [SLICES, BLOCK_ROWS, BLOCK_H], hidden_layout)
    weights = gl.allocate_shared_memory(weight.dtype, [STAGES, BLOCK_V, BLOCK_H], weight.layout)
    arrived = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(arrived.index(stage), count=1)
    fence_async_shared()

    count = gl.load(count_ptr)
    programs = gl.num_programs(0)
    blocks = ((count + BLOCK_ROWS - 1) // BLOCK_ROWS - gl.program_id(0) + programs - 1) // programs
    blocks = gl.maximum(blocks, 0).to(gl.int32)
    total_products = blocks * (whole_classes // BLOCK_V * SLICES)
    fetch_v = 0
    fetch_h = 0
    for number in gl.static_range(STAGES - 1):
        fetch_weights(number, fetch_v, fetch_h, total_products, weight, weights, arrived, STAGES)
        fetch_v, fetch_h = after(fetch_v, fetch_h, features, whole_classes, BLOCK_V, BLOCK_H)

    offs_slice = gl.arange(0, BLOCK_H, gl.SliceLayout(0, by_row))
    first = (gl.program_id(0) * BLOCK_ROWS).to(gl.int64)
    offs_row = gl.arange(0, BLOCK_ROWS, row_layout)
    key_1 = 0
    key_2 = 0
    if DROPOUT:
        seed_key_1, seed_key_2 = seed_keys(seed_ptr)
        key_1, key_2 = row_keys(seed_key_1, seed_key_2, first + offs_row)
    encoder_rows, predictor_rows, next_label = place_rows(
        encoder_ptr, predictor_ptr, targets_ptr, first, offs_row, count, offsets_ptr, target_lengths_ptr,
        encoder_stride_b, encoder_stride_t, predictor_stride_b, predictor_stride_u, utterances, search_steps, labels,
        LONG,
    )  # fmt: skip
    product = gl.zeros([BLOCK_ROWS], gl.float32, row_layout)
    dropout_scale = 1 / (1 - dropout_p)
    for slice_h in range(SLICES):
        offs_h = slice_h * BLOCK_H + offs_slice
        x, y = load_states(encoder_rows, predictor_rows, offs_h, encoder_stride_h, predictor_stride_h, features, RAGGED)
        product = write_slice(
            x, y, hidden.index(slice_h), product, class_ptr, key_1, key_2, offs_h, features,
            dropout_scale, drop_threshold, ACTIVATION, DROPOUT, TAIL,
        )  # fmt: skip

    done = 0
    bias = load_bias(bias_ptr, 0, classes, BIAS, BLOCK_V, WARPS)
    for _ in range(blocks):
        label = gl.convert_layout(next_label, product_row_layout)
        if TAIL:
            last_logit = gl.convert_layout(product, product_row_layout)
            if BIAS:
                last_logit += gl.load(bias_ptr + whole_classes).to(gl.float32)
            highest_log2 = last_logit * LOG2_E
            total = gl.where(last_logit == float("-inf"), 0.0, 1.0)
            blank_logit = gl.where(blank == whole_classes, last_logit, 0.0)
            label_logit = gl.where(label == whole_classes, last_logit, 0.0)
        else:
            highest_log2 = gl.full([BLOCK_ROWS], float("-inf"), gl.float32, product_row_layout)
            total = gl.zeros([BLOCK_ROWS], gl.float32, product_row_layout)
            blank_logit = gl.zeros([BLOCK_ROWS], gl.float32, product_row_layout)
            label_logit = gl.zeros([BLOCK_ROWS], gl.float32, product_row_layout)
        barrier()  # hidden is written
        last_classes = whole_classes - BLOCK_V
        for v in range(0, last_classes, BLOCK_V):
            logits = gl.convert_layout(bias, gl.SliceLayout(0, by_product))[None, :]
            logits += gl.zeros([BLOCK_ROWS, BLOCK_V], gl.float32, by_product)
            bias = load_bias(bias_ptr, v + BLOCK_V, classes, BIAS, BLOCK_V, WARPS)
            for slice_h in range(SLICES):
                logits, done, fetch_v, fetch_h = multiply(
                    logits, slice_h, done, fetch_v, fetch_h, total_products, weight, hidden, weights, arrived,
                    features, whole_classes, BLOCK_V, BLOCK_H, STAGES,
                )  # fmt: skip
            logits = warpgroup_mma_wait(num_outstanding=0, deps=(logits,))
            offs_v = v + gl.arange(0, BLOCK_V, gl.SliceLayout(0, by_product))
            highest_log2, total, blank_logit, label_logit = reduce_classes(
                logits, highest_log2, total, blank_logit, label_logit, offs_v, label, v, blank, BLOCK_V
            )

        # The block's last classes.  While the tensor cores work on a slice, the threads fill the one before.
        logits = gl.convert_layout(bias, gl.SliceLayout(0, by_product))[None, :]
        logits += gl.zeros([BLOCK_ROWS, BLOCK_V], gl.float32, by_product)
        bias = load_bias(bias_ptr, 0, classes, BIAS, BLOCK_V, WARPS)
        logits, done, fetch_v, fetch_h = multiply(
            logits, 0, done, fetch_v, fetch_h, total_products, weight, hidden, weights, arrived,
            features, whole_classes, BLOCK_V, BLOCK_H, STAGES,
        )  # fmt: skip
        if DROPOUT:
            key_1, key_2 = row_keys(seed_key_1, seed_key_2, first + programs * BLOCK_ROWS + offs_row)
        encoder_rows, predictor_rows, next_label = place_rows(
            encoder_ptr, predictor_ptr, targets_ptr, first + programs * BLOCK_ROWS, offs_row, count,
            offsets_ptr, target_lengths_ptr,
            encoder_stride_b, encoder_stride_t, predictor_stride_b, predictor_stride_u,
            utterances, search_steps, labels, LONG,
        )  # fmt: skip
        product = gl.zeros([BLOCK_ROWS], gl.float32, row_layout)
        for slice_h in range(1, SLICES):
            logits, done, fetch_v, fetch_h = multiply(
                logits, slice_h, done, fetch_v, fetch_h, total_products, weight, hidden, weights, arrived,
                features, whole_classes, BLOCK_V, BLOCK_H, STAGES,
            )  # fmt: skip
            offs_h = (slice_h - 1) * BLOCK_H + offs_slice
            x, y = load_states(
                encoder_rows, predictor_rows, offs_h, encoder_stride_h, predictor_stride_h, features, RAGGED
            )
            product = write_slice(
                x, y, hidden.index(slice_h - 1), product, class_ptr, key_1, key_2, offs_h, features,
                dropout_scale, drop_threshold, ACTIVATION, DROPOUT, TAIL,
            )  # fmt: skip
        offs_h = (SLICES - 1) * BLOCK_H + offs_slice
        x, y = load_states(encoder_rows, predictor_rows, offs_h, encoder_stride_h, predictor_stride_h, features, RAGGED)
        logits = warpgroup_mma_wait(num_outstanding=0, deps=(logits,))
        barrier()  # all warps are done with the last slice
        product = write_slice(
            x, y, hidden.index(SLICES - 1), product, class_ptr, key_1, key_2, offs_h, features,
            dropout_scale, drop_threshold, ACTIVATION, DROPOUT, TAIL,
        )  # fmt: skip
        offs_v = last_classes + gl.arange(0, BLOCK_V, gl.SliceLayout(0, by_product))
        highest_log2, total, blank_logit, label_logit = reduce_classes(
            logits, highest_log2, total, blank_logit, label_logit, offs_v, label, last_classes, blank, BLOCK_V
        )
        own_row = first + gl.arange(0, BLOCK_ROWS, product_row_layout)
        mask_row = own_row < count
        lse = (highest_log2 + gl.log2(gl.where(total == 0, 1.0, total))) / LOG2_E  # -inf where every logit is
        gl.store(lse_ptr + own_row, lse, mask=mask_row)
        gl.store(logp_blank_ptr + own_row, blank_logit - lse, mask=mask_row)
        gl.store(logp_label_ptr + own_row, gl.where(label >= 0, label_logit - lse, 0.0), mask=mask_row)
        first += programs * BLOCK_ROWS


def fits(x: Operands) -> bool:
    """Whether the kernel takes these operands: 16-bit, two stages of weights beside hidden, whole blocks of classes."""
    whole, tail = class_blocks(x.classes, BLOCK_V)
    return x.weight.dtype.itemsize == 2 and _stages(x) >= 2 and whole > 0 and tail <= 1


def log_probs_fwd(x: Operands, logp_blank: Tensor, logp_label: Tensor, lse: Tensor) -> None:
    """Score all packed rows, joint included, into the outputs [rows] float32."""
    whole, tail = class_blocks(x.classes, BLOCK_V)
    element = gl.bfloat16 if x.weight.dtype == torch.bfloat16 else gl.float16
    layout = gl.NVMMASharedLayout.get_default_for([BLOCK_V, BLOCK_H], element)
    launch(
        log_probs_fwd_resident_kernel, (multiprocessors_of(x.encoder.device),),
        x.encoder, x.predictor, x.alignment.targets, x.offsets[-1:], x.offsets, x.alignment.target_lengths, x.seed,
        TensorDescriptor.from_tensor(x.weight, [BLOCK_V, BLOCK_H], layout), x.weight[whole] if tail else None, x.bias,
        logp_blank, logp_label, lse,
        *x.encoder.stride(), *x.predictor.stride(),
        x.utterances, x.search_steps, x.columns - 1, x.alignment.blank, x.features, x.classes, whole,
        x.dropout_p, x.drop_threshold,
        ACTIVATION=x.activation, DROPOUT=x.dropout_p > 0, BIAS=x.bias is not None, TAIL=tail == 1,
        RAGGED=x.features % BLOCK_H > 0, LONG=x.frames * x.columns >= 2**31,
        SLICES=_hidden_width(x) // BLOCK_H,
        BLOCK_ROWS=BLOCK_ROWS, BLOCK_V=BLOCK_V, BLOCK_H=BLOCK_H, STAGES=min(_stages(x), 4), WARPS=WARPS,
        num_warps=WARPS,
    )  # fmt: skip


def _hidden_width(x: Operands) -> int:
    return ceil_to(x.features, BLOCK_H)


def _stages(x: Operands) -> int:
    """Blocks of weights that there is room for beside a block of hidden."""
    itemsize = x.weight.dtype.itemsize
    return (SHARED_MEMORY - BLOCK_ROWS * _hidden_width(x) * itemsize) // (BLOCK_V * BLOCK_H * itemsize)
