"""Saved runs of `python -m benchmarks.model` as Markdown: `python -m benchmarks.table RUN.json ...`.

Two tables for each run's hardware and versions: the step at given batch sizes, and the largest batches.  Of two
measurements of one thing the later file's counts.  With `--document FILE.md` the text between that
file's markers is replaced: <!-- benchmarks: begin --> and <!-- benchmarks: end -->.

Before: measure.py.  After: docs/models.md.
"""

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.measure import Record
from rnnt.bench.cells import caption, floor_cell, time_cell
from rnnt.units import number, size
from tests.benchmarks.table import insert

Run = dict[str, Any]

STEP_HEAD = ("data, batch", "loss", "step, ms", "over none, ms", "over none", "over none / floor", "peak", "over none")
LARGEST_HEAD = ("data", "loss", "largest batch", "step, ms", "peak", "utterances/s", "of none")
NOTE = (
    "Median (interquartile range) of whole training steps.  none: the step without joint network and loss; floor: one "
    "/ three products of the output layer over the valid rows; peak: all that PyTorch has allocated at once, "
    "parameters and AdamW's moments included."
)


def title(run: Run) -> str:
    """What all figures of a run depend on."""
    packages, parameters = run["packages"], run["parameters"] or 0
    found = [f"{name} {packages[name]}" for name in ("transformers", "torchaudio") if packages.get(name)]
    parts = [
        caption(run),
        *found,
        f"{parameters / 1e6:.1f} M parameters" if parameters >= 1e6 else f"{parameters} parameters",
    ]
    parts += [run["dtype"] + (" autocast" if run["dtype"] != "float32" else "")]
    parts += [] if run["validate"] else ["validate=False"]
    parts += [f"memory limited to {run['memory_limit']:g} GiB"] if run["memory_limit"] else []
    return ", ".join(parts)


def latest(records: Iterable[Record]) -> dict[tuple[Any, ...], dict[str, Record]]:
    """Records by data and batch size (None: the largest that fits), and then by loss."""
    groups: dict[tuple[Any, ...], dict[str, Record]] = {}
    for record in records:
        group = None if "tried" in record else record["batch"]
        groups.setdefault((record["data"], group), {})[record["loss"]] = record
    return groups


def step_rows(groups: dict[tuple[Any, ...], dict[str, Record]]) -> list[list[str]]:
    rows = []
    for (data, B), records in groups.items():
        if B is None:
            continue
        start = group_cell(data, B, records.values())
        for name, record in records.items():
            rows.append([start, name, *step_cells(record, records.get("none", {}))])
            start = ""
    return rows


def group_cell(data: str, B: int, records: Iterable[Record]) -> str:
    for record in records:
        if "rows" in record:
            sizes = f"{record['frames']} frames, {record['labels']} labels, {record['rows']:,} valid rows"
            return f"{data}, {B}: {sizes}; floor {floor_cell(record['floor_seconds'])}"
    return f"{data}, {B}"


def step_cells(record: Record, none: Record) -> list[str]:
    """The cells of STEP_HEAD after the loss."""
    if "stats" not in record:
        return [outcome_cell(record)] + [""] * 5
    median, peak = record["stats"]["median"], size(record["peak_bytes"])
    if "stats" not in none or record["loss"] == "none":
        return [time_cell(record), "", "", "", peak, ""]
    extra = median - none["stats"]["median"]
    return [
        time_cell(record),
        signed(1e3 * extra),
        share(median, none["stats"]["median"]),
        f"{extra / record['floor_seconds']['both']:.2f}",
        peak,
        share(record["peak_bytes"], none["peak_bytes"]),
    ]


def largest_rows(groups: dict[tuple[Any, ...], dict[str, Record]]) -> list[list[str]]:
    rows = []
    for (data, B), records in groups.items():
        if B is not None:
            continue
        none = records.get("none", {}).get("utterances_per_second")
        start = data
        for name, record in records.items():
            cells = [outcome_cell(record)] + [""] * 4
            if "stats" in record:
                rate = record["utterances_per_second"]
                of_none = f"{100 * rate / none:.0f} %" if none else ""
                batch = f"{record['batch']}" + (f" ({record['stopped_by']})" if record["stopped_by"] else "")
                cells = [batch, time_cell(record), size(record["peak_bytes"]), number(rate), of_none]
            rows.append([start, name, *cells])
            start = ""
    return rows


def outcome_cell(record: Record) -> str:
    return record["outcome"] + (f": {record['reason']}" if "reason" in record else "")


def signed(x: float) -> str:
    return f"{'-' if x < 0 else '+'}{number(abs(x))}"


def share(x: float, of: float) -> str:
    return f"{100 * (x / of - 1):+.1f} %"


def render(runs: list[Run]) -> str:
    """Markdown of saved runs."""
    together: dict[str, list[Record]] = {}
    for run in runs:
        together.setdefault(title(run), []).extend(run["records"])
    parts = []
    for head, records in together.items():
        groups = latest(records)
        parts.append(head)
        for columns, rows in ((STEP_HEAD, step_rows(groups)), (LARGEST_HEAD, largest_rows(groups))):
            if rows:
                lines = [columns, ["---"] * 2 + ["---:"] * (len(columns) - 2), *rows]
                parts.append("\n".join(f"| {' | '.join(line)} |" for line in lines))
    return "\n\n".join([*parts, NOTE]) + "\n"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.table", description=__doc__.partition("\n")[0])
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN.json")
    parser.add_argument("--document", type=Path, help="replace what stands between its markers")
    options = parser.parse_args(arguments)
    text = render([json.loads(path.read_text()) for path in options.runs])
    if options.document is None:
        print(text, end="")
        return 0
    return 0 if insert(options.document, text) else 1


if __name__ == "__main__":
    sys.exit(main())
