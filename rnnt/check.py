"""Cross-validation on this machine: each usable backend against the reference in float64.

    error(x)  = max |x - x64| / max |x64|                    x: the losses, d_encoder, d_predictor, d_linear_...
    budget(x) = 2 error(x of the reference in the same dtype) + rounding band

x64 comes from the reference backend in float64 on the CPU, on inputs rounded to the dtype under test first, so that
only arithmetic is judged.  Losses have reduction "none" and a random upstream gradient; batches are ragged, and NaN
stands where no backend may read.  Before: api.py.
"""

import argparse
import platform
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

import rnnt
from rnnt.backends import NAMES, reason_of_refusal, unavailable

QUANTITIES = ("loss", "d_encoder", "d_predictor", "d_linear_weight", "d_linear_bias")
DTYPES = {str(x).removeprefix("torch."): x for x in (torch.float64, torch.float32, torch.bfloat16, torch.float16)}
DEFAULT_DTYPES = ("float64", "float32", "bfloat16")

# Rounding band in units of the dtype's epsilon: half a step of a 16-bit result; in float32 what another order of the
# same sums may change (measured over permuted classes and features: at most 4); in float64, where the reference is the
# truth itself, what an occupancy loses as exp(alpha + beta - log Z) with log Z in the thousands.
ROUNDING_STEPS = {torch.float64: 2.0**14, torch.float32: 8.0, torch.bfloat16: 0.5, torch.float16: 0.5}


@dataclass(frozen=True)
class Shape:
    """A ragged batch: frames and labels of each utterance, V, H, and the rows of a tile when tiled."""

    frames: tuple[int, ...]
    labels: tuple[int, ...]
    classes: int
    features: int
    tile_rows: int
    activation: str
    blank: int

    @property
    def name(self) -> str:
        sizes = (len(self.frames), max(self.frames), max(self.labels), self.classes, self.features)
        return "-".join(f"{letter}{size}" for letter, size in zip("BTUVH", sizes, strict=True))


CPU_SHAPES: tuple[Shape, ...] = (
    Shape((17, 9, 1), (5, 0, 3), 131, 40, 32, "tanh", -1),
    Shape((6, 12), (7, 4), 1025, 64, 32, "relu", 0),
    Shape((2, 40), (6, 3), 29, 24, 32, "sigmoid", 7),
)
GPU_SHAPES: tuple[Shape, ...] = (
    Shape((60, 23, 1, 41), (17, 0, 9, 20), 131, 200, 512, "tanh", -1),
    Shape((150, 90, 120), (40, 25, 33), 1025, 640, 4096, "relu", 0),
    Shape((2, 400), (30, 12), 500, 320, 1024, "sigmoid", 7),
)
INTERPRETER_SHAPES: tuple[Shape, ...] = (
    Shape((5, 3, 1), (2, 0, 3), 19, 16, 8, "tanh", -1),
    Shape((2, 6), (4, 1), 37, 24, 8, "relu", 0),
    Shape((4, 3), (3, 2), 33, 20, 8, "sigmoid", -1),
)


class Inputs(NamedTuple):
    encoder: Tensor  # [B, T, H]
    predictor: Tensor  # [B, U1, H]
    linear_weight: Tensor  # [V, H]
    linear_bias: Tensor  # [V]
    targets: Tensor  # [B, U]
    encoder_lengths: Tensor  # [B]
    target_lengths: Tensor  # [B]
    upstream: Tensor  # [B]


def make_inputs(shape: Shape, dtype: torch.dtype, seed: int = 0) -> Inputs:
    """Random inputs on the CPU: floats as float64 whose values the dtype can hold, NaN and -100 as padding."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int, scale: float = 1.0) -> Tensor:
        values = scale * torch.randn(size, generator=generator, dtype=torch.float64)
        return values.to(dtype).double()

    utterances, frames, labels = len(shape.frames), max(shape.frames), max(shape.labels)
    encoder_lengths, target_lengths = torch.tensor(shape.frames), torch.tensor(shape.labels)
    encoder = normal(utterances, frames, shape.features)
    predictor = normal(utterances, labels + 1, shape.features)
    encoder[torch.arange(frames) >= encoder_lengths[:, None]] = torch.nan
    predictor[torch.arange(labels + 1) > target_lengths[:, None]] = torch.nan
    blank = shape.blank % shape.classes
    targets = torch.randint(shape.classes - 1, (utterances, labels), generator=generator)
    targets += targets >= blank
    targets[torch.arange(labels) >= target_lengths[:, None]] = -100
    return Inputs(
        encoder,
        predictor,
        normal(shape.classes, shape.features, scale=2 * shape.features**-0.5),
        normal(shape.classes),
        targets,
        encoder_lengths,
        target_lengths,
        torch.randn(utterances, generator=generator).double(),
    )


def results(
    inputs: Inputs, shape: Shape, backend: str, dtype: torch.dtype, device: str, tile_rows: int | None
) -> dict[str, Tensor]:
    """The losses [B] and the four gradients, as float64 on the CPU."""
    floats = [x.to(device, dtype).requires_grad_() for x in inputs[:4]]
    encoder, predictor, linear_weight, linear_bias = floats
    losses = rnnt.joint_rnnt_loss(
        encoder,
        predictor,
        linear_weight,
        inputs.targets.to(device),
        inputs.encoder_lengths,
        inputs.target_lengths,
        linear_bias=linear_bias,
        activation=shape.activation,
        blank=shape.blank,
        reduction="none",
        backend=backend,
        tile_rows=tile_rows,
    )
    gradients = torch.autograd.grad(losses, floats, inputs.upstream.to(losses))
    found = (losses.detach(), *gradients)
    return {name: x.cpu().double() for name, x in zip(QUANTITIES, found, strict=True)}


def errors(found: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    """Largest difference over largest exact value, of each quantity; NaN when anything found is not finite."""
    return {name: float((found[name] - exact[name]).abs().max() / exact[name].abs().max()) for name in QUANTITIES}


def rounding_band(quantity: str, dtype: torch.dtype) -> float:
    """What rounding alone may add to an error.

    Losses of 16-bit inputs are float32 and sum many roundings of both signs, so theirs is a sixteenth.
    """
    band = ROUNDING_STEPS[dtype] * torch.finfo(dtype).eps
    return band / 16 if quantity == "loss" and dtype.itemsize == 2 else band


class Comparison(NamedTuple):
    """One line of the table.  `reason`: in one sentence, why there are no figures."""

    backend: str
    dtype: str
    tiles: str
    shape: str
    errors: dict[str, float]
    budgets: dict[str, float]
    reason: str | None
    failed: bool


def compare(names: list[str], dtypes: list[str], device: str, shapes: tuple[Shape, ...]) -> Iterator[Comparison]:
    """Every backend in every dtype at every shape, tiled and untiled (the reference has no tiles).

    A backend that raises is a failed line; the traceback of each different message goes to stderr once.
    """
    traced = set()
    for dtype_name in dtypes:
        dtype = DTYPES[dtype_name]
        for shape in shapes:
            inputs = make_inputs(shape, dtype)
            exact = results(inputs, shape, "reference", torch.float64, "cpu", None)
            eager = errors(results(inputs, shape, "reference", dtype, device, None), exact)
            budgets = {name: 2 * eager[name] + rounding_band(name, dtype) for name in QUANTITIES}
            for name in names:
                for tile_rows in (None,) if name == "reference" else (shape.tile_rows, None):
                    tiles = "-" if name == "reference" else str(tile_rows or "untiled")
                    line = Comparison(name, dtype_name, tiles, shape.name, {}, budgets, None, False)
                    if name == "triton" and device == "cpu" and dtype == torch.bfloat16:
                        yield line._replace(reason="not compared: Triton's interpreter cuts bfloat16 off, unrounded")
                        continue
                    show_progress(f"{name} {dtype_name} {tiles} {shape.name}")
                    try:
                        found = errors(results(inputs, shape, name, dtype, device, tile_rows), exact)
                        over = not all(found[x] <= budgets[x] for x in QUANTITIES)
                        yield line._replace(errors=found, failed=over)
                    except Exception as error:
                        refusal = reason_of_refusal(error, name)
                        if refusal is not None:
                            yield line._replace(reason=f"not taken: {refusal}")
                            continue
                        if str(error) not in traced:
                            traceback.print_exc()
                        traced.add(str(error))
                        message = str(error).strip().partition("\n")[0]
                        yield line._replace(reason=f"failed: {type(error).__name__}: {message}", failed=True)


def show_progress(text: str) -> None:
    """The comparison at work, on a line that the next one overwrites; nothing where stderr is not a terminal."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text[:79]}", end="", file=sys.stderr, flush=True)


BACKEND, DTYPE, TILES = 9, 8, 7  # widths of columns
CELL = 13


def table_head(shape_width: int) -> str:
    start = [f"{'backend':{BACKEND}}", f"{'dtype':{DTYPE}}", f"{'tiles':{TILES}}", f"{'shape':{shape_width}}"]
    return "  ".join(start + [f"{name:>{CELL}}" for name in QUANTITIES])


def table_line(line: Comparison, shape_width: int) -> str:
    start = f"{line.backend:{BACKEND}}  {line.dtype:{DTYPE}}  {line.tiles:{TILES}}  {line.shape:{shape_width}}"
    if line.reason is not None:
        return f"{start}  {line.reason}"
    cells = []
    for name in QUANTITIES:
        cell = f"{short(line.errors[name])}/{short(line.budgets[name])}"
        cells.append(f"{cell:>{max(CELL, len(name))}}")
    over = [name for name in QUANTITIES if not line.errors[name] <= line.budgets[name]]
    return "  ".join([start, *cells, f"OVER: {', '.join(over)}" if over else "ok"])


def short(x: float) -> str:
    """1.2e-7 for 1.2e-07."""
    mantissa, _, exponent = f"{x:.1e}".partition("e")
    return f"{mantissa}e{int(exponent)}" if exponent else mantissa


def add_command(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "check",
        help="compare the backends that work here with the float64 reference",
        description="Compare the loss and the gradients of each backend that works here with the float64 reference.  "
        "Exit status: 1 when one is over its budget, 2 when a requested backend is not usable.",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    parser.add_argument(
        "--dtype", choices=DTYPES, action="append", help=f"repeatable; default: {', '.join(DEFAULT_DTYPES)}"
    )
    names = tuple(reversed(NAMES))
    parser.add_argument("--backend", choices=names, action="append", help="repeatable; default: all usable ones")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the table; returns the exit status."""
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        print("check: --device cuda: PyTorch finds no CUDA GPU on this machine", file=sys.stderr)
        return 2
    hardware = torch.cuda.get_device_name() if device == "cuda" else platform.machine()
    print(f"rnnt {rnnt.__version__}, torch {torch.__version__}, {device} ({hardware})\n")
    reasons = {name: unavailable(name, device) for name in reversed(NAMES)}
    for name, reason in reasons.items():
        print(f"{name:9}  {'usable' if reason is None else f'not usable: {reason}'}")

    wanted = options.backend or [name for name, reason in reasons.items() if reason is None]
    unusable = [name for name in wanted if reasons[name] is not None]
    for name in unusable:
        print(f"check: --backend {name}: not usable on {device}: {reasons[name]}", file=sys.stderr)
    if unusable:
        return 2

    shapes = GPU_SHAPES if device == "cuda" else INTERPRETER_SHAPES if "triton" in wanted else CPU_SHAPES
    print("\nerror/budget, each relative to the largest value of the float64 reference\n")
    width = max(len(shape.name) for shape in shapes)
    print(table_head(width), flush=True)
    compared, failed = 0, 0
    for line in compare(list(dict.fromkeys(wanted)), options.dtype or list(DEFAULT_DTYPES), device, shapes):
        show_progress("")
        print(table_line(line, width), flush=True)
        compared += bool(line.errors)
        failed += line.failed
    print(f"\n{compared} compared, {failed} over budget or failed")
    if compared + failed == 0:
        print("check: nothing could be compared", file=sys.stderr)
        return 2
    return 1 if failed else 0
