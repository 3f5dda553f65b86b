"""Log-likelihood of all alignments, and the posterior occupancy of every arc, over packed rows.

    alpha[t,u] = logaddexp(alpha[t-1,u] + logp_blank[t-1,u], alpha[t,u-1] + logp_label[t,u-1])
    beta[t,u]  = logaddexp(logp_blank[t,u] + beta[t+1,u],    logp_label[t,u] + beta[t,u+1])
    alpha[0,0] = 0,   beta[T-1,U] = logp_blank[T-1,U],   log Z = alpha[T-1,U] + logp_blank[T-1,U]

    occupancy_blank[t,u] = exp(alpha[t,u] + logp_blank[t,u] + beta[t+1,u] - log Z)      last node: 1
    occupancy_label[t,u] = exp(alpha[t,u] + logp_label[t,u] + beta[t,u+1] - log Z)

Both recursions are one: beta is alpha over the lattice turned round, with each arc read at the node it leaves instead
of the node before.  One program holds an anti-diagonal of one utterance in registers and steps along it.

logp_blank, logp_label [N] float32 -> alpha, beta [N] float64, losses [B], occupancies [N] float32.  Sums of
log-probabilities are float64 (at 10^4 a float32 has an ulp of 10^-3); log(1 + exp(-d)), which is small, is taken in
float32, to full relative accuracy.  So the error does not grow with the lattice, at the price of a few float64
additions a node.  Graves 2012, arXiv:1211.3711.  Before: log_probs.py.  After: loss.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rnnt.triton.config import cdiv, configs, power_of_2
from rnnt.triton.joint import locate
from rnnt.triton.launch import launch


@triton.jit
def log1p_small(x):
    """log(1 + x) for x in [0, 1], float32, by the series of the inverse hyperbolic tangent."""
    s = x / (2 + x)  # at most 1/3
    z = s * s
    series = 1 + z * (1 / 3 + z * (1 / 5 + z * (1 / 7 + z * (1 / 9 + z * (1 / 11 + z * (1 / 13 + z / 15))))))
    return 2 * s * series


@triton.jit
def logaddexp(x, y):
    """float64; -inf where both are, NaN where one is."""
    high = tl.maximum(x, y)
    low = tl.minimum(x, y)
    gap = low - tl.where(high == float("-inf"), 0.0, high)  # -inf - -inf is NaN
    total = high + log1p_small(tl.exp(gap.to(tl.float32))).to(tl.float64)
    return tl.where((x != x) | (y != y), x + y, total)  # tl.maximum and tl.minimum pass over a NaN


@triton.jit(do_not_specialize=["rows"])
def lattice_fwd_kernel(
    logp_blank_ptr, logp_label_ptr, offsets_ptr, encoder_lengths_ptr, target_lengths_ptr,
    alpha_beta_ptr, log_z_ptr,
    rows,
    BLOCK_U: tl.constexpr,
):  # fmt: skip
    """Owns one utterance and one direction (0: alpha and log Z, 1: beta); walks its anti-diagonals in order."""
    b = tl.program_id(0).to(tl.int64)
    reverse = tl.program_id(1)
    frames = tl.load(encoder_lengths_ptr + b)
    columns = tl.load(target_lengths_ptr + b) + 1
    offset = tl.load(offsets_ptr + b)
    nodes = frames * columns
    out_ptr = alpha_beta_ptr + reverse.to(tl.int64) * rows
    # The node (t, u) counted from the direction's own corner, and the rows its two incoming arcs are read at.
    corner = offset + tl.where(reverse == 0, 0, nodes - 1)
    step = tl.where(reverse == 0, 1, -1).to(tl.int64)
    blank_back = tl.where(reverse == 0, columns, 0)
    label_back = tl.where(reverse == 0, 1, 0)

    u = tl.arange(0, BLOCK_U)
    node = corner - step * u * (columns - 1)  # row of (d - u, u) at d = 0; d adds step * columns
    last_blank = tl.load(logp_blank_ptr + offset + nodes - 1).to(tl.float64)
    value = tl.where(u == 0, tl.where(reverse == 0, 0.0, last_blank), float("-inf"))  # [BLOCK_U] float64
    tl.store(out_ptr + corner + u * 0, value, mask=u == 0)
    before = tl.maximum(u - 1, 0)
    for d in range(1, frames + columns - 1):
        node += step * columns
        inside = (u < columns) & (u <= d) & (d - u < frames)
        has_blank = inside & (u < d)
        has_label = inside & (u > 0)
        blank = tl.load(logp_blank_ptr + node - blank_back, mask=has_blank, other=float("-inf"))
        label = tl.load(logp_label_ptr + node - label_back, mask=has_label, other=float("-inf"))
        stay = value + blank.to(tl.float64)
        move = tl.gather(value, before, axis=0) + label.to(tl.float64)
        value = logaddexp(stay, move)
        tl.store(out_ptr + node, value, mask=inside)
    if reverse == 0:
        final = tl.sum(tl.where(u == columns - 1, value, 0.0), axis=0)
        tl.store(log_z_ptr + b, final + last_blank)


def lattice_fwd(
    logp_blank: Tensor, logp_label: Tensor, offsets: Tensor, encoder_lengths: Tensor, target_lengths: Tensor,
    columns: int, with_beta: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """alpha and, when asked for, beta: [1 or 2, N] float64; log Z [B] float64."""
    utterances, rows, directions = encoder_lengths.shape[0], logp_blank.shape[0], 2 if with_beta else 1
    alpha_beta = logp_blank.new_empty((directions, rows), dtype=torch.float64)
    log_z = alpha_beta.new_empty(utterances)
    block_u = max(power_of_2(columns), 32)
    launch(
        lattice_fwd_kernel, (utterances, directions),
        logp_blank, logp_label, offsets, encoder_lengths, target_lengths,
        alpha_beta, log_z,
        rows,
        BLOCK_U=block_u, num_warps=min(max(block_u // 64, 1), 16),
    )  # fmt: skip
    return alpha_beta, log_z


@triton.jit(do_not_specialize=["rows", "utterances", "search_steps"])
def lattice_bwd_kernel(
    logp_blank_ptr, logp_label_ptr, alpha_beta_ptr, log_z_ptr,
    offsets_ptr, encoder_lengths_ptr, target_lengths_ptr,
    occupancy_blank_ptr, occupancy_label_ptr,
    rows, utterances, search_steps,
    BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    """Owns BLOCK_ROWS rows of the two occupancies; rows past N, and of impossible utterances, are zeros."""
    start = tl.program_id(0).to(tl.int64) * BLOCK_ROWS
    row = start + tl.arange(0, BLOCK_ROWS)
    count = tl.load(offsets_ptr + utterances)
    valid = row < count
    b, t, u, columns = locate(tl.where(valid, row, 0), offsets_ptr, target_lengths_ptr, utterances, search_steps)
    last_frame = t == tl.load(encoder_lengths_ptr + b) - 1
    last_column = u == columns - 1
    log_z = tl.load(log_z_ptr + b)
    possible = valid & (log_z != float("-inf"))
    before = tl.load(alpha_beta_ptr + row, mask=possible, other=float("-inf")) - tl.where(possible, log_z, 0.0)
    blank = tl.load(logp_blank_ptr + row, mask=valid, other=0.0)
    label = tl.load(logp_label_ptr + row, mask=valid, other=0.0)
    beta_ptr = alpha_beta_ptr + rows
    down = tl.load(beta_ptr + row + columns, mask=possible & (last_frame == 0), other=float("-inf"))
    right = tl.load(beta_ptr + row + 1, mask=possible & (last_column == 0), other=float("-inf"))
    down = tl.where(last_frame & last_column, 0.0, down)
    occupancy_blank = tl.exp((before + blank.to(tl.float64) + down).to(tl.float32))
    occupancy_label = tl.exp((before + label.to(tl.float64) + right).to(tl.float32))
    occupancy_blank = tl.where(possible & last_frame & last_column, 1.0, occupancy_blank)
    tl.store(occupancy_blank_ptr + row, occupancy_blank, mask=row < rows)
    tl.store(occupancy_label_ptr + row, occupancy_label, mask=row < rows)


def lattice_bwd(
    logp_blank: Tensor, logp_label: Tensor, alpha_beta: Tensor, log_z: Tensor,
    offsets: Tensor, encoder_lengths: Tensor, target_lengths: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """occupancy_blank, occupancy_label [N] float32."""
    config = configs(torch.float32).rows
    rows, utterances = logp_blank.shape[0], encoder_lengths.shape[0]
    occupancy_blank = torch.empty_like(logp_blank)
    occupancy_label = torch.empty_like(logp_label)
    launch(
        lattice_bwd_kernel, (cdiv(rows, config.block_rows),),
        logp_blank, logp_label, alpha_beta, log_z, offsets, encoder_lengths, target_lengths,
        occupancy_blank, occupancy_label,
        rows, utterances, (utterances - 1).bit_length(),
        BLOCK_ROWS=config.block_rows, num_warps=config.num_warps,
    )  # fmt: skip
    return occupancy_blank, occupancy_label


def losses_and_occupancies(
    logp_blank: Tensor, logp_label: Tensor, offsets: Tensor, encoder_lengths: Tensor, target_lengths: Tensor,
    columns: int, with_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """losses [B] float32; occupancies of blank and label [rows], empty without gradient."""
    lengths = offsets, encoder_lengths, target_lengths
    alpha_beta, log_z = lattice_fwd(logp_blank, logp_label, *lengths, columns, with_gradient)
    occupancies = (logp_blank.new_empty(0), logp_blank.new_empty(0))
    if with_gradient:
        occupancies = lattice_bwd(logp_blank, logp_label, alpha_beta, log_z, *lengths)
    return (-log_z).float(), *occupancies
