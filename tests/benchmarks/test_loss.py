"""The measurements: one test for each pass, shape, backend and tiling; groups are a shape's passes.

Nothing is timed at a shape where the backend is wrong.  Out of memory is a result, not an error.
"""

import functools
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.benchmarks.correctness import faults
from tests.benchmarks.floor import flop, gemm_floor, synchronize
from tests.benchmarks.peak import peak_bytes
from tests.benchmarks.shapes import Shape
from tests.benchmarks.steps import Settings, Step

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
    except torch.OutOfMemoryError:
        over = None
    release_memory()
    assert not over, "wrong, so not measured:\n" + "\n".join(over)
    return Step(shape, settings, device, checked=over is not None)


def release_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def measure(
    benchmark: Any, step: Step, which: str, call: Callable[..., object], setup: Callable[[], Any], rounds: int
) -> None:
    """Time call(*setup()), and its peak memory; figures beside the median and spread go into extra_info."""
    shape, settings, device = step.shape, step.settings, step.device
    floor = gemm_floor(shape, device)
    benchmark.group = f"{shape.name} {which}"
    benchmark.params = {"shape": shape.name, "backend": settings.backend, "tiles": settings.tiles}
    info = benchmark.extra_info
    info.update(
        shape=shape.name,
        sizes={name: getattr(shape, name) for name in "BTUVH"},
        rows=shape.rows,
        dense_bytes=shape.dense_bytes,
        dtype=shape.dtype,
        autocast=shape.autocast,
        backend=settings.backend,
        tiles=settings.tiles,
        activation=settings.activation,
        dropout_p=settings.dropout_p,
        validate=settings.validate,
        device=device,
        checked=step.checked,
        **{"pass": which},
        floor_seconds=floor.seconds(which),
        floor_tflops=flop(shape, which) / floor.seconds(which) / 1e12,
        outcome="measured",
    )

    def synchronized(*arguments: Any) -> None:
        call(*arguments)
        synchronize(device)

    def prepare() -> tuple[tuple[Any, ...], dict[str, Any]]:
        step.clear_gradients()
        arguments = setup()
        synchronize(device)
        return arguments, {}

    try:
        benchmark.pedantic(synchronized, setup=prepare, rounds=rounds, warmup_rounds=max(rounds // 5, 1))
        step.hold_gradients(which)
        arguments = setup()
        info["peak_bytes"] = peak_bytes(lambda: call(*arguments), device)
    except torch.OutOfMemoryError:
        info["outcome"] = "out of memory"
    if info["outcome"] == "measured" and benchmark.stats:
        info["of_floor"] = benchmark.stats["median"] / info["floor_seconds"]
    release_memory()


def test_forward(step: Step, rounds: int, benchmark: Any) -> None:
    measure(benchmark, step, "forward", step.forward, lambda: (), rounds)


def test_backward(step: Step, rounds: int, benchmark: Any) -> None:
    measure(benchmark, step, "backward", lambda loss: loss.backward(), lambda: (step.forward(),), rounds)


def test_both(step: Step, rounds: int, benchmark: Any) -> None:
    measure(benchmark, step, "both", step.both, lambda: (), rounds)
