"""Saved benchmarks as a Markdown table: `python -m tests.benchmarks.table RUN.json ... [--readme README.md]`.

One table for each run's hardware and versions; of two measurements of one thing the later file's counts.  With
`--readme` the text between that file's markers is replaced: <!-- benchmarks: begin --> and <!-- benchmarks: end -->.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from rnnt.bench.cells import LINE_HEAD, NOTE, by_shape, caption, floor_cell, line_cells
from rnnt.units import size

BEGIN, END = "<!-- benchmarks: begin -->", "<!-- benchmarks: end -->"
START = ("shape", "valid rows", "dense tensor", "GEMM floor")


def rows(records: list[dict[str, Any]]) -> list[list[str]]:
    """The table's cells; what belongs to a shape stands in its first line alone."""
    table = []
    for name, lines in by_shape(records).items():
        infos = [record["extra_info"] for line in lines for record in line.values()]
        floors = {info["pass"]: info["floor_seconds"] for info in infos}
        start = [name, f"{infos[0]['rows']:,}", size(infos[0]["dense_bytes"]), floor_cell(floors)]
        for line in lines:
            backend, *cells = line_cells(line)
            checked = (line.get("both") or next(iter(line.values())))["extra_info"]["checked"]
            table.append([*start, backend + ("" if checked else " (not checked)"), *cells])
            start = [""] * len(start)
    return table


def render(runs: list[dict[str, Any]]) -> str:
    """Markdown of saved runs."""
    tables: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        tables.setdefault(caption(run), []).extend(run["benchmarks"] + run.get("out_of_memory", []))
    parts = []
    for title, benches in tables.items():
        lines = [(*START, *LINE_HEAD), ["---"] * 3 + ["---:"] + ["---"] * 2 + ["---:"] * 5, *rows(benches)]
        parts.append(f"{title}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines))
    return "\n\n".join([*parts, NOTE]) + "\n"


def insert(document: Path, text: str) -> bool:
    """Replace what stands between a document's markers; False, with a message: it has none."""
    before, begin, rest = document.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        print(f"{document}: expected the markers {BEGIN} and {END}", file=sys.stderr)
        return False
    document.write_text(f"{before}{BEGIN}\n{text}{END}{after}")
    return True


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.table", description=__doc__.partition("\n")[0])
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN.json")
    parser.add_argument("--readme", type=Path, help="replace what stands between its markers")
    options = parser.parse_args(arguments)
    text = render([json.loads(path.read_text()) for path in options.runs])
    if options.readme is None:
        print(text, end="")
        return 0
    return 0 if insert(options.readme, text) else 1


if __name__ == "__main__":
    sys.exit(main())
