"""Saved benchmarks as a Markdown table: `python -m tests.benchmarks.table RUN.json ... [--readme README.md]`.

One table for each run's hardware and versions; of two measurements of one thing the later file's counts.  With
`--readme` the text between that file's markers is replaced: <!-- benchmarks: begin --> and <!-- benchmarks: end -->.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- benchmarks: begin -->", "<!-- benchmarks: end -->"
PASSES = ("forward", "backward", "both")
START = ("shape", "valid rows", "dense tensor", "GEMM floor", "backend", "tiles")
HEAD = (*START, *(f"{which}, ms" for which in PASSES), "peak", "both / floor")


def caption(run: dict[str, Any]) -> str:
    """What the figures of a saved run depend on."""
    machine = run["machine_info"]
    hardware = (
        machine.get("gpu") or f"{machine['cpu'].get('brand_raw', machine['machine'])}, {machine['threads']} threads"
    )
    commit = run["commit_info"]["id"][:10] + (" with changes" if run["commit_info"].get("dirty") else "")
    versions = [f"torch {machine['torch']}"] + ([f"Triton {machine['triton']}"] if machine.get("triton") else [])
    return f"{hardware}, {', '.join(versions)}, {run['datetime'][:10]}, commit {commit}"


def number(x: float) -> str:
    """Three significant digits."""
    return f"{x:#.3g}".rstrip(".") if x < 1000 else f"{x:.0f}"


def size(count: float) -> str:
    unit, scale = ("GiB", 2**30) if count >= 2**30 else ("MiB", 2**20)
    return f"{number(count / scale)} {unit}"


def time_cell(bench: dict[str, Any] | None) -> str:
    """Median and interquartile range in ms."""
    if bench is None:
        return ""
    if "stats" not in bench:
        return "out of memory"
    return f"{number(1e3 * bench['stats']['median'])} ({number(1e3 * bench['stats']['iqr'])})"


def shape_cell(info: dict[str, Any]) -> str:
    sizes = info["sizes"]
    dtype = f"{info['dtype']} autocast" if info["autocast"] else info["dtype"]
    extras = [f"dropout {info['dropout_p']:g}"] if info["dropout_p"] else []
    details = [", ".join(str(sizes[letter]) for letter in "BTUVH"), dtype, info["activation"], *extras]
    return f"{info['shape']}: {'; '.join(details)}"


def rows(benches: list[dict[str, Any]]) -> list[list[str]]:
    """The table's cells; what belongs to a shape stands in its first line alone."""
    shapes: dict[str, dict[tuple[str, str], dict[str, dict[str, Any]]]] = {}
    for bench in benches:
        info = bench["extra_info"]
        line = shapes.setdefault(shape_cell(info), {}).setdefault((info["backend"], info["tiles"]), {})
        line[info["pass"]] = bench
    table = []
    for name, lines in shapes.items():
        floors = {}
        for line in lines.values():
            floors |= {which: bench["extra_info"]["floor_seconds"] for which, bench in line.items()}
        first = next(iter(next(iter(lines.values())).values()))["extra_info"]
        floor = " / ".join(f"{number(1e3 * floors[which])}" for which in ("forward", "both") if which in floors)
        start = [name, f"{first['rows']:,}", size(first["dense_bytes"]), f"{floor} ms"]
        for (backend, tiles), line in lines.items():
            both = line.get("both") or next(iter(line.values()))
            info, measured = both["extra_info"], "stats" in both
            peak = size(info["peak_bytes"]) if measured else ""
            share = f"{both['stats']['median'] / info['floor_seconds']:.2f}" if measured and "both" in line else ""
            backend += "" if info["checked"] else " (not checked)"
            table.append([*start, backend, tiles, *(time_cell(line.get(which)) for which in PASSES), peak, share])
            start = [""] * len(start)
    return table


def render(runs: list[dict[str, Any]]) -> str:
    """Markdown of saved runs."""
    tables: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        tables.setdefault(caption(run), []).extend(run["benchmarks"] + run.get("out_of_memory", []))
    parts = []
    for title, benches in tables.items():
        lines = [HEAD, ["---"] * 3 + ["---:"] + ["---"] * 2 + ["---:"] * 5, *rows(benches)]
        parts.append(f"{title}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines))
    note = (
        "Median (interquartile range).  Shapes are B, T, U, V, H; floor: one / three GEMMs over the valid rows; "
        "both: forward and backward with the two projections; peak: above inputs, parameters and their gradients."
    )
    return "\n\n".join([*parts, note]) + "\n"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.table", description=__doc__.partition("\n")[0])
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN.json")
    parser.add_argument("--readme", type=Path, help="replace what stands between its markers")
    options = parser.parse_args(arguments)
    text = render([json.loads(path.read_text()) for path in options.runs])
    if options.readme is None:
        print(text, end="")
        return 0
    before, begin, rest = options.readme.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        print(f"{options.readme}: expected the markers {BEGIN} and {END}", file=sys.stderr)
        return 1
    options.readme.write_text(f"{before}{BEGIN}\n{text}{END}{after}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
