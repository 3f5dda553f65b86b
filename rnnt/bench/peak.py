"""Peak memory of a call above what was there before it.

On a GPU, from PyTorch's caching allocator.  On the CPU, from the allocations and frees that PyTorch's profiler records
(inputs are older than the recording, so they do not count; what a library allocates by itself is not seen).
Before: nothing.  After: measure.py.
"""

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

CPU = 0  # c10's DeviceType


def peak_bytes(call: Callable[[], object], device: str) -> int:
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's library logs every start and stop to stderr
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        call()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    changes = [event for event in events if event.get("name") == "[memory]" and event["args"]["Device Type"] == CPU]
    held = highest = 0
    for event in sorted(changes, key=lambda event: event["ts"]):
        held += event["args"]["Bytes"]
        highest = max(highest, held)
    return highest
