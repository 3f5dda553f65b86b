"""The dropout mask as a pure function of (seed, row, h), the same on every backend, device and tile size.

Two 32-bit keys are mixed from the 64-bit seed and the 64-bit row; an element's 32 random bits are a multiply-xorshift
hash of h under the two keys.  An element is kept when its bits, read as an unsigned number, are at least p 2^32, and
kept elements are scaled by 1 / (1 - p).  Nothing is stored: the backward pass computes the mask again.

Integers are held in int64 and cut to 32 bits after each product, which PyTorch and Inductor do alike everywhere.
The Triton backend holds the same function in uint32 (rnnt/triton/joint.py).
Mixing constants: the 2-round "lowbias32" search of C. Wellons, 2018.
"""

from collections.abc import Callable

import torch
from torch import Tensor

MASK32 = 0xFFFFFFFF
GOLDEN = 0x61C88647  # 2^32 divided by the golden ratio, negated: below 2^31, which Inductor's index arithmetic needs
SECOND_KEY = 0x85EBCA6B
MULTIPLY_1 = 0x7FEB352D
MULTIPLY_2 = 0x846CA68B


def mix(x: Tensor) -> Tensor:
    """A bijection of 32-bit integers in which every input bit reaches every output bit."""
    x = x ^ (x >> 16)
    x = (x * MULTIPLY_1) & MASK32
    x = x ^ (x >> 15)
    x = (x * MULTIPLY_2) & MASK32
    return x ^ (x >> 16)


def drop_threshold(dropout_p: float) -> int:
    return min(round(dropout_p * 2**32), MASK32)


def row_keys(seed: Tensor, row: Tensor, held: Callable[[Tensor], Tensor] = lambda x: x) -> tuple[Tensor, Tensor]:
    """The two keys of each row, [...] int64 below 2^32.  seed [1] int64 in [0, 2^63), row [...] int64.

    held: what a compiler needs for not computing a value anew wherever it is used.
    """
    key = held(mix(held(mix((seed + GOLDEN) & MASK32)) ^ (seed >> 32)))
    low, high = row & MASK32, row >> 32
    first, second = (held(mix(low ^ k)) for k in (key, held(mix(key ^ SECOND_KEY))))
    return held(mix((first + high) & MASK32)), held(mix((second + high) & MASK32))


def keep_under_keys(key_1: Tensor, key_2: Tensor, features: int, dropout_p: float) -> Tensor:
    """[*key_1.shape, features] bool."""
    h = torch.arange(features, device=key_1.device)
    x = (h * GOLDEN + key_1[..., None]) & MASK32
    x = x ^ (x >> 16)
    x = (x * MULTIPLY_1) & MASK32
    x = x ^ (x >> 15)
    x = ((x + key_2[..., None]) * MULTIPLY_2) & MASK32  # its high bits are mixed, and these decide
    return x >= drop_threshold(dropout_p)


def keep_mask(seed: Tensor, row: Tensor, features: int, dropout_p: float) -> Tensor:
    """[*row.shape, features] bool."""
    return keep_under_keys(*row_keys(seed, row), features, dropout_p)
