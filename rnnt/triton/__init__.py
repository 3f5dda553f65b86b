"""Hand-written Triton kernels: joint, scores, recursion and their gradients, fused so that intermediates stay on chip.

For NVIDIA GPUs of compute capability 8.0 or newer; at tiny sizes, in Triton's interpreter on the CPU.
float16, bfloat16 and float32.  tile_rows is rounded up to whole blocks of rows (at most 128).
"""

import torch

from rnnt.problem import JointProblem, LogitsProblem, Problem
from rnnt.triton.dense_loss import log_probs_loss, logits_loss
from rnnt.triton.loss import joint_log_probs, joint_loss


def unsupported(problem: Problem) -> str | None:
    if isinstance(problem, JointProblem):
        inputs = [problem.encoder, problem.predictor, problem.linear_weight]
    elif isinstance(problem, LogitsProblem):
        inputs = [problem.logits]
    else:
        inputs = [problem.logp_blank, problem.logp_label]
    if any(x.dtype == torch.float64 for x in inputs):
        return "float64 is computed by the reference and compiled backends"
    return None


__all__ = ["joint_log_probs", "joint_loss", "log_probs_loss", "logits_loss", "unsupported"]
