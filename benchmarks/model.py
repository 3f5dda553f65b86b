"""`python -m benchmarks.model`: the training step of a FastConformer transducer with each loss, on this machine.

Before: measure.py, table.py.  After: picture.py.
"""

import argparse
import importlib.util
import json
import os
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from benchmarks.data import DATA
from benchmarks.losses import LOSSES, reason_against
from benchmarks.measure import Record, measure, measure_largest
from benchmarks.network import FULL, TINY
from benchmarks.table import outcome_cell, render
from benchmarks.training import Setup
from rnnt.bench.cells import time_cell
from rnnt.bench.machine import default_device, description, version_of
from rnnt.bench.progress import Progress
from rnnt.units import number, size

ROUNDS = {"cuda": 12, "cpu": 3}


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.model",
        description="Time and peak memory of the training step of a 114 M FastConformer transducer, with each loss and "
        "without one.  Exit status: 1 when a loss failed (out of memory is a result), 2 when an option is wrong.",
    )
    add = parser.add_argument
    add("--losses", nargs="+", choices=LOSSES, metavar="LOSS",
        help=f"{', '.join(LOSSES)}; default: all that are usable here")  # fmt: skip
    add("--data", nargs="+", choices=DATA, default=list(DATA), help="default: both")
    add("--batch", nargs="+", type=int, metavar="B", help="utterances a step; default: 64, with --tiny 4")
    add("--batches", type=int, default=3, metavar="N", help="random batches, taken in turn; default: 3")
    add("--rounds", type=int, metavar="N", help="timed steps; default: 12 on a GPU, else 3")
    add("--largest", action="store_true", help="find the largest batch too, from the first --batch on, and its speed")
    add("--only-largest", action="store_true", help="the same, and nothing else")
    add("--memory-limit", type=float, metavar="GIB", help="of the GPU's memory, use this much")
    add("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    add("--dtype", choices=("bfloat16", "float32"),
        help="of autocast, float32: none; default: bfloat16 on a GPU, else float32")  # fmt: skip
    add(
        "--tiny", action="store_true", help="a model of a few thousand parameters and a tenth of the lengths, for tests"
    )
    add("--no-validate", action="store_true", help="RNNTJointLoss with validate=False: it never waits for the device")
    add("--seed", type=int, default=0)
    add("--json", type=Path, metavar="FILE", help="save all figures, the hardware, the versions and the date")
    add("--picture", type=Path, metavar="FILE.png", help="draw time and memory (needs matplotlib)")
    options = parser.parse_args(arguments)
    options.device = options.device or default_device()
    options.dtype = options.dtype or ("bfloat16" if options.device == "cuda" else "float32")
    options.batch = options.batch or [4 if options.tiny else 64]
    options.rounds = options.rounds or ROUNDS[options.device]
    options.largest = options.largest or options.only_largest
    try:
        check(options)
    except ValueError as error:
        parser.error(str(error))
    return options


def check(options: argparse.Namespace) -> None:
    """Raise ValueError where measuring would be in vain; without --losses, choose those that are usable."""
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: PyTorch finds no CUDA GPU on this machine")
    reasons = {name: reason_against(name, options.device) for name in LOSSES}
    for name in options.losses or []:
        if reasons[name]:
            raise ValueError(f"--losses {name}: not usable on {options.device}: {reasons[name]}")
    options.losses = options.losses or [name for name, reason in reasons.items() if reason is None]
    for name in ("batch", "batches", "rounds"):
        given = getattr(options, name)
        if min(given if isinstance(given, list) else [given]) < 1:
            raise ValueError(f"--{name}: expected numbers of at least 1, got {given}")
    if options.device != "cuda" and (options.largest or options.memory_limit):
        raise ValueError("--largest, --memory-limit: expected --device cuda, whose memory has an end that is an error")
    if options.memory_limit:
        room = torch.cuda.get_device_properties(0).total_memory / 2**30
        if not 0 < options.memory_limit <= room:
            raise ValueError(f"--memory-limit: expected at most {room:.1f} GiB, got {options.memory_limit:g}")
    for path in filter(None, (options.json, options.picture)):
        if path.is_dir() or not path.absolute().parent.is_dir():
            raise ValueError(f"expected a file in a folder that exists, got '{path}'")
    if options.picture and options.picture.suffix != ".png":
        raise ValueError(f"--picture: expected a file name that ends in .png, got '{options.picture}'")
    if options.picture and importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--picture: the package matplotlib is not installed: pip install matplotlib")


def main(arguments: list[str] | None = None) -> int:
    """Measure, save, print; returns the exit status."""
    options = parse(arguments)
    if options.memory_limit:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(options.memory_limit * 2**30 / total)
    setup = Setup(
        options.device,
        options.dtype,
        TINY if options.tiny else FULL,
        options.batches,
        options.seed,
        validate=not options.no_validate,
    )
    run = describe(options)
    interrupted = False
    try:
        measure_all(options, setup, run)
    except KeyboardInterrupt:
        interrupted = True
        print("interrupted; what was measured is kept", file=sys.stderr)
    if options.picture and run["records"]:
        from benchmarks.picture import draw

        draw(run, options.picture)
        print(f"drew {options.picture}")
    print(f"\n{render([run])}", end="")
    if interrupted:
        return 130
    return 1 if any(record["outcome"] == "failed" for record in run["records"]) else 0


def describe(options: argparse.Namespace) -> dict[str, Any]:
    """What a run is of; RNNT_COMMIT names the commit."""
    commit = os.environ.get("RNNT_COMMIT")
    return {
        "machine_info": description(options.device),
        "packages": {name: version_of(name) for name in ("transformers", "torchaudio")},
        "datetime": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        **({"commit_info": {"id": commit}} if commit else {}),
        "model": "tiny" if options.tiny else "FastConformer",
        "parameters": None,
        "dtype": options.dtype,
        "batches": options.batches,
        "seed": options.seed,
        "validate": not options.no_validate,
        "memory_limit": options.memory_limit,
        "records": [],
    }


def measure_all(options: argparse.Namespace, setup: Setup, run: dict[str, Any]) -> None:
    """Each record is printed, and in the file, once it is there."""
    sizes = [] if options.only_largest else options.batch
    cases = [(data, B, name) for data in options.data for B in sizes for name in options.losses]
    cases += [(data, None, name) for data in options.data for name in options.losses if options.largest]
    progress = Progress(len(cases))
    try:
        for data, B, name in cases:
            progress.start(f"{data}, {B or 'largest batch'}: {name}")
            if B is None:
                record = measure_largest(name, data, setup, options.rounds, options.batch[0])
            else:
                record = measure(name, data, B, setup, options.rounds)
            run["records"].append(record)
            run["parameters"] = run["parameters"] or record.get("parameters")
            if options.json:
                options.json.write_text(json.dumps(run, indent=1) + "\n")
            progress.advance(1)
            progress.show(line(record))
    finally:
        progress.close()


def line(record: Record) -> str:
    start = f"{record['data']}, {record.get('batch', 'largest batch')}: {record['loss']}"
    if "stats" not in record:
        return f"{start}: {outcome_cell(record)}"
    rate = record.get("utterances_per_second")
    speed = f", {number(rate)} utterances/s" if rate else ""
    return f"{start}: {time_cell(record)} ms, {size(record['peak_bytes'])}{speed}, loss {record['loss_value']:.4g}"


if __name__ == "__main__":
    sys.exit(main())
