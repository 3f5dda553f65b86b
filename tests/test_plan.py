"""`rnnt.plan`: the estimate against measured peaks, and what the command prints.

Measured with every row in the backward pass (occupancy_threshold=0), as the estimate has it.  The saved benchmarks hold
the formulas of the GPU where there is none.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import rnnt
from rnnt.__main__ import main
from rnnt.bench.peak import peak_bytes
from rnnt.plan import parts_of, problem_of
from tests.support import assert_same_bits, on_gpu, ragged, results

TOLERANCE = 0.15
BENCHMARKS = Path(__file__).parent.parent / "docs" / "benchmarks"


def training_call(
    B: int, T: int, U: int, V: int, H: int, dtype: torch.dtype, device: str, **options: object
) -> Callable[[], None]:
    """Forward and backward of full lengths, after one that compiles."""
    generator = torch.Generator().manual_seed(0)
    shapes = (B, T, H), (B, U + 1, H), (V, H), (V,)
    floats = [0.1 * torch.randn(shape, generator=generator) for shape in shapes]
    encoder, predictor, weight, bias = leaves = [x.to(device, dtype).requires_grad_() for x in floats]
    targets = torch.ones((B, U), dtype=torch.int64, device=device)
    lengths = torch.full((B,), T, device=device), torch.full((B,), U, device=device)

    def call() -> None:
        for x in leaves:
            x.grad = None
        loss = rnnt.joint_rnnt_loss(
            encoder, predictor, weight, targets, *lengths, linear_bias=bias, blank=0, occupancy_threshold=0.0, **options
        )
        loss.backward()

    call()
    for x in leaves:
        x.grad = None
    return call


def held_to_measured(sizes: tuple[int, ...], dtype: torch.dtype, device: str, backend: str, tile_rows: object) -> None:
    options = {"backend": backend, "tile_rows": tile_rows}
    measured = peak_bytes(training_call(*sizes, dtype, device, **options), device)
    assert rnnt.plan(*sizes, dtype, device=device, **options).peak_bytes == pytest.approx(measured, rel=TOLERANCE)


@pytest.mark.parametrize(
    ("backend", "sizes", "dtype", "tile_rows"),
    [
        pytest.param("reference", (2, 50, 10, 100, 64), torch.float32, None, marks=pytest.mark.reference),
        pytest.param("compiled", (2, 100, 20, 500, 128), torch.float32, "auto", marks=pytest.mark.compiled),
        pytest.param("compiled", (2, 100, 20, 250, 128), torch.bfloat16, 1024, marks=pytest.mark.compiled),
        pytest.param("compiled", (2, 100, 20, 250, 128), torch.bfloat16, None, marks=pytest.mark.compiled),
    ],
)
def test_measured_on_the_cpu(backend, sizes, dtype, tile_rows):
    held_to_measured(sizes, dtype, "cpu", backend, tile_rows)


@pytest.mark.gpu
@pytest.mark.parametrize("tile_rows", ["auto", None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", on_gpu("reference", "compiled", "triton"))
def test_measured_on_the_gpu(backend, dtype, tile_rows):
    held_to_measured((8, 200, 40, 500, 320), dtype, "cuda", backend, tile_rows)


def saved_peaks() -> list[object]:
    """(backend, sizes, dtype, rows, tile_rows, peak of the loss) of each benchmark."""
    found = []
    for name in ("h200-target.json", "h200-shapes.json"):
        for record in json.loads((BENCHMARKS / name).read_text())["benchmarks"]:
            info = record["extra_info"]
            if info["pass"] != "both":
                continue
            B, T, U, _, H = sizes = tuple(info["sizes"].values())
            dtype = getattr(torch, info["dtype"])
            projected = B * (T + U + 1) * H * dtype.itemsize  # the two projections' results count in a benchmark
            tile_rows = "auto" if info["tiles"] == "tiled" else None
            values = info["backend"], sizes, dtype, info["rows"], tile_rows, info["peak_bytes"] - projected
            found.append(pytest.param(*values, id=f"{info['shape']}-{info['backend']}-{info['tiles']}"))
    return found


@pytest.mark.parametrize(("backend", "sizes", "dtype", "rows", "tile_rows", "measured"), saved_peaks())
def test_saved_benchmarks(backend, sizes, dtype, rows, tile_rows, measured):
    _, parts = parts_of(backend, problem_of(*sizes, dtype, "cuda", tile_rows, rows), multiprocessors=132)
    assert sum(parts.values()) == pytest.approx(measured, rel=TOLERANCE)


def test_plan():
    plan = rnnt.plan(32, 400, 128, 1024, 640, backend="compiled", device="cuda", tile_rows=4096)
    assert (plan.backend, plan.tile_rows, plan.rows) == ("compiled", 4096, 32 * 400 * 129)
    assert plan.dense_bytes == 32 * 400 * 129 * 1024 * 2
    assert plan.peak_bytes == sum(plan.parts.values()) < plan.dense_bytes
    assert "4,096 rows" in str(plan)
    untiled = rnnt.plan(32, 400, 128, 1024, 640, backend="compiled", device="cuda", tile_rows=None)
    assert untiled.tile_rows is None
    assert untiled.peak_bytes > plan.dense_bytes


def test_tiles_larger_than_the_lattice_take_no_more():
    """tile_rows far beyond the lattice: a tile of its size."""
    lattice = 2, 300, 300, 5, 6
    fitting, huge = (rnnt.plan(*lattice, backend="compiled", device="cuda", tile_rows=n) for n in (2**18, 10**12))
    assert huge.peak_bytes == fitting.peak_bytes
    batch = ragged(2, 4, 2, 5, 6).cast(torch.float32)
    assert_same_bits(*(results(batch, backend="compiled", tile_rows=n) for n in (2**63 - 1, 2**16)))


def test_auto_takes_what_the_loss_would():
    assert rnnt.plan(1, 10, 2, 9, 8, device="cuda").backend == "triton"
    assert rnnt.plan(1, 10, 2, 9, 8, torch.float64, device="cuda").backend == "compiled"
    assert rnnt.plan(1, 10, 2, 9, 8, device="cpu").backend in ("compiled", "reference")


@pytest.mark.parametrize(
    ("sizes", "options", "message"),
    [
        ((0, 1, 1, 1, 1), {}, "B: expected an int >= 1, got 0"),
        ((1, 1, -1, 1, 1), {}, "U: expected an int >= 0, got -1"),
        ((1, 1, 1, 1, 1), {"tile_rows": 0}, "tile_rows: expected an int >= 1"),
        ((1, 1, 1, 1, 1), {"backend": "cudnn"}, "backend: expected one of"),
        ((1, 1, 1, 1, 1), {"device": "tpu"}, "device: expected one of"),
        ((1, 1, 1, 1, 1), {"backend": "triton", "device": "cuda", "dtype": torch.float64}, "float64 is computed by"),
    ],
)
def test_errors(sizes, options, message):
    with pytest.raises(ValueError, match=message):
        rnnt.plan(*sizes, **options)


@pytest.mark.parametrize("dtype", [torch.int64, "bfloat16"], ids=str)
def test_no_dtype(dtype):
    with pytest.raises(TypeError, match=f"dtype: expected float16, .* got {dtype!r}"):
        rnnt.plan(1, 1, 1, 1, 1, dtype)


def test_devices_by_index_and_by_object():
    for device in ("cuda:0", torch.device("cuda"), torch.device("cuda", 1)):
        assert rnnt.plan(1, 10, 2, 9, 8, device=device) == rnnt.plan(1, 10, 2, 9, 8, device="cuda")


def test_command(capsys):
    assert main(["plan", "--device", "cuda", "--batch", "1", "--batch", "8", "--tile-rows", "4096"]) == 0
    _, _, head, *lines = capsys.readouterr().out.splitlines()
    assert head.split("  ")[-1].strip() == "reference"
    assert [line.split()[:2] for line in lines] == [["1", "51,600"], ["8", "412,800"]]
    assert len({len(line) for line in [head, *lines]}) == 1


@pytest.mark.parametrize("arguments", [["--batch", "0"], ["--backend", "triton", "--dtype", "float64"]])
def test_command_refuses(arguments, capsys):
    assert main(["plan", "--device", "cuda", *arguments]) == 2
    assert capsys.readouterr().err.startswith("plan: ")
