"""How far a run is, on stderr: tqdm's bar where that is installed and stderr is a terminal, else plain lines.

Before: nothing.  After: command.py.
"""

import sys


class Progress:
    """Counts of measurements; `start` names what is at work, `advance` counts what is done."""

    def __init__(self, total: int) -> None:
        self.total, self.done = total, 0
        try:
            from tqdm import tqdm
        except ImportError:
            self.bar = None
        else:
            self.bar = tqdm(total=total, leave=False, dynamic_ncols=True) if sys.stderr.isatty() else None

    def start(self, text: str) -> None:
        if self.bar is None:
            print(f"{self.done}/{self.total}  {text}", file=sys.stderr, flush=True)
        else:
            self.bar.set_description_str(text)

    def advance(self, count: int) -> None:
        self.done += count
        if self.bar is not None:
            self.bar.update(count)

    def show(self, text: str) -> None:
        """A line on stdout, above the bar."""
        if self.bar is not None:
            self.bar.clear()
        print(text, flush=True)
        if self.bar is not None:
            self.bar.refresh()

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()
