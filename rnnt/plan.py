"""How much memory a training call will take, before anything is allocated and without a GPU.

    peak = most bytes at once during forward and backward of joint_rnnt_loss, above its inputs; the gradients count

An estimate: every utterance has the greatest lengths, every row is live, all four float inputs need gradients, there is
no dropout and no clamp.  Each backend counts its own tensors, at its own tile sizes, in its folder's plan.py; what
libraries allocate by themselves, and the caching allocator's rounding and fragments, is not in it.
Before: problem.py.  After: a backend's plan.py.
"""

import argparse
import sys
from dataclasses import dataclass
from typing import Any

import torch

from rnnt.backends import NAMES, unavailable
from rnnt.problem import FLOAT_DTYPES, Alignment, JointProblem, check_name, check_tile_rows
from rnnt.units import size

DEVICES = ("cuda", "cpu")
SMALLEST = {"B": 1, "T": 1, "U": 0, "V": 1, "H": 1}


@dataclass(frozen=True)
class Plan:
    """What one training call takes; bytes."""

    backend: str
    tile_rows: int | None  # of the backward pass; None: untiled
    rows: int  # N, lattice nodes
    dense_bytes: int  # one [B, T, U1, V] tensor
    parts: dict[str, int]  # of each kind of tensor at the peak

    @property
    def peak_bytes(self) -> int:
        return sum(self.parts.values())

    def __str__(self) -> str:
        tiles = "untiled" if self.tile_rows is None else f"tiles of {self.tile_rows:,} rows"
        lines = [f"{self.backend}, {tiles}, {self.rows:,} rows: peak {size(self.peak_bytes)} above the inputs"]
        parts = {name: count for name, count in self.parts.items() if count} | {
            "(one [B, T, U1, V] tensor)": self.dense_bytes
        }
        width = max(map(len, parts))
        return "\n".join(lines + [f"    {name:{width}}  {size(count):>9}" for name, count in parts.items()])


def plan(
    B: int,
    T: int,
    U: int,
    V: int,
    H: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    backend: str = "auto",
    device: torch.device | str | None = None,
    tile_rows: int | str | None = "auto",
    multiprocessors: int = 132,
) -> Plan:
    """Estimate the peak memory of one training call of `joint_rnnt_loss`.

    Args:
        B, T, U, V, H: utterances, frames, labels, vocabulary with blank, joint width.
        dtype: of the four float inputs, and so of the computation.
        backend: as in `joint_rnnt_loss`; "auto" on "cuda" is triton (float64: compiled), whether or not it is here.
        device: "cuda" or "cpu", with an index or without; None: cuda where there is one.
        tile_rows: as in `joint_rnnt_loss`.
        multiprocessors: of the GPU, to which triton's tiles are cut; 132 on H100 and H200.

    Raises:
        ValueError: a size or name is out of range, or the backend does not take the dtype or the device.
        TypeError: dtype is no float dtype.  ImportError: triton is to be planned and not installed.
    """
    sizes = {"B": B, "T": T, "U": U, "V": V, "H": H, "multiprocessors": multiprocessors}
    for name, count in sizes.items():
        least = SMALLEST.get(name, 1)
        if isinstance(count, bool) or not isinstance(count, int) or count < least:
            raise ValueError(f"{name}: expected an int >= {least}, got {count!r}")
    if dtype not in FLOAT_DTYPES:
        raise TypeError(f"dtype: expected float16, bfloat16, float32 or float64, got {dtype!r}")
    check_name("backend", backend, (*NAMES, "auto"))
    device = str(device or ("cuda" if torch.cuda.is_available() else "cpu")).partition(":")[0]  # without an index
    check_name("device", device, DEVICES)
    tile_rows = check_tile_rows(tile_rows)
    if backend == "auto":
        backend = _chosen(dtype, device)
    elif backend == "triton" and device == "cpu" and (reason := unavailable(backend, device)):
        raise ValueError(f"backend: expected one that works on {device}, got {backend!r}: {reason}")
    problem = problem_of(B, T, U, V, H, dtype, device, tile_rows, rows=B * T * (U + 1))
    rows_of_tile, parts = parts_of(backend, problem, multiprocessors)
    rows = problem.alignment.rows
    return Plan(backend, rows_of_tile, rows, rows * V * dtype.itemsize, parts)


def problem_of(
    B: int, T: int, U: int, V: int, H: int, dtype: torch.dtype, device: str, tile_rows: int | str | None, rows: int
) -> JointProblem:
    """The call as a backend receives it, in tensors without memory of their own ("meta" stands for a GPU).

    rows: N, less than B T U1 where lengths differ.
    """
    place = torch.device("cpu" if device == "cpu" else "meta")

    def floats(*shape: int) -> torch.Tensor:
        return torch.empty((), dtype=dtype, device=place).expand(shape)

    def integers(*shape: int) -> torch.Tensor:
        return torch.empty((), dtype=torch.int64, device=place).expand(shape)

    return JointProblem(
        encoder=floats(B, T, H),
        predictor=floats(B, U + 1, H),
        linear_weight=floats(V, H),
        linear_bias=floats(V),
        alignment=Alignment(integers(B, U), integers(B), integers(B), V - 1, T, rows),
        activation="tanh",
        dropout_p=0.0,
        seed=None,
        fastemit_lambda=0.0,
        clamp=0.0,
        tile_rows=tile_rows,
        occupancy_threshold=0.0,
        compute_dtype=dtype,
    )


def _chosen(dtype: torch.dtype, device: str) -> str:
    if device == "cuda":
        return "compiled" if dtype == torch.float64 else "triton"
    return "compiled" if unavailable("compiled", device) is None else "reference"


def parts_of(backend: str, problem: JointProblem, multiprocessors: int) -> tuple[int | None, dict[str, int]]:
    """Rows of a tile (None: untiled), and the bytes of each kind at the peak, from the backend's plan.py."""
    # Imported here: the backends bring compilers in.
    if backend == "reference":
        from rnnt.reference.plan import plan as reference_plan

        return reference_plan(problem)
    if backend == "compiled":
        from rnnt.compiled.plan import plan as compiled_plan

        return compiled_plan(problem)
    try:
        from rnnt import triton
        from rnnt.triton.plan import plan as triton_plan
    except ImportError as error:
        raise ImportError("backend 'triton': the package triton is not installed: pip install triton") from error
    if reason := triton.unsupported(problem):
        raise ValueError(f"backend: expected one that can take this call, got {backend!r}: {reason}")
    return triton_plan(problem, multiprocessors)


BATCHES = (1, 2, 4, 8, 16, 32, 64)
DTYPES = {str(x).removeprefix("torch."): x for x in FLOAT_DTYPES}


def add_command(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "plan",
        help="estimate the memory of a training call, without running it",
        description="Estimate the peak memory of one training call of joint_rnnt_loss above its inputs, gradients "
        "included, over batch sizes; nothing is run, and no GPU is needed.  Exit status: 2 when an option is wrong.",
    )
    add = parser.add_argument
    add("--batch", type=int, action="append", metavar="B", help=f"repeatable; default: {', '.join(map(str, BATCHES))}")
    add("--frames", type=int, default=400, metavar="T", help="default: 400")
    add("--labels", type=int, default=128, metavar="U", help="default: 128")
    add("--classes", type=int, default=1024, metavar="V", help="the blank included; default: 1024")
    add("--features", type=int, default=640, metavar="H", help="of the joint; default: 640")
    add("--dtype", choices=DTYPES, default="bfloat16", help="default: bfloat16")
    add("--backend", action="append", choices=tuple(reversed(NAMES)), help="repeatable; default: all of the device")
    add("--tile-rows", type=int, metavar="ROWS", help="of the tiled columns; default: what the backend chooses")
    add("--device", choices=DEVICES, help="default: cuda where there is one")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the table; returns the exit status."""
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    sizes = (options.frames, options.labels, options.classes, options.features, DTYPES[options.dtype])
    tile_rows = "auto" if options.tile_rows is None else options.tile_rows
    columns: dict[str, list[Plan]] = {}
    batches = options.batch or list(BATCHES)
    for name in dict.fromkeys(options.backend or NAMES):
        try:
            for rows in (None,) if name == "reference" else (tile_rows, None):
                head = name if rows is not None or name == "reference" else f"{name} untiled"
                columns[head] = [plan(B, *sizes, backend=name, device=device, tile_rows=rows) for B in batches]
        except (ImportError, ValueError) as error:
            if options.backend or not str(error).startswith("backend"):
                print(f"plan: {error}", file=sys.stderr)
                return 2
    print(
        f"T {options.frames}, U {options.labels}, V {options.classes}, H {options.features}, {options.dtype}, "
        f"{device}: peak of a training call above its inputs\n"
    )
    first = next(iter(columns.values()))
    table = [["batch", "rows", "dense tensor", *columns]]
    for i, B in enumerate(batches):
        peaks = [size(found[i].peak_bytes) for found in columns.values()]
        table.append([str(B), f"{first[i].rows:,}", size(first[i].dense_bytes), *peaks])
    widths = [max(map(len, cells)) for cells in zip(*table, strict=True)]
    for line in table:
        print("  ".join(f"{cell:>{width}}" for cell, width in zip(line, widths, strict=True)))
    return 0
