"""A run as a picture: time against memory over tile sizes at each shape, and both against T where T was swept.

Time is that of forward and backward with the two projections.  Colours are backends; dashed lines are the GEMM floor
and the size of the dense tensor.  Before: measure.py, cells.py.  After: nothing.
"""

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from rnnt.bench.cells import caption, shape_cell
from rnnt.bench.measure import Record

COLOURS = {"reference": "tab:gray", "compiled": "tab:blue", "triton": "tab:green"}
MARKERS = "osD^v*Px"
MIB = 2**20


def draw(run: dict[str, Any], path: Path) -> None:
    """Save the picture of a run of `python -m rnnt bench` as PNG."""
    both = [x for x in run["benchmarks"] + run["out_of_memory"] if x["extra_info"]["pass"] == "both"]
    panels = len(run["shapes"]) + (2 if run["frames"] else 0)
    columns = min(panels, 3)
    rows = -(-panels // columns)
    figure = Figure(figsize=(5.5 * columns, 5 * rows), layout="constrained")  # without pyplot: no display is needed
    places = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes in places[panels:]:
        axes.remove()
    for axes, name in zip(places, run["shapes"], strict=False):
        draw_trade(axes, name, [x for x in both if x["extra_info"]["shape"] == name])
    if run["frames"]:
        swept = [x for x in both if x["extra_info"]["shape"] in run["frames"]]
        draw_sweep(places[panels - 2], places[panels - 1], swept)
    figure.suptitle(caption(run), fontsize=8)
    figure.savefig(path, dpi=120)


def draw_trade(axes: Axes, name: str, records: list[Record]) -> None:
    """Each backend's tile sizes as points, joined from the least memory to the most."""
    infos = [record["extra_info"] for record in records]
    for backend in dict.fromkeys(info["backend"] for info in infos):
        points = sorted(
            (memory(record), milliseconds(record), record["extra_info"]["tiles"])
            for record in records
            if record["extra_info"]["backend"] == backend and "stats" in record
        )
        axes.plot([x for x, _, _ in points], [y for _, y, _ in points], "o-", color=COLOURS[backend], label=backend)
        for x, y, tiles in points:
            axes.annotate(tiles.strip("-"), (x, y), xytext=(5, 5), textcoords="offset points", fontsize=8)
    for info in infos[:1]:
        axes.axhline(1e3 * info["floor_seconds"], color="black", linestyle="--", linewidth=1, label="GEMM floor")
        axes.axvline(info["dense_bytes"] / MIB, color="tab:red", linestyle="--", linewidth=1, label="dense tensor")
        axes.legend(fontsize=8)
    lost = [f"{x['backend']} {x['tiles']}".rstrip(" -") for x in infos if x["outcome"] == "out of memory"]
    title = shape_cell(infos[0]) if infos else f"{name}: nothing measured"
    axes.set_title(title + (f"\nout of memory: {', '.join(lost)}" if lost else ""), fontsize=9)
    axes.set(xlabel="peak memory, MiB", ylabel="forward and backward, ms", xscale="log", yscale="log")
    plain_numbers(axes.xaxis)
    plain_numbers(axes.yaxis)


def draw_sweep(time_axes: Axes, memory_axes: Axes, records: list[Record]) -> None:
    """A line over T for each backend and tiling; where it ran out of memory, the legend says."""
    records = sorted(records, key=frames)
    infos = [record["extra_info"] for record in records]
    kinds = dict.fromkeys((info["backend"], info["tiles"]) for info in infos)
    for i, (backend, tiles) in enumerate(kinds):
        mine = [x for x in records if (x["extra_info"]["backend"], x["extra_info"]["tiles"]) == (backend, tiles)]
        measured = [record for record in mine if "stats" in record]
        lost = [frames(record) for record in mine if "stats" not in record]
        label = f"{backend} {tiles}".rstrip(" -") + (f" (out of memory at {min(lost)})" if lost else "")
        T = [frames(record) for record in measured]
        for axes, figure_of in ((time_axes, milliseconds), (memory_axes, memory)):
            y = [figure_of(record) for record in measured]
            axes.plot(T, y, marker=MARKERS[i % len(MARKERS)], color=COLOURS[backend], label=label)
    T = [frames(record) for record in records]
    floor, dense = [1e3 * info["floor_seconds"] for info in infos], [info["dense_bytes"] / MIB for info in infos]
    time_axes.plot(T, floor, "--", color="black", linewidth=1, label="GEMM floor")
    memory_axes.plot(T, dense, "--", color="tab:red", linewidth=1, label="dense tensor")
    for axes, label in ((time_axes, "forward and backward, ms"), (memory_axes, "peak memory, MiB")):
        axes.set(xlabel="T, frames", ylabel=label, xscale="log", yscale="log")
        plain_numbers(axes.yaxis)
        axes.set_xticks(sorted(set(T)), [str(x) for x in sorted(set(T))])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.legend(fontsize=8)


def milliseconds(record: Record) -> float:
    return 1e3 * float(record["stats"]["median"])


def memory(record: Record) -> float:
    return float(record["extra_info"]["peak_bytes"]) / MIB


def frames(record: Record) -> int:
    return int(record["extra_info"]["sizes"]["T"])


def plain_numbers(axis: Axis) -> None:
    """0.2, 20 and 500 on a logarithmic axis, not powers of ten."""
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_locator(NullLocator())
