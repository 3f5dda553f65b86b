"""A run as a picture: bars of step time and peak memory, of largest batch and throughput, one bar for each loss.

A row of panels for each data and batch size, and one for the largest batches; dashed lines are the step without joint
and loss.  Before: table.py.  After: nothing.
"""

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.measure import Record
from benchmarks.table import latest, title

GIB = 2**30
COLOURS = {"none": "black", "triton": "tab:green", "compiled": "tab:blue", "reference": "tab:gray"}
OTHERS = "tab:orange"  # the dense ones


def draw(run: dict[str, Any], path: Path) -> None:
    """Save the picture of a run as PNG."""
    groups = latest(run["records"])
    figure = Figure(figsize=(11, 0.8 + 2.6 * len(groups)), layout="constrained")  # without pyplot: no display is needed
    places = figure.subplots(len(groups), 2, squeeze=False)
    for (left, right), ((data, B), records) in zip(places, groups.items(), strict=True):
        if B is None:
            bars(left, records, f"{data}: largest batch", lambda x: x["batch"])
            bars(right, records, f"{data}: utterances/s at it", lambda x: x["utterances_per_second"])
        else:
            bars(left, records, f"{data}, {B} utterances: step, ms", lambda x: 1e3 * x["stats"]["median"])
            bars(right, records, f"{data}, {B} utterances: peak memory, GiB", lambda x: x["peak_bytes"] / GIB)
    figure.suptitle(title(run), fontsize=8)
    figure.savefig(path, dpi=120)


def bars(axes: Axes, records: dict[str, Record], label: str, figure_of: Any) -> None:
    """One for each loss from top to bottom; in place of one that was not measured, its outcome."""
    for name, record in records.items():
        measured = "stats" in record
        value = figure_of(record) if measured else 0
        drawn = axes.barh(name, value, color=COLOURS.get(name.removesuffix("-untiled"), OTHERS))
        axes.bar_label(drawn, [f"{value:.3g}" if measured else record["outcome"]], padding=3, fontsize=8)
    if "stats" in records.get("none", {}):
        axes.axvline(figure_of(records["none"]), color="black", linestyle="--", linewidth=1)
    axes.invert_yaxis()
    axes.margins(x=0.2)
    axes.set_title(label, fontsize=9)
