"""What one process of test_sharded.py does: `torchrun -m tests.sharded_steps OUT DEVICE BACKENDS`.

For every backend and way to spread the model, two steps with different batches and an update of the parameters between
them, then two batches whose gradients are accumulated.  Saves to OUT the share's losses and the gradients, unsharded;
and once for each backend what else sharding must leave as it is (`details`).

All ranks' shares together are one batch, whose mean loss is the mean of theirs.  Its numbers, and the parameters at the
start, are exact in bfloat16, so that every dtype begins with the same problem.
"""

import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel

import rnnt
from tests.support import Joint, ragged
from tests.torchrun import leave

SHARE = 3  # utterances of a rank
FEATURES, JOINT, CLASSES = 6, 10, 1025  # two ranks cannot halve 1025
RATE = 0.5
WRAPPERS = ("ddp", "fsdp-root", "fsdp-loss", "fsdp-nested", "fsdp-bf16")


class Model(nn.Module):
    def __init__(self, backend: str) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh(), nn.Linear(FEATURES, FEATURES))
        self.predictor = nn.Embedding(CLASSES, FEATURES)
        self.loss = rnnt.RNNTJointLoss(
            JOINT, CLASSES, encoder_features=FEATURES, predictor_features=FEATURES, backend=backend, tile_rows=16
        )

    def forward(self, encoder: Tensor, targets: Tensor, encoder_lengths: Tensor, target_lengths: Tensor) -> Tensor:
        history = nn.functional.pad(targets, (1, 0), value=CLASSES - 1)
        return self.loss(self.encoder(encoder), self.predictor(history), targets, encoder_lengths, target_lengths)


def model(backend: str, device: str, dtype: torch.dtype) -> Model:
    torch.manual_seed(0)
    return Model(backend).bfloat16().to(device, dtype)


def batch_of(number: int, ranks: int, device: str, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """The whole batch; its sizes depend on its number, but for the number of utterances."""
    whole: Joint = ragged(SHARE * ranks, 5 + 2 * number, 3 + number, CLASSES, FEATURES, seed=number)
    numbers = whole.encoder.bfloat16().to(device, dtype)
    return numbers, whole.targets.to(device), whole.encoder_lengths, whole.target_lengths


def share_of(batch: tuple[Tensor, ...], rank: int) -> tuple[Tensor, ...]:
    """A rank's utterances, with no more padding than they need."""
    encoder, targets, frames, labels = (x[SHARE * rank :][:SHARE] for x in batch)
    return encoder[:, : frames.max()], targets[:, : labels.max()], frames, labels


def steps(
    wrapped: Callable[..., Tensor],
    parameters: dict[str, Any],
    batches: list[tuple[Tensor, ...]],
    exchange: Callable[[bool], AbstractContextManager[None]],
) -> dict[str, dict[str, Tensor]]:
    """Losses and gradients; within exchange(False) ranks keep their gradients to themselves."""
    optimizer = torch.optim.SGD(parameters.values(), RATE)
    found = {}
    for name, numbers in (("first", [0]), ("second", [1]), ("accumulated", [2, 3])):
        optimizer.zero_grad()
        losses = []
        for number in numbers:
            with exchange(number == numbers[-1]):
                losses.append(wrapped(*batches[number]))
                losses[-1].backward()
        gradients = {f"d_{key}": full(parameter.grad).clone() for key, parameter in parameters.items()}
        found[name] = {"loss": sum(losses).detach(), **gradients}
        if name == "first":
            optimizer.step()
    return found


def full(x: Tensor) -> Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def alone(ranks: int, device: str, dtype: torch.dtype, rounded: torch.dtype | None) -> dict[str, dict[str, Tensor]]:
    """One process, the whole batches, the reference backend.

    rounded: parameters are rounded to it before each use.  It is the dtype of all arithmetic as well, unless dtype is
    float64.
    """
    single = model("reference", device, dtype)
    used = rounded if rounded and dtype != torch.float64 else dtype
    batches = [batch_of(number, ranks, device, used) for number in range(4)]

    def call(*batch: Tensor) -> Tensor:
        parameters = {name: x.to(rounded or dtype).to(used) for name, x in single.named_parameters()}
        return functional_call(single, parameters, batch)

    return steps(call, dict(single.named_parameters()), batches, lambda on: nullcontext())


def spread(wrapper: str, backend: str, device: str) -> dict[str, dict[str, Tensor]]:
    """This rank's share; in float64 on the CPU, in float32 on GPUs, whose fastest backend has no float64."""
    dtype = torch.float32 if device == "cuda" or wrapper == "fsdp-bf16" else torch.float64
    rank, ranks = dist.get_rank(), dist.get_world_size()
    batches = [share_of(batch_of(number, ranks, device, dtype), rank) for number in range(4)]
    plain = model(backend, device, dtype)
    if wrapper == "ddp":
        ddp = DistributedDataParallel(plain)
        parameters = dict(plain.named_parameters())
        return steps(ddp, parameters, batches, lambda on: nullcontext() if on else ddp.no_sync())

    options: dict[str, Any] = {"mesh": init_device_mesh(device, (ranks,))}
    parts = [plain]
    if wrapper == "fsdp-loss":
        parts = [plain.loss, plain]
    if wrapper == "fsdp-bf16":
        parts = [plain.loss, plain]
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if wrapper == "fsdp-nested":  # the root too gives its weights back after the forward pass
        parts = [plain.encoder[0], plain.encoder[2], plain.predictor, plain.loss, plain]
        options["reshard_after_forward"] = True
    for part in parts:
        fully_shard(part, **options)

    def exchange(on: bool) -> AbstractContextManager[None]:
        plain.set_requires_gradient_sync(on)
        return nullcontext()

    return steps(plain, dict(plain.named_parameters()), batches, exchange)


def details(backend: str, device: str) -> dict[str, Any]:
    """The bias's length on this rank, scores for decoding, and what an output layer sharded by itself is told."""
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    encoder, targets, *lengths = batch_of(0, 1, device, torch.float32)
    plain = model(backend, device, torch.float32)
    states = encoder[:, 0], plain.predictor(targets[:, 0]).detach()
    expected = plain.loss.logits(*states).detach()
    fully_shard(plain.loss, mesh=mesh)
    split = len(plain.loss.output.bias.to_local())
    register_fsdp_forward_method(plain.loss, "logits")
    scores = plain.loss.logits(*states).detach()
    wrong = model(backend, device, torch.float32)
    fully_shard(wrong.loss.output, mesh=mesh)
    error = ""
    try:
        wrong(encoder, targets, *lengths)
    except TypeError as refusal:
        error = str(refusal)
    return {"bias": split, "scores": scores, "expected scores": expected, "error": error}


def main(out: Path, device: str, backends: list[str]) -> None:
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    found = {}
    for backend in backends:
        found |= {(backend, wrapper): spread(wrapper, backend, device) for wrapper in WRAPPERS}
        found[backend, "details"] = details(backend, device)
    torch.save(found, out / f"{dist.get_rank()}.pt")
    leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3].split(","))
