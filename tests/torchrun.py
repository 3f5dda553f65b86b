"""Modules on several processes, started as users start them: torchrun on this machine."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[1]


def torchrun(program: str | Path, *arguments: str | Path, ranks: int = 2, **environment: str) -> str:
    """`torchrun program arguments`, a module or a file; what it printed.  Fails when a process does."""
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += [str(program)] if isinstance(program, Path) else ["-m", program]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run(
        [sys.executable, *command, *map(str, arguments)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return done.stdout


def needs_gpus(device: str, count: int = 2) -> None:
    """Skip a test of so many GPUs where there are fewer."""
    if device == "cuda" and torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} GPUs")


def leave() -> None:
    """The last line of a process that used FSDP.

    DTensor's caches hold the process group after it is destroyed, and gloo's threads with it; an ordinary exit may then
    abort ("terminate called without an active exception").
    """
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)
