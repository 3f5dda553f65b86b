"""The joint network's hidden layer for a tile of rows, and the way back to frames and states.

    forward    hidden[r]  = dropout(activation(encoder[frame(r)] + predictor[state(r)]))
    backward   d_encoder[frame]   += sum of d_pre[r] over the frame's rows
               d_predictor[state] += sum of d_pre[r] over the state's rows,     d_pre = d (encoder + predictor)

encoder [B, T, H], predictor [B, U1, H] in any float dtype, any strides; hidden, d_pre [tile, H padded] in the compute
dtype, d_encoder, d_predictor in float32.  Sums are taken in float32, each output by one program in a fixed order: the
same bits every time, and no atomics.

The r-th row of a tile is a packed row, or, in the backward pass, the r-th live row: `row_ptr` then holds the packed
rows that are live, and `slot_ptr[row]` counts the live rows before a packed row, so that a frame's live rows are a
range and a state's can be looked up.  Graves et al. 2013, arXiv:1303.5778.
Before: layout.py.  After: log_probs.py.
"""

import triton
import triton.language as tl
from torch import Tensor

from rnnt.dropout import GOLDEN, MULTIPLY_1, MULTIPLY_2, SECOND_KEY
from rnnt.triton.launch import TileLaunch
from rnnt.triton.operands import Operands

_GOLDEN: tl.constexpr = tl.constexpr(GOLDEN)
_MULTIPLY_1: tl.constexpr = tl.constexpr(MULTIPLY_1)
_MULTIPLY_2: tl.constexpr = tl.constexpr(MULTIPLY_2)
_SECOND_KEY: tl.constexpr = tl.constexpr(SECOND_KEY)


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
def keep_mask(seed_ptr, row, h, drop_threshold):
    """rnnt.dropout.keep_mask in uint32: row [BLOCK_ROWS] int64, h [BLOCK_H] -> bool [BLOCK_ROWS, BLOCK_H]."""
    seed = tl.load(seed_ptr)
    key = _mix(_mix(seed.to(tl.uint32) + _GOLDEN) ^ (seed >> 32).to(tl.uint32))
    low, high = row.to(tl.uint32), (row >> 32).to(tl.uint32)
    key_1 = _mix(_mix(low ^ key) + high)
    key_2 = _mix(_mix(low ^ _mix(key ^ _SECOND_KEY)) + high)
    x = (h.to(tl.uint32) * _GOLDEN)[None, :] + key_1[:, None]
    x = x ^ (x >> 16)
    x = x * _MULTIPLY_1
    x = x ^ (x >> 15)
    x = (x + key_2[:, None]) * _MULTIPLY_2
    x = x ^ (x >> 16)
    return x >= drop_threshold.to(tl.uint32)


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == "relu":
        y = tl.where(x < 0, 0.0, x)  # keeps a NaN, as tl.maximum does not
    elif ACTIVATION == "sigmoid":
        y = 1 / (1 + tl.exp(-x))
    else:
        y = 1 - 2 / (1 + tl.exp(2 * x))
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


@triton.jit(do_not_specialize=["first", "utterances", "search_steps", "labels", "features", "drop_threshold"])
def joint_fwd_kernel(
    first: tl.int64,
    encoder_ptr, predictor_ptr, targets_ptr, row_ptr, count_ptr, offsets_ptr, target_lengths_ptr,
    upstream_ptr, seed_ptr,
    hidden_ptr, label_ptr, scale_ptr,
    encoder_stride_b, encoder_stride_t, encoder_stride_h,
    predictor_stride_b, predictor_stride_u, predictor_stride_h,
    utterances, search_steps, labels, features, padded_features, dropout_p, drop_threshold,
    ACTIVATION: tl.constexpr, DROPOUT: tl.constexpr, LIVE: tl.constexpr,
    PAD_ROWS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Owns BLOCK_ROWS rows of hidden; reads their encoder and predictor states.  Writes each row's next label as well
    (-1: none) and, of live rows, its utterance's upstream gradient.

    Rows past the count, up to a whole block of the matrix kernels, and features past H are written as zeros, so that
    matrix products need no masks.
    """
    count = tl.load(count_ptr)
    local = tl.program_id(0) * BLOCK_ROWS
    if (first >= count) | (local >= (count - first + PAD_ROWS - 1) // PAD_ROWS * PAD_ROWS):
        return
    slot = first + local.to(tl.int64) + tl.arange(0, BLOCK_ROWS)
    mask_row = slot < count
    slot = tl.where(mask_row, slot, first)
    row = tl.load(row_ptr + slot).to(tl.int64) if LIVE else slot
    b, t, u, columns = locate(row, offsets_ptr, target_lengths_ptr, utterances, search_steps)
    offs_local = local + tl.arange(0, BLOCK_ROWS)
    label = tl.load(targets_ptr + b * labels + u, mask=u + 1 < columns, other=-1)
    tl.store(label_ptr + offs_local, label.to(tl.int32))
    if LIVE:
        tl.store(scale_ptr + offs_local, tl.where(mask_row, tl.load(upstream_ptr + b), 0.0))
    encoder_row = b * encoder_stride_b + t * encoder_stride_t
    predictor_row = b * predictor_stride_b + u * predictor_stride_u
    offs_row = offs_local.to(tl.int64) * padded_features
    for h in range(0, padded_features, BLOCK_H):
        offs_h = h + tl.arange(0, BLOCK_H)
        mask = mask_row[:, None] & (offs_h < features)[None, :]
        offs_encoder = encoder_row[:, None] + (offs_h * encoder_stride_h)[None, :]
        offs_predictor = predictor_row[:, None] + (offs_h * predictor_stride_h)[None, :]
        x = tl.load(encoder_ptr + offs_encoder, mask=mask, other=0.0).to(tl.float32)  # [BLOCK_ROWS, BLOCK_H]
        x += tl.load(predictor_ptr + offs_predictor, mask=mask, other=0.0).to(tl.float32)
        hidden = activate(x, ACTIVATION)
        if DROPOUT:
            keep = keep_mask(seed_ptr, row, offs_h, drop_threshold)
            hidden = tl.where(keep, hidden / (1 - dropout_p), 0.0)
        hidden = tl.where(mask, hidden, 0.0)
        tl.store(hidden_ptr + offs_row[:, None] + offs_h[None, :], hidden.to(hidden_ptr.dtype.element_ty))


def joint_fwd(x: Operands, hidden: Tensor, label: Tensor) -> TileLaunch:
    """Fill hidden [tile, H padded] and label [tile] int32 for the packed rows first .. first + tile."""
    return _joint_fwd(x, None, x.offsets[-1:], None, hidden, label, None)


def joint_live_fwd(
    x: Operands, row: Tensor, count: Tensor, upstream: Tensor, hidden: Tensor, label: Tensor, scale: Tensor
) -> TileLaunch:
    """The same for the live rows first .. first + tile; scale [tile] float32 is their utterance's upstream [B]."""
    return _joint_fwd(x, row, count, upstream, hidden, label, scale)


def _joint_fwd(
    x: Operands, row: Tensor | None, count: Tensor, upstream: Tensor | None,
    hidden: Tensor, label: Tensor, scale: Tensor | None,
) -> TileLaunch:  # fmt: skip
    config = x.configs.joint_fwd
    return TileLaunch(
        joint_fwd_kernel, (hidden.shape[0] // config.block_rows,),
        x.encoder, x.predictor, x.alignment.targets, row, count, x.offsets, x.alignment.target_lengths,
        upstream, x.seed,
        hidden, label, scale,
        *x.encoder.stride(), *x.predictor.stride(),
        x.utterances, x.search_steps, x.columns - 1, x.features, x.padded_features, x.dropout_p, x.drop_threshold,
        ACTIVATION=x.activation, DROPOUT=x.dropout_p > 0, LIVE=row is not None,
        PAD_ROWS=x.configs.pad_rows, BLOCK_ROWS=config.block_rows, BLOCK_H=config.block_h, num_warps=config.num_warps,
    )  # fmt: skip


@triton.jit(do_not_specialize=["first", "tile", "utterances", "search_steps", "frames", "features"])
def joint_bwd_encoder_kernel(
    first: tl.int64,
    d_pre_ptr, row_ptr, slot_ptr, count_ptr, offsets_ptr, target_lengths_ptr,
    d_encoder_ptr,
    tile, utterances, search_steps, frames, features, padded_features,
    BLOCK_ROWS: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Owns BLOCK_H features of every P-th frame (P programs) that has live rows in the tile; adds them to d_encoder."""
    last = tl.minimum(first + tile, tl.load(count_ptr))
    if first >= last:
        return
    first_b, first_t, _, _ = locate(
        tl.load(row_ptr + first).to(tl.int64), offsets_ptr, target_lengths_ptr, utterances, search_steps
    )
    last_b, last_t, _, _ = locate(
        tl.load(row_ptr + last - 1).to(tl.int64), offsets_ptr, target_lengths_ptr, utterances, search_steps
    )
    offs_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    mask_h = offs_h < features
    first_frame = first_b * frames + first_t + tl.program_id(0)
    for frame in range(first_frame, last_b * frames + last_t + 1, tl.num_programs(0)):
        b, t = frame // frames, frame % frames
        columns = tl.load(target_lengths_ptr + b) + 1
        row = tl.load(offsets_ptr + b) + t * columns
        row_end = tl.load(offsets_ptr + b + 1)  # padded frames have no rows
        begin = tl.load(slot_ptr + tl.minimum(row, row_end)).to(tl.int64)
        end = tl.load(slot_ptr + tl.minimum(row + columns, row_end)).to(tl.int64)
        begin, end = tl.maximum(begin, first), tl.minimum(end, last)
        if begin < end:
            total = tl.zeros([BLOCK_ROWS, BLOCK_H], tl.float32)
            for slot in range(begin, end, BLOCK_ROWS):
                offs_slot = slot + tl.arange(0, BLOCK_ROWS)
                offs = (offs_slot - first)[:, None] * padded_features + offs_h[None, :]
                mask = (offs_slot < end)[:, None] & mask_h[None, :]
                total += tl.load(d_pre_ptr + offs, mask=mask, other=0.0).to(tl.float32)
            out_ptr = d_encoder_ptr + frame * features + offs_h
            tl.store(out_ptr, tl.load(out_ptr, mask=mask_h, other=0.0) + tl.sum(total, axis=0), mask=mask_h)


def joint_bwd_encoder(
    x: Operands, d_pre: Tensor, row: Tensor, slot: Tensor, count: Tensor, d_encoder: Tensor
) -> TileLaunch:
    """Add the tile's d_pre [tile, H padded] to d_encoder [B, T, H] float32."""
    config = x.configs.sums
    grid = (min(x.utterances * x.frames, config.programs), triton.cdiv(x.features, config.block_h))
    return TileLaunch(
        joint_bwd_encoder_kernel, grid,
        d_pre, row, slot, count, x.offsets, x.alignment.target_lengths,
        d_encoder,
        d_pre.shape[0], x.utterances, x.search_steps, x.frames, x.features, x.padded_features,
        BLOCK_ROWS=config.block_rows, BLOCK_H=config.block_h, num_warps=config.num_warps,
    )  # fmt: skip


@triton.jit(do_not_specialize=["first", "tile", "utterances", "search_steps", "state_columns", "features"])
def joint_bwd_predictor_kernel(
    first: tl.int64,
    d_pre_ptr, row_ptr, slot_ptr, count_ptr, offsets_ptr, target_lengths_ptr,
    d_predictor_ptr,
    tile, utterances, search_steps, state_columns, features, padded_features,
    BLOCK_ROWS: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Owns BLOCK_H features of column u of every utterance that has live rows in the tile; adds its live rows to
    d_predictor, BLOCK_ROWS frames at a time."""
    last = tl.minimum(first + tile, tl.load(count_ptr))
    if first >= last:
        return
    first_row = tl.load(row_ptr + first).to(tl.int64)
    last_row = tl.load(row_ptr + last - 1).to(tl.int64)
    first_b, _, _, _ = locate(first_row, offsets_ptr, target_lengths_ptr, utterances, search_steps)
    last_b, _, _, _ = locate(last_row, offsets_ptr, target_lengths_ptr, utterances, search_steps)
    u = tl.program_id(0)
    offs_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    mask_h = offs_h < features
    for b in range(first_b, last_b + 1):
        columns = tl.load(target_lengths_ptr + b) + 1
        if u < columns:
            # The utterance's frames between the tile's first and last live row.
            offset = tl.load(offsets_ptr + b)
            low = tl.maximum(first_row, offset)
            high = tl.minimum(last_row, tl.load(offsets_ptr + b + 1) - 1)
            t_end = (high - offset) // columns + 1
            total = tl.zeros([BLOCK_ROWS, BLOCK_H], tl.float32)
            for t in range((low - offset) // columns, t_end, BLOCK_ROWS):
                offs_t = t + tl.arange(0, BLOCK_ROWS)
                row = offset + offs_t * columns + u
                inside = offs_t < t_end
                slot = tl.load(slot_ptr + row, mask=inside, other=0).to(tl.int64)
                after = tl.load(slot_ptr + row + 1, mask=inside, other=0).to(tl.int64)
                live = (after > slot) & (slot >= first) & (slot < last)
                offs = (slot - first)[:, None] * padded_features + offs_h[None, :]
                total += tl.load(d_pre_ptr + offs, mask=live[:, None] & mask_h[None, :], other=0.0).to(tl.float32)
            out_ptr = d_predictor_ptr + (b * state_columns + u) * features + offs_h
            tl.store(out_ptr, tl.load(out_ptr, mask=mask_h, other=0.0) + tl.sum(total, axis=0), mask=mask_h)


def joint_bwd_predictor(
    x: Operands, d_pre: Tensor, row: Tensor, slot: Tensor, count: Tensor, d_predictor: Tensor
) -> TileLaunch:
    """Add the tile's d_pre [tile, H padded] to d_predictor [B, U1, H] float32."""
    config = x.configs.sums
    return TileLaunch(
        joint_bwd_predictor_kernel, (x.columns, triton.cdiv(x.features, config.block_h)),
        d_pre, row, slot, count, x.offsets, x.alignment.target_lengths,
        d_predictor,
        d_pre.shape[0], x.utterances, x.search_steps, x.columns, x.features, x.padded_features,
        BLOCK_ROWS=config.block_rows, BLOCK_H=config.block_h, num_warps=config.num_warps,
    )  # fmt: skip
