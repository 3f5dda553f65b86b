"""Block sizes, warps and pipeline stages of every kernel: numbers only.

One named configuration a kernel; the matrix kernels have one a class of element size (2 bytes, 4 bytes).  Under
Triton's interpreter everything is small, since there is no reason to be large.
"""

from dataclasses import dataclass

import torch

from rnnt.backends import interpreting


@dataclass(frozen=True)
class Config:
    """Blocks are in elements; 0: not used by the kernel."""

    block_rows: int = 0
    block_v: int = 0
    block_h: int = 0
    num_warps: int = 4
    num_stages: int = 3
    programs: int = 0  # of a kernel whose programs stride over their work
    alone: bool = False  # whether a program fills a multiprocessor, where otherwise two run


@dataclass(frozen=True)
class Configs:
    joint_fwd: Config  # block_h: of log_probs_fwd's joint too
    log_probs_fwd: Config
    log_probs_bwd: Config
    hidden_bwd: Config
    weight_bwd: Config
    sums: Config  # joint_bwd: rows and features added at a time; programs for the frames
    rows: Config  # kernels that do a little work on each row
    live_rows: Config
    logits: Config  # dense scores: classes read at a time
    pad_v: int  # d_logits and hidden are padded to multiples of these
    pad_h: int
    pad_rows: int  # tiles are whole multiples of it, and every block_rows divides it


TWO_BYTES = Configs(
    joint_fwd=Config(block_rows=8, block_h=128, num_warps=2),
    log_probs_fwd=Config(block_rows=128, block_v=256, block_h=64, num_warps=8, num_stages=3, alone=True),
    log_probs_bwd=Config(block_rows=128, block_v=128, block_h=64, num_warps=4, num_stages=3),
    hidden_bwd=Config(block_rows=128, block_v=64, block_h=128, num_warps=4, num_stages=3),
    weight_bwd=Config(block_rows=64, block_v=64, block_h=128, num_warps=4, num_stages=4),
    sums=Config(block_rows=32, block_h=64, num_warps=1, programs=256),
    rows=Config(block_rows=256, num_warps=4),
    live_rows=Config(block_rows=1024, num_warps=4),
    logits=Config(block_v=2048, num_warps=4),
    pad_v=64,
    pad_h=128,
    pad_rows=128,
)

FOUR_BYTES = Configs(
    joint_fwd=Config(block_rows=16, block_h=128, num_warps=4),
    log_probs_fwd=Config(block_rows=64, block_v=128, block_h=32, num_warps=8, num_stages=3),
    log_probs_bwd=Config(block_rows=64, block_v=128, block_h=32, num_warps=8, num_stages=3),
    hidden_bwd=Config(block_rows=64, block_v=32, block_h=128, num_warps=8, num_stages=3),
    weight_bwd=Config(block_rows=32, block_v=128, block_h=64, num_warps=8, num_stages=3),
    sums=Config(block_rows=16, block_h=128, num_warps=4, programs=512),
    rows=Config(block_rows=256, num_warps=4),
    live_rows=Config(block_rows=1024, num_warps=4),
    logits=Config(block_v=2048, num_warps=4),
    pad_v=128,
    pad_h=128,
    pad_rows=64,
)

_SMALL = Config(block_rows=16, block_v=16, block_h=16)
INTERPRETED = Configs(
    joint_fwd=Config(block_rows=8, block_h=16),  # less than the matrix kernels' blocks, as on a GPU
    log_probs_fwd=Config(block_rows=16, block_v=32, block_h=16),
    log_probs_bwd=Config(block_rows=16, block_v=32, block_h=16),
    hidden_bwd=_SMALL,
    weight_bwd=_SMALL,
    sums=Config(block_rows=16, block_h=16, programs=4),
    rows=Config(block_rows=64),
    live_rows=Config(block_rows=16),
    logits=Config(block_v=16),
    pad_v=16,
    pad_h=16,
    pad_rows=16,
)


def configs(dtype: torch.dtype) -> Configs:
    if interpreting():
        return INTERPRETED
    return TWO_BYTES if dtype.itemsize == 2 else FOUR_BYTES


def precision(dtype: torch.dtype) -> str:
    """tl.dot's input precision: float32 follows PyTorch's TF32 switch, at three TF32 products where that is off."""
    if dtype != torch.float32 or interpreting():
        return "ieee"
    return "tf32" if tf32_allowed() else "tf32x3"


def tf32_allowed() -> bool:
    """PyTorch's switch: allow_tf32, which raises where its successor (torch 2.9) has been set."""
    matmul = torch.backends.cuda.matmul
    return matmul.fp32_precision == "tf32" if hasattr(matmul, "fp32_precision") else matmul.allow_tf32


def interpreted_dot() -> bool:
    """Triton's interpreter multiplies the bit patterns of bfloat16, so operands are widened to float32 there."""
    return interpreting()


# Triton has the like of these three, for kernels; called on the host they take microseconds.


def cdiv(n: int, size: int) -> int:
    return -(-n // size)


def ceil_to(n: int, multiple: int) -> int:
    return cdiv(n, multiple) * multiple


def power_of_2(n: int) -> int:
    """The next one, n included."""
    return 1 << (n - 1).bit_length()


def class_blocks(classes: int, block_v: int, single: bool = True) -> tuple[int, int]:
    """How many classes go in whole blocks, and the size of a last, smaller block (0: none; 1: a class by itself, where
    the caller has a way for a single one)."""
    whole, rest = classes // block_v * block_v, classes % block_v
    if rest > block_v // 2:
        return whole + block_v, 0
    if rest == 0 or (rest == 1 and single):
        return whole, rest
    return whole, max(power_of_2(rest), 16)
