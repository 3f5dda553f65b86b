"""Checkpoints: what a run needs to continue, or a recogniser to work, in one file of tensors and plain values.

Before: trainer.py gives the state.  After: train.py continues from it, decode.py recognises with it.
"""

import pickle
from pathlib import Path
from typing import Any

import torch


def write(state: dict[str, Any], path: Path) -> None:
    """Save a trainer's state; an interruption leaves the file that was there whole."""
    scratch = path.with_suffix(".tmp")
    torch.save(state, scratch)
    scratch.replace(path)


def read(path: Path) -> dict[str, Any]:
    """A trainer's state, on the CPU.  Raises `ValueError` where there is none, and for another kind of file."""
    if not path.is_file():
        raise ValueError(f"--resume {path}: expected a run's last.pt, got {'a folder' if path.is_dir() else 'no file'}")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
        raise ValueError(f"{path}: expected a checkpoint of this example, got a file that does not load") from error
    if not isinstance(state, dict) or "fingerprint" not in state:
        raise ValueError(f"{path}: expected a checkpoint of this example, got something else")
    return state
