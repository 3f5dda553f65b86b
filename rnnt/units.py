"""Figures as people read them: three significant digits, bytes in MiB or GiB.

Before: nothing.  After: plan.py, bench/cells.py.
"""


def number(x: float) -> str:
    """Three significant digits."""
    return f"{x:#.3g}".rstrip(".") if x < 1000 else f"{x:.0f}"


def size(count: float) -> str:
    unit, scale = ("GiB", 2**30) if count >= 2**30 else ("MiB", 2**20)
    return f"{number(count / scale)} {unit}"
