"""Peak memory of one training call: the full tensors.

Bytes, with n = B T U1, D = T + U diagonals, s bytes of the compute dtype, w of the losses' (4, float64: 8).  The
largest of these moments:

    scores     n (3 V w + H s)                   log-probabilities, two tensors of their size (the scores and their
                                                 masked copy, or two gradients); hidden
    hidden     n (3 H s + V s)                   hidden, its gradient and that before the activation; the scores'
    lattice    n (V w + V s + H s) + 85 B D U1   log-probabilities, scores, hidden; what autograd keeps in float64

each with three planes (3 n w).  The gradients, results of the end, are small beside these and come after them.
Before: rnnt/plan.py.  Beside: loss.py.
"""

import torch

from rnnt.problem import JointProblem

LATTICE_BYTES = 85  # measured, a cell of [B, D, U1]: arcs, alphas and what their derivative needs


def plan(problem: JointProblem) -> tuple[None, dict[str, int]]:
    """No tiles, and the bytes of each kind at the peak."""
    alignment, dtype = problem.alignment, problem.compute_dtype
    classes, features = problem.linear_weight.shape
    narrow, wide = dtype.itemsize, torch.promote_types(dtype, torch.float32).itemsize
    nodes = alignment.utterances * alignment.frames * alignment.columns
    diagonals = alignment.frames + alignment.columns - 1
    planes = {"planes": 3 * nodes * wide}
    moments: list[dict[str, int]] = [
        {"[B, T, U1, V] tensors": 3 * nodes * classes * wide, "[B, T, U1, H] tensors": nodes * features * narrow},
        {"[B, T, U1, V] tensors": nodes * classes * narrow, "[B, T, U1, H] tensors": 3 * nodes * features * narrow},
        {
            "[B, T, U1, V] tensors": nodes * classes * (wide + narrow),
            "[B, T, U1, H] tensors": nodes * features * narrow,
            "lattice": LATTICE_BYTES * alignment.utterances * diagonals * alignment.columns,
        },
    ]
    return None, max(moments, key=lambda parts: sum(parts.values())) | planes
