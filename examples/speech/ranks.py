"""The processes of one run, each on its own GPU or CPU core: `torchrun --nproc-per-node 2 -m examples.speech.train`.

Every process holds the whole model and reads all the data, works on its share of each batch (`batches.share`), and
makes the same step from the summed gradients (gradients.py).  Process 0 alone evaluates, prints and writes.
Without torchrun there is one process, and nothing here does anything.  Before: train.py joins.  After: gradients.py.
"""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

WAIT = timedelta(hours=1)  # for a process that evaluates, or compiles, while the others are ready


def join(device: str) -> None:
    """Meet the other processes that torchrun started; "cuda" means this process's own GPU from here on.

    Raises `ValueError` where there are fewer GPUs than processes, or for a device that they cannot share out.
    """
    if "LOCAL_RANK" not in os.environ:  # not started by torchrun
        return
    if device not in ("cpu", "cuda"):
        raise ValueError(f"--device: expected cpu or cuda under torchrun, got {device!r}")
    if device == "cuda":
        processes, gpus = int(os.environ["LOCAL_WORLD_SIZE"]), torch.cuda.device_count()
        if processes > gpus:
            raise ValueError(f"--nproc-per-node: expected at most {gpus}, the number of GPUs, got {processes}")
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=WAIT)


def leave() -> None:
    """Part from the others at the end of a run that went well; after an error torchrun ends all of them."""
    if _joined():
        dist.destroy_process_group()


def rank() -> int:
    """This process's number, from 0."""
    return dist.get_rank() if _joined() else 0


def count() -> int:
    """The number of processes."""
    return dist.get_world_size() if _joined() else 1


def add(x: Tensor) -> None:
    """Make `x` its sum over the processes, in place; the same bits in all of them."""
    if _joined():
        dist.all_reduce(x)


def of_first(value: float, device: torch.device) -> float:
    """Process 0's value, in all of them: clocks differ, and all must see the end of a run at the same step."""
    if not _joined():
        return value
    shared = torch.tensor(value, dtype=torch.float64, device=device)
    dist.broadcast(shared, 0)
    return shared.item()


def _joined() -> bool:
    return dist.is_available() and dist.is_initialized()
