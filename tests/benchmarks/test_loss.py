"""The measurements: one test for each pass, shape, backend and tiling; groups are a shape's passes.

Nothing is timed at a shape where the backend is wrong.  Out of memory is a result, not an error.
"""

import functools
from typing import Any

import pytest

from rnnt.bench.machine import is_out_of_memory, release_memory
from rnnt.bench.measure import describe, pass_peak, warmup_rounds
from rnnt.bench.shapes import Shape
from rnnt.bench.steps import Settings, Step
from tests.benchmarks.correctness import faults

# Inductor's advice, wherever a float32 step runs on a GPU with tensor cores.
pytestmark = pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")

found_faults = functools.cache(faults)


@pytest.fixture
def step(shape: Shape, settings: Settings, device: str) -> Step:
    """The step to measure, once its backend has been found right at its shape.

    Where a comparison does not fit in memory the step says that it is not checked.
    """
    try:
        over = found_faults(shape, settings, device)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        over = None
    release_memory()
    assert not over, "wrong, so not measured:\n" + "\n".join(over)
    return Step(shape, settings, device, checked=over is not None)


def measure(benchmark: Any, step: Step, which: str, rounds: int) -> None:
    """Time a pass, and its peak memory; figures beside the median and spread go into extra_info."""
    shape, settings = step.shape, step.settings
    benchmark.group = f"{shape.name} {which}"
    benchmark.params = {"shape": shape.name, "backend": settings.backend, "tiles": settings.tiles}
    info = benchmark.extra_info
    info.update(describe(shape, settings, step.device, which, step.checked))
    try:
        benchmark.pedantic(
            lambda call: call(),
            setup=lambda: ((step.prepare(which),), {}),
            rounds=rounds,
            warmup_rounds=warmup_rounds(rounds),
        )
        info["peak_bytes"] = pass_peak(step, which)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        info["outcome"] = "out of memory"
    if info["outcome"] == "measured" and benchmark.stats:
        info["of_floor"] = benchmark.stats["median"] / info["floor_seconds"]
    release_memory()


def test_forward(step: Step, rounds: int, benchmark: Any) -> None:
    measure(benchmark, step, "forward", rounds)


def test_backward(step: Step, rounds: int, benchmark: Any) -> None:
    measure(benchmark, step, "backward", rounds)


def test_both(step: Step, rounds: int, benchmark: Any) -> None:
    measure(benchmark, step, "both", rounds)
