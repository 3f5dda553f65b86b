"""What is measured, from the words of a command line: shapes, and backends with their tile sizes.

Each ValueError begins with the option's name, to which callers put their own prefix.
Before: shapes.py, steps.py.  After: command.py, tests/benchmarks/conftest.py.
"""

import math
from dataclasses import replace

from rnnt.backends import NAMES, unavailable
from rnnt.bench.shapes import Shape, parse
from rnnt.bench.steps import Settings

CAPTURABLE = ("triton",)  # backends whose step never waits for the device


def chosen_shapes(names: list[str] | None, dtype: str | None, device: str, scores: float = 1.0) -> list[Shape]:
    """Shapes by their names or sizes, without repetition; None: the default of the device."""
    try:
        found = [parse(name) for name in names or ["target" if device == "cuda" else "cpu"]]
    except ValueError as error:
        raise ValueError(f"shape: {error}") from None
    if not 0 < scores < math.inf:
        raise ValueError(f"scores: expected a number above 0, got {scores:g}")
    found = [replace(shape.in_dtype(dtype or shape.dtype), scores=scores) for shape in found]
    return list(dict.fromkeys(found))


def chosen_settings(
    backends: list[str] | None,
    tile_rows: list[str] | None,
    device: str,
    activation: str,
    dropout_p: float = 0.0,
    validate: bool = True,
    occupancy_threshold: str = "auto",
    graph: bool = False,
) -> list[Settings]:
    """Every backend in every tiling (the reference has none); None: all that are usable, and "auto" and "none"."""
    if graph and device != "cuda":
        raise ValueError(f"graph: a step can only be captured on a CUDA GPU, not on {device}")
    reasons = {name: unavailable(name, device) for name in reversed(NAMES)}
    backends = backends or (list(CAPTURABLE) if graph else None)
    for name in backends or []:
        if reasons[name] is not None:
            raise ValueError(f"backend {name}: not usable on {device}: {reasons[name]}")
        if graph and name not in CAPTURABLE:
            raise ValueError(
                f"graph: the step of backend {name} cannot be captured, only that of {', '.join(CAPTURABLE)}"
            )
    tilings = [parse_tile_rows(text) for text in tile_rows or ["auto", "none"]]
    threshold = parse_threshold(occupancy_threshold)
    settings = [
        Settings(name, rows, activation, dropout_p, validate and not graph, threshold, graph)
        for name in backends or [name for name, reason in reasons.items() if reason is None]
        for rows in ([None] if name == "reference" else tilings)
    ]
    return list(dict.fromkeys(settings))


def parse_tile_rows(text: str) -> int | str | None:
    if text not in ("auto", "none") and not (text.isdecimal() and int(text) > 0):
        raise ValueError(f"tile-rows: expected a number of at least 1, auto or none, got {text!r}")
    return {"auto": "auto", "none": None}[text] if text in ("auto", "none") else int(text)


def parse_threshold(text: str) -> float | str:
    if text == "auto":
        return text
    try:
        threshold = float(text)
    except ValueError:
        threshold = math.nan
    if not 0 <= threshold < 1:
        raise ValueError(f"occupancy-threshold: expected a number in [0, 1) or auto, got {text!r}")
    return threshold


def frame_sweep(shape: Shape, text: str | None) -> list[Shape]:
    """The shape at each number of frames of a list like "100,200,400", ascending; None: no sweep."""
    if text is None:
        return []
    sizes = text.split(",")
    if not all(size.isdecimal() and int(size) > 0 for size in sizes):
        raise ValueError(f"frames: expected numbers of frames like 100,200,400, got {text!r}")
    return [shape.with_frames(T) for T in sorted({int(size) for size in sizes})]
