"""Scales of the gradients on their way through the backward pass.

    unit      power of two next to the largest finite |upstream|;    upstream / unit is near 1
    d_logits  at the scale upstream / unit
    d_pre     the same times `state_scale`

Gradients travel in the compute dtype at these scales, whatever scale the caller gives the loss, and float32 sums are
multiplied back; powers of two are exact.  float16 has little range, so it is used to the top: d_logits, at most
1 + fastemit_lambda for upstream 1, is scaled up to 2^12 or 2^13, and d_pre, at most 2 max |weight| / (1 - dropout_p)
times that, to at most 2^15.  For the other dtypes state_scale is 1.  Before: live_rows.py.  After: joint.py, backwards.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from rnnt.triton.config import power_of_2
from rnnt.triton.launch import launch

FLOAT16_SHIFT = 12


class Scales(NamedTuple):
    upstream: Tensor  # [B] float32, divided by unit
    unit: Tensor  # [1], what sums of d_logits are multiplied by
    state_scale: Tensor | None  # [1], None: 1
    state_unit: Tensor  # [1], what sums of d_pre are multiplied by


@triton.jit
def exponent_of(x):
    """e with x < 2^e, for a positive normal float32; 0 for 0."""
    exponent = (x.to(tl.int32, bitcast=True) >> 23) - 126
    return tl.where(x == 0, 0, exponent)


@triton.jit
def power(exponent):
    """2^exponent, the exponent brought into [-126, 126]."""
    exponent = tl.minimum(tl.maximum(exponent, -126), 126)
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["utterances"])
def upstream_kernel(
    upstream_ptr, largest_weight_ptr, scaled_ptr, unit_ptr, state_scale_ptr, state_unit_ptr, utterances, dropout_p,
    FLOAT16: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Owns all utterances; reads their upstream gradients and, for float16, the largest weight; writes the scales."""
    b = tl.arange(0, BLOCK)
    upstream = tl.load(upstream_ptr + b, mask=b < utterances, other=0.0)
    size = tl.abs(upstream)
    exponent = exponent_of(tl.max(tl.where(size < float("inf"), size, 0.0), axis=0))
    if FLOAT16:
        exponent -= SHIFT
        largest_weight = tl.load(largest_weight_ptr).to(tl.float32) / (1 - dropout_p)
        state_exponent = 1 - exponent_of(largest_weight)
        state_scale = power(state_exponent)
        tl.store(state_scale_ptr, state_scale)
        tl.store(state_unit_ptr, power(exponent) / state_scale)
    tl.store(scaled_ptr + b, upstream / power(exponent), mask=b < utterances)
    tl.store(unit_ptr, power(exponent))


def gradient_scales(upstream: Tensor, weight: Tensor, dropout_p: float, label_factor: float) -> Scales:
    """upstream [B] float32, weight [V, H] in the compute dtype; label_factor: 1 + fastemit_lambda."""
    scaled, unit = torch.empty_like(upstream), upstream.new_empty(1)
    float16 = weight.dtype == torch.float16
    largest_weight = weight.abs().amax() if float16 else None
    state_scale, state_unit = (upstream.new_empty(1), upstream.new_empty(1)) if float16 else (None, unit)
    launch(
        upstream_kernel, (1,),
        upstream, largest_weight, scaled, unit, state_scale, state_unit, upstream.shape[0], dropout_p,
        FLOAT16=float16, SHIFT=FLOAT16_SHIFT - math.frexp(label_factor)[1] + 1, BLOCK=power_of_2(upstream.shape[0]),
    )  # fmt: skip
    return Scales(scaled, unit, state_scale, state_unit)
