"""Train speech transducers (RNN-T) without the [B, T, U+1, V] tensor.

`joint_rnnt_loss` takes the projected encoder and predictor states and the output layer, and gives the transducer loss
of every utterance; the vocabulary scores exist for one tile of lattice rows at a time.  Three backends compute the
same numbers: `reference`, `compiled`, `triton`.
"""

from rnnt.api import joint_log_probs, joint_rnnt_loss, rnnt_loss, rnnt_loss_from_log_probs
from rnnt.backends import backends
from rnnt.modules import RNNTJointLoss, RNNTLoss
from rnnt.plan import Plan, plan

__version__ = "0.1.0"

__all__ = [
    "Plan",
    "RNNTJointLoss",
    "RNNTLoss",
    "__version__",
    "backends",
    "joint_log_probs",
    "joint_rnnt_loss",
    "plan",
    "rnnt_loss",
    "rnnt_loss_from_log_probs",
]
