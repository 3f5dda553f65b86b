"""What a loss costs in the training step: time, peak memory, and the largest batch that fits.

A record says what was measured and its "outcome"; the figures are there only when that is "measured".

    measured         figures
    out of memory    a result like any other
    refused          the loss does not take this batch: "reason"
    failed           it raised, or the loss was not finite: "reason"; the traceback is on stderr

Peak memory is all that PyTorch has allocated while the timed steps ran: parameters, gradients, AdamW's moments and the
batches included.  (On the CPU: what one step allocates above them.)  Before: training.py.  After: model.py.
"""

import math
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from benchmarks.data import Batch
from benchmarks.losses import LOSSES, Refused
from benchmarks.training import Setup, Training
from rnnt.backends import reason_of_refusal
from rnnt.bench.floor import flop, gemm_floor
from rnnt.bench.machine import is_out_of_memory, release_memory, synchronize
from rnnt.bench.measure import summary
from rnnt.bench.peak import peak_bytes
from rnnt.bench.shapes import Shape

Record = dict[str, Any]

WARMUPS = 3
MULTIPLE = 8  # of which the largest batch is one
CEILING = 8192


def measure(name: str, data: str, B: int, setup: Setup, rounds: int) -> Record:
    """The step at a given batch size."""
    record: Record = {"loss": name, "data": data, "batch": B}
    release_memory()
    with outcome(record):
        training = Training(LOSSES[name], setup)
        batches = training.make_batches(data, B)
        record |= {"parameters": training.parameters, **describe(batches, setup)}
        record |= timed(training, batches, rounds)
    return record


def measure_largest(name: str, data: str, setup: Setup, rounds: int, start: int) -> Record:
    """The largest batch of which a step on each of the setup's batches fits, and the step there.

    "tried" lists what was tried, and "stopped_by" what ended it, when that was not memory.
    """
    record: Record = {"loss": name, "data": data, "tried": {}, "stopped_by": None}
    release_memory()
    with outcome(record):
        training = Training(LOSSES[name], setup)
        record["parameters"] = training.parameters
        for batch in training.make_batches(data, MULTIPLE):  # makes AdamW's moments, which a failure would leave halved
            training.step(batch)

        def fits(B: int) -> bool:
            trial: Record = {}
            with outcome(trial):
                for batch in training.make_batches(data, B):
                    training.step(batch)
                synchronize(setup.device)
            training.optimizer.zero_grad()
            release_memory()
            record["tried"][str(B)] = trial["outcome"]
            record["stopped_by"] = record["stopped_by"] or trial.get("reason")
            return bool(trial["outcome"] == "measured")

        B = largest_batch(fits, start)
        while B:
            try:
                record |= {"batch": B, **timed(training, training.make_batches(data, B), rounds)}
                record["utterances_per_second"] = B / record["stats"]["median"]
                break
            except Exception as error:  # fragmentation may take what the single steps had
                if not is_out_of_memory(error):
                    raise
            training.optimizer.zero_grad()
            release_memory()
            record["tried"][str(B)] = "out of memory"
            B -= MULTIPLE
        if not B:
            raise torch.OutOfMemoryError(f"not even {MULTIPLE} utterances")
    return record


def largest_batch(fits: Callable[[int], bool], start: int, ceiling: int = CEILING) -> int:
    """The largest multiple of MULTIPLE, at most `ceiling`, that fits; 0 when none does.

    Doubles from `start` until one does not fit, then bisects; what is larger than one that does not fit is not tried.
    """
    low, high = 0, -(-start // MULTIPLE) * MULTIPLE
    while high <= ceiling and fits(high):
        low, high = high, 2 * high
    high = min(high, ceiling // MULTIPLE * MULTIPLE + MULTIPLE)
    while high - low > MULTIPLE:
        middle = (low + high) // 2 // MULTIPLE * MULTIPLE
        if fits(middle):
            low = middle
        else:
            high = middle
    return low


@contextmanager
def outcome(record: Record) -> Iterator[None]:
    """Puts into the record how the block ended; errors end here."""
    try:
        yield
        record["outcome"] = "measured"
    except Exception as error:
        if isinstance(error, Refused):
            refusal: str | None = str(error)
        else:
            refusal = reason_of_refusal(error, LOSSES[record["loss"]].backend) if "loss" in record else None
        if is_out_of_memory(error):
            record["outcome"] = "out of memory"
        elif refusal:
            record |= {"outcome": "refused", "reason": refusal}
        else:
            traceback.print_exc()
            message = str(error).strip().partition("\n")[0]
            record |= {"outcome": "failed", "reason": f"{type(error).__name__}: {message}"}


def describe(batches: list[Batch], setup: Setup) -> Record:
    """Sizes of the batches and, for the mean of their valid rows, the time of the output layer's products alone."""
    rows = round(statistics.fmean(batch.rows for batch in batches))
    shape = Shape("rows", 1, rows, 0, setup.sizes.V, setup.sizes.joint, dtype=setup.dtype)
    floor = gemm_floor(shape, setup.device)
    return {
        "rows": rows,
        "frames": max(max(batch.frames) for batch in batches),
        "labels": max(max(batch.labels) for batch in batches),
        "floor_seconds": {which: floor.seconds(which) for which in ("forward", "both")},
        "floor_tflops": flop(shape, "both") / floor.seconds("both") / 1e12,
    }


def timed(training: Training, batches: list[Batch], rounds: int) -> Record:
    """Time and peak memory of `rounds` steps on the batches in turn, after steps on each that do not count."""
    device = training.setup.device
    for i in range(max(WARMUPS, len(batches))):
        training.step(batches[i % len(batches)])
    synchronize(device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times, losses = [], []
    for i in range(rounds):
        start = time.perf_counter()
        losses.append(training.step(batches[i % len(batches)]))
        synchronize(device)
        times.append(time.perf_counter() - start)
    training.optimizer.zero_grad()
    if device == "cuda":
        peak = torch.cuda.max_memory_allocated()
    else:
        peak = peak_bytes(lambda: training.step(batches[0]), device)
    return {"stats": summary(times), "peak_bytes": peak, "loss_value": finite(losses[-1])}


def finite(loss: Tensor) -> float:
    """A step on values that are not finite may do other work."""
    value = loss.item()
    if not math.isfinite(value):
        raise ValueError(f"the loss is {value} after the timed steps")
    return value
