"""Times and peak memory of a step's passes, as records that can be saved.

A record has the form of an entry in pytest-benchmark's files: "extra_info" says what was measured, its peak memory,
its floor and its outcome; "stats" has the times in seconds, and is there only when the outcome is "measured".

    measured         both figures
    out of memory    a result like any other
    refused          the backend does not take this call: "reason"
    failed           it raised: "reason"; the traceback is on stderr

Before: steps.py, floor.py, peak.py.  After: cells.py, command.py, tests/benchmarks/test_loss.py.
"""

import statistics
import time
import traceback
from collections.abc import Iterator
from typing import Any

from rnnt.backends import reason_of_refusal
from rnnt.bench.floor import flop, gemm_floor
from rnnt.bench.machine import is_out_of_memory, release_memory
from rnnt.bench.peak import peak_bytes
from rnnt.bench.shapes import Shape
from rnnt.bench.steps import Settings, Step

Record = dict[str, Any]

ROUNDS = {"cuda": 20, "cpu": 5}


def warmup_rounds(rounds: int) -> int:
    return max(rounds // 5, 1)


def describe(shape: Shape, settings: Settings, device: str, which: str, checked: bool = False) -> dict[str, Any]:
    """What is measured, and the floor beside it; checked: the backend has been found right at this shape."""
    floor = gemm_floor(shape, device)
    return {
        "shape": shape.name,
        "sizes": {name: getattr(shape, name) for name in "BTUVH"},
        "rows": shape.rows,
        "dense_bytes": shape.dense_bytes,
        "dtype": shape.dtype,
        "autocast": shape.autocast,
        "backend": settings.backend,
        "tiles": settings.tiles,
        "activation": settings.activation,
        "dropout_p": settings.dropout_p,
        "validate": settings.validate,
        "occupancy_threshold": settings.occupancy_threshold,
        "graph": settings.graph,
        "scores": shape.scores,
        "device": device,
        "checked": checked,
        "pass": which,
        "floor_seconds": floor.seconds(which),
        "floor_tflops": flop(shape, which) / floor.seconds(which) / 1e12,
        "outcome": "measured",
    }


def measure(shape: Shape, settings: Settings, device: str, rounds: int) -> Iterator[Record]:
    """A record for each pass; after one that is refused or failed no further pass is tried."""
    step = None
    for which in settings.passes:
        info = describe(shape, settings, device, which)
        record: Record = {"extra_info": info}
        try:
            step = step or Step(shape, settings, device)
            times = pass_times(step, which, rounds)
            info["peak_bytes"] = pass_peak(step, which)
            record["stats"] = summary(times)
            info["of_floor"] = record["stats"]["median"] / info["floor_seconds"]
        except Exception as error:
            refusal = reason_of_refusal(error, settings.backend)
            if is_out_of_memory(error):
                info["outcome"] = "out of memory"
            elif refusal:
                info |= {"outcome": "refused", "reason": refusal}
            else:
                traceback.print_exc()
                message = str(error).strip().partition("\n")[0]
                info |= {"outcome": "failed", "reason": f"{type(error).__name__}: {message}"}
        release_memory()
        yield record
        if info["outcome"] in ("refused", "failed"):
            return


def pass_times(step: Step, which: str, rounds: int) -> list[float]:
    """Seconds of each round, after some that do not count: they compile, and fill caches."""
    times = []
    for _ in range(warmup_rounds(rounds) + rounds):
        call = step.prepare(which)
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return times[-rounds:]


def pass_peak(step: Step, which: str) -> int:
    """Peak bytes of the pass above inputs, parameters and their gradients; of a graph, while it is captured."""
    call = step.capture if step.settings.graph else step.prepare(which, hold_gradients=True)
    return peak_bytes(call, step.device)


def summary(times: list[float]) -> dict[str, Any]:
    first, median, third = statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else 3 * times
    return {
        "rounds": len(times),
        "min": min(times),
        "max": max(times),
        "mean": statistics.fmean(times),
        "median": median,
        "iqr": third - first,
        "data": times,
    }
