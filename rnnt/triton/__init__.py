"""Hand-written Triton kernels: joint, scores, recursion and their gradients, fused so that intermediates stay on chip.

For NVIDIA GPUs of compute capability 8.0 or newer; at tiny sizes, in Triton's interpreter on the CPU.  On Hopper the
forward pass has a kernel of its own (resident.py).
float16, bfloat16 and float32.  tile_rows is rounded up to whole blocks of rows (at most 128).
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from rnnt.problem import JointProblem, LogitsProblem, Problem
from rnnt.triton import dense_loss, loss

Result = TypeVar("Result")

GUARDS_ITSELF = True  # joint_loss checks lengths and labels while its first kernel runs, and refuses second derivatives


def _on_its_gpu(entrance: Callable[[Any], Result]) -> Callable[[Any], Result]:
    """Triton launches on the current GPU, which need not be the problem's; torch.compile sees to that by itself, and
    so does autograd on the way back."""

    def entered(problem: Any) -> Result:
        device = problem.device
        if torch.compiler.is_compiling() or device.type != "cuda" or device.index == torch.cuda.current_device():
            return entrance(problem)
        with torch.cuda.device(device):
            return entrance(problem)

    return entered


joint_loss = _on_its_gpu(loss.joint_loss)
joint_log_probs = _on_its_gpu(loss.joint_log_probs)
logits_loss = _on_its_gpu(dense_loss.logits_loss)
log_probs_loss = _on_its_gpu(dense_loss.log_probs_loss)


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
