"""`python -m rnnt bench`: what each backend costs here in time and memory, over shapes, tile sizes and frames.

Nothing is compared with the reference: that is `python -m rnnt check`.  The saved file is read by
`python -m tests.benchmarks.table` too.  Before: measure.py, cells.py.  After: picture.py.
"""

import argparse
import importlib.util
import json
import sys
import textwrap
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from rnnt.backends import NAMES
from rnnt.bench.cells import LINE_HEAD, NOTE, Line, caption, floor_cell, line_cells, shape_cell
from rnnt.bench.choices import chosen_settings, chosen_shapes, frame_sweep
from rnnt.bench.floor import gemm_floor
from rnnt.bench.machine import default_device, description
from rnnt.bench.measure import ROUNDS, describe, measure
from rnnt.bench.progress import Progress
from rnnt.bench.shapes import SHAPES, Shape
from rnnt.bench.steps import PASSES, Settings
from rnnt.check import DTYPES
from rnnt.problem import ACTIVATIONS
from rnnt.units import size

Run = dict[str, Any]

# Where a record is saved, by its outcome; pytest-benchmark's tools expect times in every one of "benchmarks".
LISTS = {"measured": "benchmarks", "out of memory": "out_of_memory", "refused": "refused", "failed": "failed"}
REASONS = {"refused": "not taken", "failed": "failed"}


def add_command(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "bench",
        help="time and peak memory of the backends on this machine",
        description="Time and peak memory of a training step's loss on this machine: backends x shapes x tile sizes, "
        "beside the GEMM floor.  Exit status: 1 when a backend failed (out of memory is a result), 2 when an option is "
        "wrong or nothing could be measured.",
    )
    add = parser.add_argument
    add("--backend", action="append", choices=tuple(reversed(NAMES)), help="repeatable; default: all usable ones")
    add("--shape", action="append", metavar="SHAPE",
        help=f"repeatable: {', '.join(SHAPES)}, or B,T,U,V,H; default: target on a GPU, else cpu")  # fmt: skip
    add("--tile-rows", action="append", metavar="ROWS",
        help="repeatable: a number, auto, or none (untiled); default: auto and none")  # fmt: skip
    add("--frames", metavar="T,T,...", help="measure the first shape at these numbers of frames too")
    add("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    add("--dtype", choices=DTYPES, help="instead of the shape's own, which for B,T,U,V,H is bfloat16")
    add("--activation", choices=ACTIVATIONS, default="relu", help="default: relu")
    add("--scores", type=float, default=1.0, metavar="N",
        help="the output layer's weights times N: a trained model's sharp posteriors; default: 1")  # fmt: skip
    add("--occupancy-threshold", default="auto", metavar="X", help="of the backward pass; default: auto")
    add("--graph", action="store_true",
        help="replay forward and backward from a CUDA graph (triton on a GPU; no other pass is measured)")  # fmt: skip
    add("--rounds", type=int, metavar="N", help="timed rounds; default: 20 on a GPU, else 5")
    add("--json", type=Path, metavar="FILE", help="save all figures, the hardware, the versions and the date")
    add("--picture", type=Path, metavar="FILE.png",
        help="draw time against memory, and with --frames both against T (needs matplotlib)")  # fmt: skip
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Measure, print, save; returns the exit status."""
    device = options.device or default_device()
    try:
        check_options(options, device)
        shapes = chosen_shapes(options.shape, options.dtype, device, options.scores)
        sweep = frame_sweep(shapes[0], options.frames)
        settings = chosen_settings(
            options.backend,
            options.tile_rows,
            device,
            options.activation,
            occupancy_threshold=options.occupancy_threshold,
            graph=options.graph,
        )
    except ValueError as error:
        print(f"bench: --{error}", file=sys.stderr)
        return 2

    found: Run = {
        "machine_info": description(device),
        "datetime": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "shapes": [shape.name for shape in shapes],
        "frames": [shape.name for shape in sweep],
        **{name: [] for name in LISTS.values()},
    }
    print(caption(found), flush=True)
    every = list(dict.fromkeys(shapes + sweep))
    interrupted = False
    try:
        measure_all(every, settings, device, options.rounds or ROUNDS[device], found)
    except KeyboardInterrupt:
        interrupted = True
        print("bench: interrupted; what was measured is kept", file=sys.stderr)
    print(f"\n{textwrap.fill(NOTE, 110)}")

    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
        print(f"saved {options.json}")
    if options.picture:
        from rnnt.bench.picture import draw

        draw(found, options.picture)
        print(f"drew {options.picture}")
    if interrupted:
        return 130
    if found["failed"]:
        return 1
    return 0 if found["benchmarks"] or found["out_of_memory"] else 2


def check_options(options: argparse.Namespace, device: str) -> None:
    """Raise ValueError where measuring would be in vain."""
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device cuda: PyTorch finds no CUDA GPU on this machine")
    if options.rounds is not None and options.rounds < 1:
        raise ValueError(f"rounds: expected a number of at least 1, got {options.rounds}")
    for name in ("json", "picture"):
        path = getattr(options, name)
        if path and (path.is_dir() or not path.absolute().parent.is_dir()):
            raise ValueError(f"{name}: expected a file in a folder that exists, got '{path}'")
    if options.picture and options.picture.suffix != ".png":
        raise ValueError(f"picture: expected a file name that ends in .png, got '{options.picture}'")
    if options.picture and importlib.util.find_spec("matplotlib") is None:
        raise ValueError("picture: the package matplotlib is not installed: pip install matplotlib")


def measure_all(shapes: list[Shape], settings: list[Settings], device: str, rounds: int, found: Run) -> None:
    """Measure every shape with all settings; each line is printed, and its records are in `found`, once it is done."""
    progress = Progress(len(shapes) * sum(len(setting.passes) for setting in settings))
    try:
        for shape in shapes:
            progress.start(f"{shape.name}: GEMM floor")
            progress.show(f"\n{shape_head(shape, settings[0], device)}\n\n{table_line(list(LINE_HEAD))}")
            for setting in settings:
                progress.start(f"{shape.name}: {setting.backend} {setting.tiles}".rstrip(" -"))
                line: Line = {}
                for record in measure(shape, setting, device, rounds):
                    info = record["extra_info"]
                    line[info["pass"]] = record
                    found[LISTS[info["outcome"]]].append(record)
                    progress.advance(1)
                progress.advance(len(setting.passes) - len(line))
                progress.show(line_text(line))
    finally:
        progress.close()


def shape_head(shape: Shape, settings: Settings, device: str) -> str:
    floor = floor_cell({which: gemm_floor(shape, device).seconds(which) for which in PASSES})
    return (
        f"{shape_cell(describe(shape, settings, device, 'both'))}\n"
        f"{shape.rows:,} valid rows, dense tensor {size(shape.dense_bytes)}, GEMM floor {floor}"
    )


def line_text(line: Line) -> str:
    info = list(line.values())[-1]["extra_info"]
    if info["outcome"] in REASONS:
        return f"{table_line([info['backend'], info['tiles']])}  {REASONS[info['outcome']]}: {info['reason']}"
    return table_line(line_cells(line)).rstrip()


def table_line(cells: list[str]) -> str:
    """Cells of LINE_HEAD, or the first of them, in columns: two of words, then figures."""
    widths = ("<10", "<14", ">16", ">16", ">16", ">11", ">12")
    return "  ".join(f"{cell:{width}}" for cell, width in zip(cells, widths, strict=False))
