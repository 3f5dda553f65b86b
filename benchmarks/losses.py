"""The losses that are compared, each on the states of encoder and prediction network.

    none                 no joint and no loss: mean squares of both states, so that all the rest has its backward pass
    triton, compiled, reference           RNNTJointLoss on that backend; "-untiled": with tile_rows=None
    torchaudio           torchaudio.functional.rnnt_loss on dense scores, in float32, since it takes no bfloat16
    dense                rnnt.rnnt_loss on dense scores
    dense-8              the same, 8 utterances at a time, each part padded to its own longest utterance
    dense-8-checkpoint   the same, and each part's scores are computed again in the backward pass

A loss takes (joint, encoder [B, T, F], predictor [B, U1, F], batch) and returns the mean over utterances.  All use the
projections and the output layer of `joint`, an RNNTJointLoss.  Before: data.py.  After: network.py.
"""

import importlib
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import rnnt
from benchmarks.data import Batch
from rnnt.backends import unavailable

TORCHAUDIO_SCORES = 2**31 - 1  # its kernels index them with 32 bits, unchecked

LossFunction = Callable[[rnnt.RNNTJointLoss, Tensor, Tensor, Batch], Tensor]


class Refused(Exception):
    """A loss does not take this batch."""


class Loss(NamedTuple):
    """A function, and the backend and tiling of the RNNTJointLoss that it is handed."""

    function: LossFunction
    backend: str = "auto"
    tile_rows: str | None = "auto"


def no_loss(joint: rnnt.RNNTJointLoss, encoder: Tensor, predictor: Tensor, batch: Batch) -> Tensor:
    padding = torch.arange(encoder.shape[1], device=encoder.device) >= batch.encoder_lengths[:, None]
    valid = encoder.masked_fill(padding[:, :, None], 0)
    return valid.float().square().mean() + predictor.float().square().mean()


def joint_loss(joint: rnnt.RNNTJointLoss, encoder: Tensor, predictor: Tensor, batch: Batch) -> Tensor:
    return joint(encoder, predictor, batch.targets, batch.encoder_lengths, batch.target_lengths)


def torchaudio_loss(joint: rnnt.RNNTJointLoss, encoder: Tensor, predictor: Tensor, batch: Batch) -> Tensor:
    B, T, U1 = *encoder.shape[:2], predictor.shape[1]
    if B * T * U1 * joint.output.out_features > TORCHAUDIO_SCORES:
        raise Refused(f"over {TORCHAUDIO_SCORES:,} scores, torchaudio's last index")
    integers = (x.int() for x in (batch.targets, batch.encoder_lengths, batch.target_lengths))
    logits = joint.logits(encoder[:, :, None], predictor[:, None])  # [B, T, U1, V]
    try:
        return importlib.import_module("torchaudio").functional.rnnt_loss(logits.float(), *integers)
    except RuntimeError as error:
        if '"aten::empty_like"' in str(error):  # torchaudio 2.11 does not pass PyTorch's reason on
            raise torch.OutOfMemoryError("torchaudio could not allocate") from error
        raise


def dense_loss(joint: rnnt.RNNTJointLoss, encoder: Tensor, predictor: Tensor, batch: Batch) -> Tensor:
    return part_loss(joint, encoder, predictor, batch, slice(None)) / len(batch.frames)


def sub_batched_loss(
    joint: rnnt.RNNTJointLoss,
    encoder: Tensor,
    predictor: Tensor,
    batch: Batch,
    *,
    utterances: int,
    checkpointed: bool = False,
) -> Tensor:
    losses = []
    for start in range(0, len(batch.frames), utterances):
        arguments = (joint, encoder, predictor, batch, slice(start, start + utterances))
        if checkpointed:  # nothing random in it
            losses.append(checkpoint(part_loss, *arguments, use_reentrant=False, preserve_rng_state=False))
        else:
            losses.append(part_loss(*arguments))
    return torch.stack(losses).sum() / len(batch.frames)


def part_loss(joint: rnnt.RNNTJointLoss, encoder: Tensor, predictor: Tensor, batch: Batch, part: slice) -> Tensor:
    """Sum of the losses of some utterances, on their dense scores [part, T, U1, V]."""
    T, U = max(batch.frames[part]), max(batch.labels[part])
    logits = joint.logits(encoder[part, :T, None], predictor[part, None, : U + 1])
    lengths = (batch.encoder_lengths[part], batch.target_lengths[part])
    return rnnt.rnnt_loss(logits, batch.targets[part, :U], *lengths, reduction="sum")


LOSSES = {
    "none": Loss(no_loss),
    "triton": Loss(joint_loss, "triton"),
    "triton-untiled": Loss(joint_loss, "triton", None),
    "compiled": Loss(joint_loss, "compiled"),
    "compiled-untiled": Loss(joint_loss, "compiled", None),
    "reference": Loss(joint_loss, "reference"),
    "torchaudio": Loss(torchaudio_loss),
    "dense": Loss(dense_loss),
    "dense-8": Loss(partial(sub_batched_loss, utterances=8)),
    "dense-8-checkpoint": Loss(partial(sub_batched_loss, utterances=8, checkpointed=True)),
}


def reason_against(name: str, device: str) -> str | None:
    """Why a loss cannot be measured here, in one sentence."""
    if name == "torchaudio":
        try:
            found = hasattr(importlib.import_module("torchaudio").functional, "rnnt_loss")
        except (ImportError, OSError) as error:  # OSError: built for another torch
            return f"torchaudio cannot be imported: {error}"
        return None if found else "this torchaudio has no functional.rnnt_loss"
    backend = LOSSES[name].backend
    return None if backend == "auto" else unavailable(backend, device)
