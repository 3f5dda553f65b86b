"""Packed rows in tiles of one static size; each tile's work is one graph of torch.compile.

The portable backend: it runs wherever torch.compile does, on any GPU and any CPU.  Read tiles.py, joint.py,
log_probs.py, lattice.py, loss.py and dense_loss.py in this order.
"""

from rnnt.compiled.dense_loss import log_probs_loss, logits_loss
from rnnt.compiled.loss import joint_log_probs, joint_loss
from rnnt.problem import Problem


def unsupported(problem: Problem) -> str | None:
    return None


__all__ = ["joint_log_probs", "joint_loss", "log_probs_loss", "logits_loss", "unsupported"]
