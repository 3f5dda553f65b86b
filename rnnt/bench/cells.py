"""Records as cells of a table: times in ms with their spread, sizes in MiB or GiB, shares of the floor.

A line is what one backend in one tiling did at one shape: its records by pass.
Before: measure.py.  After: command.py, picture.py, tests/benchmarks/table.py.
"""

from collections.abc import Iterable
from typing import Any

from rnnt.bench.measure import Record
from rnnt.bench.steps import PASSES
from rnnt.units import number, size

Line = dict[str, Record]

LINE_HEAD = ("backend", "tiles", *(f"{which}, ms" for which in PASSES), "peak", "both / floor")
NOTE = (
    "Median (interquartile range).  Shapes are B, T, U, V, H; floor: one / three GEMMs over the valid rows; "
    "both: forward and backward with the two projections; peak: above inputs, parameters and their gradients."
)


def caption(run: dict[str, Any]) -> str:
    """What the figures of a saved run depend on."""
    machine = run["machine_info"]
    count = machine["threads"]
    hardware = (
        machine.get("gpu")
        or f"{machine['cpu'].get('brand_raw', machine['machine'])}, {count} thread{'s' if count > 1 else ''}"
    )
    versions = [f"torch {machine['torch']}"] + ([f"Triton {machine['triton']}"] if machine.get("triton") else [])
    if "commit_info" in run:
        state = run["commit_info"]
        source = f"commit {state['id'][:10]}" + (" with changes" if state.get("dirty") else "")
    else:
        source = f"rnnt {machine['rnnt']}"
    return f"{hardware}, {', '.join(versions)}, {run['datetime'][:10]}, {source}"


def by_shape(records: Iterable[Record]) -> dict[str, list[Line]]:
    """Lines by their shape's cell, in the order of the records; of two records of one thing the later counts."""
    shapes: dict[str, dict[tuple[str, str], Line]] = {}
    for record in records:
        info = record["extra_info"]
        line = shapes.setdefault(shape_cell(info), {}).setdefault((info["backend"], info["tiles"]), {})
        line[info["pass"]] = record
    return {name: list(lines.values()) for name, lines in shapes.items()}


def time_cell(record: Record | None) -> str:
    """Median and interquartile range in ms."""
    if record is None:
        return ""
    if "stats" not in record:
        return "out of memory"
    return f"{number(1e3 * record['stats']['median'])} ({number(1e3 * record['stats']['iqr'])})"


def shape_cell(info: dict[str, Any]) -> str:
    sizes = info["sizes"]
    dtype = f"{info['dtype']} autocast" if info["autocast"] else info["dtype"]
    extras = [f"dropout {info['dropout_p']:g}"] if info["dropout_p"] else []
    scores, threshold = info.get("scores", 1), info.get("occupancy_threshold", "auto")
    extras += [f"scores x{scores:g}"] if scores != 1 else []
    extras += [f"threshold {threshold:g}"] if threshold != "auto" else []
    details = [", ".join(str(sizes[letter]) for letter in "BTUVH"), dtype, info["activation"], *extras]
    return f"{info['shape']}: {'; '.join(details)}"


def floor_cell(floors: dict[str, float]) -> str:
    """Of seconds by pass, those of the forward pass and of both, in ms."""
    found = [number(1e3 * floors[which]) if which in floors else "-" for which in ("forward", "both")]
    return f"{' / '.join(found)} ms"


def line_cells(line: Line) -> list[str]:
    """The cells of LINE_HEAD."""
    both = line.get("both") or next(iter(line.values()))
    info, measured = both["extra_info"], "stats" in both
    peak = size(info["peak_bytes"]) if measured else ""
    share = f"{both['stats']['median'] / info['floor_seconds']:.2f}" if measured and "both" in line else ""
    return [info["backend"], info["tiles"], *(time_cell(line.get(which)) for which in PASSES), peak, share]
