"""Plain PyTorch over the full [B, T, U1, V] tensor; autograd differentiates all of it.

The backend to read first and to debug against.  Takes every problem; ignores tile_rows.
"""

from rnnt.problem import Problem
from rnnt.reference.loss import joint_log_probs, joint_loss, log_probs_loss, logits_loss


def unsupported(problem: Problem) -> str | None:
    return None


__all__ = ["joint_log_probs", "joint_loss", "log_probs_loss", "logits_loss", "unsupported"]
