"""The device that is measured: waiting for it, its memory, and what its figures depend on.

Before: nothing.  After: everything else in this folder.
"""

import gc
import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

import torch

import rnnt

# What errors say that no class of their own tells from others: the CPU's allocator, the driver, cuBLAS.
OUT_OF_MEMORY = ("DefaultCPUAllocator", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def release_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(x in str(error) for x in OUT_OF_MEMORY)


def versions(device: str) -> dict[str, Any]:
    """Versions, threads, and the GPU when that is the device."""
    found: dict[str, Any] = {
        "torch": torch.__version__,
        "triton": version_of("triton"),
        "rnnt": rnnt.__version__,
        "threads": torch.get_num_threads(),
    }
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found |= {"gpu": properties.name, "gpu_bytes": properties.total_memory, "cuda": torch.version.cuda}
    return found


def version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def description(device: str) -> dict[str, Any]:
    """The machine under the names that pytest-benchmark gives it; not whose machine it is."""
    return {
        "machine": platform.machine(),
        "system": platform.system(),
        "python_version": platform.python_version(),
        "cpu": {"brand_raw": cpu_name(), "count": os.cpu_count()},
        **versions(device),
    }


def cpu_name() -> str:
    """The model where Linux tells it, else the architecture."""
    cpus = Path("/proc/cpuinfo")
    lines = cpus.read_text().splitlines() if cpus.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()
