"""The joint network's hidden layer for a block of rows, and the way back to frames and states.

    forward    hidden[r]  = dropout(activation(encoder[frame(r)] + predictor[state(r)]))
    backward   d_encoder[frame]   += sum of d_pre[r] over the frame's rows
               d_predictor[state] += sum of d_pre[r] over the state's rows,     d_pre = d (encoder + predictor)

encoder [B, T, H], predictor [B, U1, H] in any float dtype, any strides; hidden, d_pre [rows, H padded] in the compute
dtype.  Sums are taken in float32, each output by one program in a fixed order: the same bits every time, and no
atomics.

In the forward pass `write_hidden` is part of log_probs_fwd's kernel.  In the backward pass the r-th row of a tile is
the r-th live row: `row_ptr` holds the packed rows that are live, and `slot_ptr[row]` counts the live rows before a
packed row, so that a frame's live rows are a range and a state's can be looked up.
Graves et al. 2013, arXiv:1303.5778.  Before: layout.py.  After: log_probs.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rnnt.dropout import GOLDEN, MULTIPLY_1, MULTIPLY_2, SECOND_KEY
from rnnt.triton.config import cdiv
from rnnt.triton.launch import Launch
from rnnt.triton.operands import Operands

_GOLDEN: tl.constexpr = tl.constexpr(GOLDEN)
_MULTIPLY_1: tl.constexpr = tl.constexpr(MULTIPLY_1)
_MULTIPLY_2: tl.constexpr = tl.constexpr(MULTIPLY_2)
_SECOND_KEY: tl.constexpr = tl.constexpr(SECOND_KEY)
_LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)  # exp(x) = exp2(x LOG2_E), at a third of its instructions
_LOG2_E_OF_SQUARE: tl.constexpr = tl.constexpr(2 * 1.4426950408889634)


@triton.jit
def locate(row, offsets_ptr, target_lengths_ptr, utterances, search_steps):
    """utterance, t, u and columns U_b + 1 of packed rows, all int64; rows must be below N."""
    low = row * 0
    high = low + utterances - 1
    for _ in range(search_steps):  # the last utterance whose offset is not past the row
        middle = (low + high + 1) // 2
        past = tl.load(offsets_ptr + middle) > row
        high = tl.where(past, middle - 1, high)
        low = tl.where(past, low, middle)
    columns = tl.load(target_lengths_ptr + low) + 1
    local = row - tl.load(offsets_ptr + low)
    t = local // columns
    return low, t, local - t * columns, columns


@triton.jit
def _mix(x):
    x = x ^ (x >> 16)
    x = x * _MULTIPLY_1
    x = x ^ (x >> 15)
    x = x * _MULTIPLY_2
    return x ^ (x >> 16)


@triton.jit
def seed_keys(seed_ptr):
    """What row_keys of rnnt.dropout makes of the seed alone: two uint32."""
    seed = tl.load(seed_ptr)
    key = _mix(_mix(seed.to(tl.uint32) + _GOLDEN) ^ (seed >> 32).to(tl.uint32))
    return key, _mix(key ^ _SECOND_KEY)


@triton.jit
def row_keys(seed_key_1, seed_key_2, row):
    """rnnt.dropout.row_keys in uint32; row [rows] int64."""
    low, high = row.to(tl.uint32), (row >> 32).to(tl.uint32)
    return _mix(_mix(low ^ seed_key_1) + high), _mix(_mix(low ^ seed_key_2) + high)


@triton.jit
def keep_under_keys(key_1, key_2, h, drop_threshold):
    """rnnt.dropout.keep_under_keys in uint32: keys [rows], h [features] -> bool [rows, features]."""
    x = (h.to(tl.uint32) * _GOLDEN)[None, :] + key_1[:, None]
    x = x ^ (x >> 16)
    x = x * _MULTIPLY_1
    x = x ^ (x >> 15)
    x = (x + key_2[:, None]) * _MULTIPLY_2
    return x >= drop_threshold.to(tl.uint32)


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == "relu":
        y = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    elif ACTIVATION == "sigmoid":
        y = 1 / (1 + tl.exp2(-x * _LOG2_E))
    else:
        y = 1 - 2 / (1 + tl.exp2(x * _LOG2_E_OF_SQUARE))
    return y


@triton.jit
def activation_slope(y, ACTIVATION: tl.constexpr):
    """Derivative of the activation, from its value."""
    if ACTIVATION == "relu":
        slope = tl.where(y > 0, 1.0, 0.0)
    elif ACTIVATION == "sigmoid":
        slope = y * (1 - y)
    else:
        slope = 1 - y * y
    return slope


@triton.jit
def round_to_tf32(x):
    """float32 x with 10 bits of fraction, to nearest; tensor cores cut the others off, which errs to one side (Triton
    issue 4574)."""
    bits = (x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000
    return tl.where(tl.abs(x) < float("inf"), bits.to(tl.float32, bitcast=True), x)


@triton.jit
def write_hidden(
    encoder_ptr, predictor_ptr, seed_ptr, hidden_ptr, class_ptr,
    row, b, t, u, mask_row, place,
    encoder_stride_b, encoder_stride_t, encoder_stride_h,
    predictor_stride_b, predictor_stride_u, predictor_stride_h,
    features, padded_features, dropout_p, drop_threshold,
    ACTIVATION: tl.constexpr, DROPOUT: tl.constexpr, CLASS: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Write hidden of packed rows (row, b, t, u: [rows] int64) to the rows `place` of hidden_ptr.

    Rows outside mask_row and features past H are written as zeros, so that matrix products need no masks.  With CLASS,
    return hidden's product with one class's weights [H], else zeros: [rows] float32.
    """
    encoder_rows = encoder_ptr + (b * encoder_stride_b + t * encoder_stride_t)[:, None]
    predictor_rows = predictor_ptr + (b * predictor_stride_b + u * predictor_stride_u)[:, None]
    offs_h = tl.arange(0, BLOCK_H)
    mask = mask_row[:, None] & (offs_h < features)[None, :]
    x = tl.load(encoder_rows + (offs_h * encoder_stride_h)[None, :], mask=mask, other=0.0)  # [rows, BLOCK_H]
    y = tl.load(predictor_rows + (offs_h * predictor_stride_h)[None, :], mask=mask, other=0.0)
    product = tl.zeros(row.shape, tl.float32)
    scale = 1 / (1 - dropout_p)
    if DROPOUT:
        seed_key_1, seed_key_2 = seed_keys(seed_ptr)
        key_1, key_2 = row_keys(seed_key_1, seed_key_2, row)
    for _ in range(0, padded_features, BLOCK_H):
        hidden = activate(x.to(tl.float32) + y.to(tl.float32), ACTIVATION)
        if DROPOUT:
            keep = keep_under_keys(key_1, key_2, offs_h, drop_threshold)
            hidden = tl.where(keep, hidden * scale, 0.0)
        if ACTIVATION == "sigmoid":  # the others are 0 at 0
            hidden = tl.where(mask, hidden, 0.0)
        hidden = hidden.to(hidden_ptr.dtype.element_ty)
        if PRECISION == "tf32":
            hidden = round_to_tf32(hidden)
        if CLASS:
            weight = tl.load(class_ptr + offs_h, mask=offs_h < features, other=0.0).to(tl.float32)
            product += tl.sum(hidden.to(tl.float32) * weight[None, :], axis=1)
        offs = place[:, None] * padded_features + offs_h[None, :]
        offs_h += BLOCK_H
        mask = mask_row[:, None] & (offs_h < features)[None, :]
        x = tl.load(encoder_rows + (offs_h * encoder_stride_h)[None, :], mask=mask, other=0.0)  # on its way meanwhile
        y = tl.load(predictor_rows + (offs_h * predictor_stride_h)[None, :], mask=mask, other=0.0)
        tl.store(hidden_ptr + offs, hidden)
    return product


@triton.jit(do_not_specialize=["first", "utterances", "search_steps", "labels", "frames", "drop_threshold"])
def joint_fwd_kernel(
    first: tl.int64,
    encoder_ptr, predictor_ptr, targets_ptr, row_ptr, count_ptr, offsets_ptr, target_lengths_ptr,
    upstream_ptr, seed_ptr,
    hidden_ptr, label_ptr, frame_ptr, scale_ptr,
    encoder_stride_b, encoder_stride_t, encoder_stride_h,
    predictor_stride_b, predictor_stride_u, predictor_stride_h,
    utterances, search_steps, labels, frames, features, padded_features, dropout_p, drop_threshold,
    ACTIVATION: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
    PAD_ROWS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Owns BLOCK_ROWS live rows of a tile; reads their encoder and predictor states; writes their hidden, next label
    (-1: none), frame b T + t and their utterance's upstream gradient.

    Rows past the count, up to a whole block of the matrix kernels, are written as zeros.
    """
    count = tl.load(count_ptr)
    local = tl.program_id(0) * BLOCK_ROWS
    if (first >= count) | (local >= (count - first + PAD_ROWS - 1) // PAD_ROWS * PAD_ROWS):
        return
    place = local + tl.arange(0, BLOCK_ROWS)
    slot = first + place.to(tl.int64)
    mask_row = slot < count
    row = tl.load(row_ptr + tl.where(mask_row, slot, first)).to(tl.int64)
    b, t, u, columns = locate(row, offsets_ptr, target_lengths_ptr, utterances, search_steps)
    label = tl.load(targets_ptr + b * labels + u, mask=u + 1 < columns, other=-1)
    tl.store(label_ptr + place, label.to(tl.int32))
    tl.store(frame_ptr + place, b * frames + t)
    tl.store(scale_ptr + place, tl.where(mask_row, tl.load(upstream_ptr + b), 0.0))
    write_hidden(
        encoder_ptr, predictor_ptr, seed_ptr, hidden_ptr, None,
        row, b, t, u, mask_row, place.to(tl.int64),
        encoder_stride_b, encoder_stride_t, encoder_stride_h,
        predictor_stride_b, predictor_stride_u, predictor_stride_h,
        features, padded_features, dropout_p, drop_threshold,
        ACTIVATION, DROPOUT, False, PRECISION, BLOCK_H,
    )  # fmt: skip


def joint_fwd(
    x: Operands, row: Tensor, count: Tensor, upstream: Tensor,
    hidden: Tensor, label: Tensor, frame: Tensor, scale: Tensor,
) -> Launch:  # fmt: skip
    """Fill hidden [tile, H padded], label [tile] int32, frame [tile] int64 and scale [tile] float32 (their utterance's
    upstream [B]) for the live rows first .. first + tile."""
    config = x.configs.joint_fwd
    return Launch(
        joint_fwd_kernel, (hidden.shape[0] // config.block_rows,),
        x.encoder, x.predictor, x.alignment.targets, row, count, x.offsets, x.alignment.target_lengths,
        upstream, x.seed,
        hidden, label, frame, scale,
        *x.encoder.stride(), *x.predictor.stride(),
        x.utterances, x.search_steps, x.columns - 1, x.frames, x.features, x.padded_features,
        x.dropout_p, x.drop_threshold,
        ACTIVATION=x.activation, DROPOUT=x.dropout_p > 0, PRECISION=x.precision,
        PAD_ROWS=x.configs.pad_rows, BLOCK_ROWS=config.block_rows, BLOCK_H=config.block_h, num_warps=config.num_warps,
    )  # fmt: skip


@triton.jit(do_not_specialize=["first", "tile", "frames", "columns", "predictor_programs"])
def joint_bwd_kernel(
    first: tl.int64,
    d_pre_ptr, frame_ptr, slot_ptr, count_ptr, offsets_ptr, target_lengths_ptr, unit_ptr,
    d_encoder_ptr, carry_ptr, d_predictor_ptr,
    tile, frames, columns, features, padded_features, predictor_programs,
    ENCODER: tl.constexpr, PREDICTOR: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Programs 0 .. predictor_programs own a column of d_predictor each, the others share the frames of d_encoder;
    all of them own BLOCK_H features.  Reads the tile's d_pre; writes d_encoder, adds to d_predictor."""
    last = tl.minimum(first + tile, tl.load(count_ptr))
    if first >= last:
        return
    first_frame, last_frame = tl.load(frame_ptr), tl.load(frame_ptr + (last - first - 1))
    program = tl.program_id(0)
    h = tl.program_id(1) * BLOCK_H
    if PREDICTOR:  # noqa: SIM102 (a constant: without it the branch is not compiled)
        if program < predictor_programs:
            column_bwd(
                first, last, program, h, first_frame, last_frame,
                d_pre_ptr, slot_ptr, offsets_ptr, target_lengths_ptr,
                d_predictor_ptr,
                frames, columns, features, padded_features,
                BLOCK_ROWS, BLOCK_H,
            )  # fmt: skip
    if ENCODER:  # noqa: SIM102
        if program >= predictor_programs:
            frames_bwd(
                first, last, tile, program - predictor_programs, tl.num_programs(0) - predictor_programs, h,
                first_frame, last_frame,
                d_pre_ptr, slot_ptr, offsets_ptr, target_lengths_ptr, unit_ptr,
                d_encoder_ptr, carry_ptr,
                frames, features, padded_features,
                BLOCK_ROWS, BLOCK_H,
            )  # fmt: skip


@triton.jit
def frames_bwd(
    first, last, tile, program, programs, h, first_frame, last_frame,
    d_pre_ptr, slot_ptr, offsets_ptr, target_lengths_ptr, unit_ptr,
    d_encoder_ptr, carry_ptr,
    frames, features, padded_features,
    BLOCK_ROWS: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Every P-th frame (P programs) of those with live rows in the tile: their sum, times unit, into d_encoder.

    A frame that goes on in the next tile leaves its float32 sum in carry_ptr for it: two places used in turn, as one
    tile may both take and leave one.
    """
    offs_h = h + tl.arange(0, BLOCK_H)
    mask_h = offs_h < features
    turn = (first // tile) % 2
    unit = tl.load(unit_ptr)
    for frame in range(first_frame + program, last_frame + 1, programs):
        b, t = frame // frames, frame % frames
        columns = tl.load(target_lengths_ptr + b) + 1
        row = tl.load(offsets_ptr + b) + t * columns
        row_end = tl.load(offsets_ptr + b + 1)  # padded frames have no rows
        begin = tl.load(slot_ptr + tl.minimum(row, row_end)).to(tl.int64)
        end = tl.load(slot_ptr + tl.minimum(row + columns, row_end)).to(tl.int64)
        if begin < end:
            total = tl.zeros([BLOCK_ROWS, BLOCK_H], tl.float32)
            for slot in range(tl.maximum(begin, first), tl.minimum(end, last), BLOCK_ROWS):
                offs_slot = slot + tl.arange(0, BLOCK_ROWS)
                offs = (offs_slot - first)[:, None] * padded_features + offs_h[None, :]
                mask = (offs_slot < tl.minimum(end, last))[:, None] & mask_h[None, :]
                total += tl.load(d_pre_ptr + offs, mask=mask, other=0.0).to(tl.float32)
            frame_total = tl.sum(total, axis=0)
            if begin < first:
                frame_total += tl.load(carry_ptr + turn * features + offs_h, mask=mask_h, other=0.0)
            if end > last:
                tl.store(carry_ptr + (1 - turn) * features + offs_h, frame_total, mask=mask_h)
            else:
                gradient = (frame_total * unit).to(d_encoder_ptr.dtype.element_ty)
                tl.store(d_encoder_ptr + frame * features + offs_h, gradient, mask=mask_h)


@triton.jit
def column_bwd(
    first, last, u, h, first_frame, last_frame,
    d_pre_ptr, slot_ptr, offsets_ptr, target_lengths_ptr,
    d_predictor_ptr,
    frames, columns, features, padded_features,
    BLOCK_ROWS: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Column u of every utterance that has live rows in the tile: its live rows there, BLOCK_ROWS frames at a time,
    are added to d_predictor."""
    offs_h = h + tl.arange(0, BLOCK_H)
    mask_h = offs_h < features
    for b in range(first_frame // frames, last_frame // frames + 1):
        own_columns = tl.load(target_lengths_ptr + b) + 1
        if u < own_columns:
            offset = tl.load(offsets_ptr + b)
            t_begin = tl.maximum(first_frame - b * frames, 0)
            t_end = tl.minimum(last_frame - b * frames + 1, (tl.load(offsets_ptr + b + 1) - offset) // own_columns)
            total = tl.zeros([BLOCK_ROWS, BLOCK_H], tl.float32)
            row = offset + (t_begin + tl.arange(0, BLOCK_ROWS)) * own_columns + u
            row_end = offset + t_end * own_columns
            slot = tl.load(slot_ptr + row, mask=row < row_end, other=0).to(tl.int64)
            after = tl.load(slot_ptr + row + 1, mask=row < row_end, other=0).to(tl.int64)
            for _ in range(t_begin, t_end, BLOCK_ROWS):
                live = (after > slot) & (slot >= first) & (slot < last)
                offs = (slot - first)[:, None] * padded_features + offs_h[None, :]
                d_pre = tl.load(d_pre_ptr + offs, mask=live[:, None] & mask_h[None, :], other=0.0)
                row += BLOCK_ROWS * own_columns  # the next block's slots are on their way meanwhile
                slot = tl.load(slot_ptr + row, mask=row < row_end, other=0).to(tl.int64)
                after = tl.load(slot_ptr + row + 1, mask=row < row_end, other=0).to(tl.int64)
                total += d_pre.to(tl.float32)
            out_ptr = d_predictor_ptr + (b * columns + u) * features + offs_h
            tl.store(out_ptr, tl.load(out_ptr, mask=mask_h, other=0.0) + tl.sum(total, axis=0), mask=mask_h)


def joint_bwd(
    x: Operands, d_pre: Tensor, frame: Tensor, slot: Tensor, count: Tensor, unit: Tensor,
    d_encoder: Tensor | None, d_predictor: Tensor | None,
) -> Launch:  # fmt: skip
    """Sum the tile's d_pre [tile, H padded] into d_encoder [B, T, H], whose frames are written once, times unit, in
    its dtype, and d_predictor [B, U1, H] float32, which is added to."""
    config = x.configs.sums
    predictor_programs = 0 if d_predictor is None else x.columns
    encoder_programs = 0 if d_encoder is None else min(x.utterances * x.frames, config.programs)
    carry = torch.empty((2, x.features), dtype=torch.float32, device=d_pre.device)
    return Launch(
        joint_bwd_kernel, (predictor_programs + encoder_programs, cdiv(x.features, config.block_h)),
        d_pre, frame, slot, count, x.offsets, x.alignment.target_lengths, unit,
        d_encoder, carry, d_predictor,
        d_pre.shape[0], x.frames, x.columns, x.features, x.padded_features, predictor_programs,
        ENCODER=d_encoder is not None, PREDICTOR=d_predictor is not None,
        BLOCK_ROWS=config.block_rows, BLOCK_H=config.block_h, num_warps=config.num_warps,
    )  # fmt: skip
