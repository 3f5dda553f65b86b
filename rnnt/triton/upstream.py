"""The upstream gradients of the losses, brought near 1.

    unit      = power of two next to the largest |upstream|
    upstream  = unit scaled

Gradients travel through the kernels in the compute dtype at this scale, whatever scale the caller gives the loss;
multiplying by a power of two is exact, so nothing is lost.  float16, whose range is small, gets a further 2^12 of it.
Before: live_rows.py.  After: joint.py, backwards.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rnnt.triton.config import power_of_2
from rnnt.triton.launch import launch

FLOAT16_SHIFT = 12


@triton.jit(do_not_specialize=["utterances", "shift"])
def upstream_kernel(upstream_ptr, scaled_ptr, unit_ptr, utterances, shift, BLOCK: tl.constexpr):
    """Owns all utterances."""
    b = tl.arange(0, BLOCK)
    upstream = tl.load(upstream_ptr + b, mask=b < utterances, other=0.0)
    largest = tl.max(tl.abs(upstream), axis=0)
    exponent = (largest.to(tl.int32, bitcast=True) >> 23) - 126 - shift  # largest is below 2^(exponent + shift)
    exponent = tl.where(largest == 0, 0, tl.minimum(tl.maximum(exponent, -126), 126))
    unit = ((exponent + 127) << 23).to(tl.float32, bitcast=True)
    tl.store(scaled_ptr + b, upstream / unit, mask=b < utterances)
    tl.store(unit_ptr, unit)


def scaled_upstream(upstream: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """upstream [B] float32 -> scaled [B], unit [1]."""
    scaled, unit = torch.empty_like(upstream), upstream.new_empty(1)
    shift = FLOAT16_SHIFT if dtype == torch.float16 else 0
    block = power_of_2(upstream.shape[0])
    launch(upstream_kernel, (1,), upstream, scaled, unit, upstream.shape[0], shift, BLOCK=block)
    return scaled, unit
