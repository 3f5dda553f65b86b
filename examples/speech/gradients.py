"""One batch's loss and gradients, computed by all processes together; or the news that it does not fit in memory.

    weight[p]  = characters in process p's share / characters in the batch
    gradient   = sum over p of  weight[p] x gradient of the share's loss per character

which is the gradient of the whole batch's loss per character, however many processes share it.

All gradients are views of one vector, which also holds the loss and the number of processes that ran out of memory.
Its sum is the only thing that processes exchange, once an attempt and after the backward pass, so a process that
failed takes part like any other and no process is left waiting.  (DistributedDataParallel exchanges gradients during
the backward pass: when one process fails there, the others wait for it until they time out.)  All then know that one
failed, and try again with smaller tiles, or leave the batch out.

Running out of memory elsewhere ends the run: while a batch is padded, in the first step of the optimizer, whose state
stays from then on, or outside of PyTorch's allocator.  Before: batches.py, model.py, ranks.py.  After: trainer.py.
"""

import zlib

import torch
from torch import Tensor
from tqdm import tqdm

from examples.speech import ranks
from examples.speech.batches import Batch, share
from examples.speech.model import Transducer

RETRY_ROWS = 1024  # lattice rows of a tile in the second attempt, where the first did not say a number


def seed_of(*numbers: int) -> int:
    """A generator's seed for (seed, step, ...)."""
    return zlib.crc32(repr(numbers).encode())


class Gradients:
    """Gradients of one model's parameters; `compute` sets them.  dtype: "fp32", or "bf16" for autocast."""

    def __init__(self, model: Transducer, dtype: str) -> None:
        self.model = model
        self.dtype = dtype
        parameters = list(model.parameters())
        self.device = parameters[0].device
        sizes = [parameter.numel() for parameter in parameters]
        self.sums = torch.zeros(sum(sizes) + 2, device=self.device)  # gradients, loss, failures
        for parameter, gradient in zip(parameters, self.sums[:-2].split(sizes), strict=True):
            parameter.grad = gradient.view_as(parameter)  # backward adds to it in place

    def compute(self, batch: Batch, seed: int, step: int) -> float | None:
        """The batch's loss, in nats a character; None when it does not fit in some process's memory.

        `seed` and `step` determine dropout, for each process another.
        """
        joint = self.model.joint
        chosen = joint.tile_rows
        smaller = max(1, chosen // 4) if isinstance(chosen, int) else RETRY_ROWS
        size = f"{batch.features.shape[0]} utterances of up to {batch.features.shape[1]} frames"
        loss = self._attempt(batch, seed_of(seed, step, ranks.rank()))
        if loss is None:
            _tell(f"step {step}: out of memory with {size}; trying again with --tile-rows {smaller}")
            joint.tile_rows = smaller
            loss = self._attempt(batch, seed_of(seed, step, ranks.rank()))
            joint.tile_rows = chosen
            if loss is None:
                _tell(f"step {step}: out of memory again; leaving out this batch")
        return loss

    def backward(self, batch: Batch) -> Tensor:
        """This process's part of the batch's loss; its gradient is added to the parameters'."""
        mine = share(batch, ranks.rank(), ranks.count())
        if len(mine.features) == 0:  # fewer utterances than processes
            return self.sums.new_zeros(())
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.dtype == "bf16"):
            loss: Tensor = self.model(*mine)
        loss = loss * (mine.characters / batch.characters)
        loss.backward()
        return loss.detach()

    def _attempt(self, batch: Batch, seed: int) -> float | None:
        torch.manual_seed(seed)
        self.sums.zero_()
        fits = True
        try:
            self.sums[-2] = self.backward(batch)
        except torch.OutOfMemoryError:
            fits = False
        if not fits:  # out here, where the error no longer holds the tensors of the calls that it passed through
            torch.cuda.empty_cache()
            self.sums.zero_()
            self.sums[-1] = 1
        ranks.add(self.sums)
        loss, failures = self.sums[-2:].tolist()
        return None if failures else loss


def _tell(message: str) -> None:
    if ranks.rank() == 0:
        tqdm.write(message)
