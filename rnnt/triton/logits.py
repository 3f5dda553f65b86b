"""The `log_probs` stage where dense scores are given: logits [B, T, U1, V], any float dtype, any strides.

    logp_blank = logits[blank] - lse,   logp_label = logits[label] - lse,   lse = log sum_v exp(logits[v])
    d_logits   = (w_blank + w_label) softmax(logits) - w_blank [v = blank] - w_label [v = label]
                 clamped to [-clamp, clamp] when clamp > 0, then times the utterance's upstream gradient

Without log_softmax the scores are log-probabilities already: lse is 0 and d_logits has its last two terms only.
logp_blank, logp_label, weights [N] float32; lse [N] float64, as an ulp of float32 is more than the log-probability of a
near-certain class may be off.  Offsets are int64: B T U1 V passes 2^31 in ordinary training.
Before: layout.py.  After: lattice.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rnnt.triton.config import configs, power_of_2
from rnnt.triton.joint import locate
from rnnt.triton.launch import launch
from rnnt.triton.log_probs import logits_minus_lse


@triton.jit
def row_label(b, u, columns, targets_ptr, labels):
    """The next label of each row, -1 where there is none (u = U_b)."""
    return tl.load(targets_ptr + b * labels + u, mask=u + 1 < columns, other=-1)


@triton.jit(do_not_specialize=["utterances", "search_steps", "labels", "blank"])
def logits_fwd_kernel(
    logits_ptr, targets_ptr, offsets_ptr, target_lengths_ptr,
    logp_blank_ptr, logp_label_ptr, lse_ptr,
    stride_b, stride_t, stride_u, stride_v,
    utterances, search_steps, labels, blank, classes,
    LOG_SOFTMAX: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Owns one packed row; reads its V scores; writes its three scalars."""
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(offsets_ptr + utterances):
        return
    b, t, u, columns = locate(row, offsets_ptr, target_lengths_ptr, utterances, search_steps)
    label = row_label(b, u, columns, targets_ptr, labels)
    base_ptr = logits_ptr + b * stride_b + t * stride_t + u * stride_u
    lse = 0.0
    if LOG_SOFTMAX:
        highest = tl.full([BLOCK_V], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_V], tl.float32)
        for v in range(0, classes, BLOCK_V):
            offs_v = v + tl.arange(0, BLOCK_V)
            offs = offs_v.to(tl.int64) * stride_v
            x = tl.load(base_ptr + offs, mask=offs_v < classes, other=float("-inf")).to(tl.float32)
            higher = tl.maximum(highest, x)
            finite = tl.where(higher == float("-inf"), 0.0, higher)  # -inf - -inf is NaN
            total = total * tl.exp(highest - finite) + tl.exp(x - finite)
            highest = higher
        top = tl.max(highest, axis=0)
        finite_top = tl.where(top == float("-inf"), 0.0, top)
        sum_exp = tl.sum(total * tl.exp(highest - finite_top), axis=0)
        lse = top.to(tl.float64) + tl.log(tl.where(sum_exp == 0, 1.0, sum_exp))  # -inf where every score is
    blank_score = tl.load(base_ptr + blank * stride_v).to(tl.float32)
    label_score = tl.load(base_ptr + label * stride_v, mask=label >= 0, other=0.0).to(tl.float32)
    tl.store(logp_blank_ptr + row, blank_score - lse)
    tl.store(logp_label_ptr + row, tl.where(label >= 0, label_score - lse, 0.0))
    tl.store(lse_ptr + row, lse)


def logits_fwd(
    logits: Tensor, targets: Tensor, offsets: Tensor, target_lengths: Tensor, blank: int, log_softmax: bool, rows: int
) -> tuple[Tensor, Tensor, Tensor]:
    """logp_blank, logp_label [N] float32 and lse [N] float64 of logits [B, T, U1, V]."""
    utterances, _, columns, classes = logits.shape
    config = configs(torch.float32).logits
    logp_blank, logp_label = (torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(2))
    lse = torch.empty(rows, dtype=torch.float64, device=logits.device)
    launch(
        logits_fwd_kernel, (rows,),
        logits, targets, offsets, target_lengths,
        logp_blank, logp_label, lse,
        *logits.stride(),
        utterances, (utterances - 1).bit_length(), columns - 1, blank, classes,
        LOG_SOFTMAX=log_softmax, BLOCK_V=min(config.block_v, power_of_2(classes)),
        num_warps=config.num_warps,
    )  # fmt: skip
    return logp_blank, logp_label, lse


@triton.jit(do_not_specialize=["frames", "columns", "labels", "blank"])
def logits_bwd_kernel(
    logits_ptr, targets_ptr, offsets_ptr, encoder_lengths_ptr, target_lengths_ptr,
    lse_ptr, weight_blank_ptr, weight_label_ptr, upstream_ptr,
    d_logits_ptr,
    stride_b, stride_t, stride_u, stride_v,
    frames, columns, labels, blank, classes, clamp,
    LOG_SOFTMAX: tl.constexpr, CLAMP: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Owns one node of the dense lattice; reads its V scores; writes their gradient, zeros outside the lengths."""
    node = tl.program_id(0).to(tl.int64)
    b, t, u = node // columns // frames, node // columns % frames, node % columns
    row_columns = tl.load(target_lengths_ptr + b) + 1
    inside = (t < tl.load(encoder_lengths_ptr + b)) & (u < row_columns)
    readable = tl.where(inside, classes, 0)
    row = tl.where(inside, tl.load(offsets_ptr + b) + t * row_columns + u, 0)
    label = tl.where(inside, row_label(b, u, row_columns, targets_ptr, labels), -1)
    lse = tl.load(lse_ptr + row)
    w_blank = tl.load(weight_blank_ptr + row)
    w_label = tl.load(weight_label_ptr + row)
    upstream = tl.load(upstream_ptr + b)
    weighted = inside & ((w_blank != 0) | (w_label != 0))  # none is in an impossible utterance; its upstream may be inf
    upstream = tl.where(weighted, upstream, 0.0)
    base_ptr = logits_ptr + b * stride_b + t * stride_t + u * stride_u
    for v in range(0, classes, BLOCK_V):
        offs_v = v + tl.arange(0, BLOCK_V)
        mask_v = offs_v < classes
        d_logits = tl.zeros([BLOCK_V], tl.float32)
        if LOG_SOFTMAX:
            offs = offs_v.to(tl.int64) * stride_v
            x = tl.load(base_ptr + offs, mask=offs_v < readable, other=float("-inf")).to(tl.float32)
            d_logits += (w_blank + w_label) * tl.exp(logits_minus_lse(x, lse))
        d_logits -= tl.where(offs_v == blank, w_blank, 0.0)
        d_logits -= tl.where(offs_v == label, w_label, 0.0)
        if CLAMP:
            d_logits = tl.minimum(tl.maximum(d_logits, -clamp), clamp)
        d_logits = tl.where(weighted, d_logits * upstream, 0.0)
        tl.store(d_logits_ptr + node * classes + offs_v, d_logits.to(d_logits_ptr.dtype.element_ty), mask=mask_v)


def logits_bwd(
    logits: Tensor, targets: Tensor, offsets: Tensor, encoder_lengths: Tensor, target_lengths: Tensor,
    lse: Tensor, weight_blank: Tensor, weight_label: Tensor, upstream: Tensor,
    blank: int, log_softmax: bool, clamp: float,
) -> Tensor:  # fmt: skip
    """d_logits [B, T, U1, V] in the dtype of logits; weights [N], upstream [B] float32."""
    utterances, frames, columns, classes = logits.shape
    config = configs(torch.float32).logits
    d_logits = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    launch(
        logits_bwd_kernel, (utterances * frames * columns,),
        logits, targets, offsets, encoder_lengths, target_lengths,
        lse, weight_blank, weight_label, upstream,
        d_logits,
        *logits.stride(),
        frames, columns, columns - 1, blank, classes, clamp,
        LOG_SOFTMAX=log_softmax, CLAMP=clamp > 0, BLOCK_V=min(config.block_v, power_of_2(classes)),
        num_warps=config.num_warps,
    )  # fmt: skip
    return d_logits
