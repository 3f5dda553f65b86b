"""A training step on one GPU and on several: `torchrun --nproc-per-node 2 -m tests.benchmarks.scaling --json two.json`.

    efficiency = (utterances/s on N processes) / (N x utterances/s on one)

Model: a Transformer encoder over frames, an LSTM prediction network and RNNTJointLoss, with fused AdamW.  Each process
has a batch of its own of the size given (weak scaling), all with the same lengths, so that none waits for a longer one.
DDP: float32 parameters and bfloat16 autocast.  FSDP2: every layer and the loss a unit, bfloat16, float32 reductions.
`--dtype fp32`: float32 alone.  A step: forward, backward, update; the device is waited for before and after.  Its time
is that of the slowest process; peak memory is the largest of any process (PyTorch's on a GPU, the process's on a CPU).
`--baseline one.json`, saved by a run on one process, adds the efficiency.  Process 0 prints.
"""

import argparse
import datetime
import json
import os
import resource
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import rnnt
from rnnt.bench.machine import default_device, description, synchronize
from tests.torchrun import leave

SIZES = {
    "batch": (32, "utterances of a process"),
    "frames": (250, "encoder frames of the longest utterance"),
    "labels": (100, "its labels"),
    "classes": (1025, "vocabulary with blank"),
    "features": (512, "encoder width"),
    "layers": (17, "encoder layers"),
    "joint": (640, "joint width, and that of the LSTM"),
}


class Model(nn.Module):
    def __init__(self, sizes: dict[str, int], backend: str) -> None:
        super().__init__()
        features, joint, classes = sizes["features"], sizes["joint"], sizes["classes"]
        layer = nn.TransformerEncoderLayer(features, max(1, features // 64), 4 * features, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, sizes["layers"], enable_nested_tensor=False)
        self.embedding = nn.Embedding(classes, joint)
        self.predictor = nn.LSTM(joint, joint, batch_first=True)
        self.loss = rnnt.RNNTJointLoss(
            joint, classes, encoder_features=features, predictor_features=joint, activation="relu", backend=backend
        )

    def forward(self, frames: Tensor, targets: Tensor, encoder_lengths: Tensor, target_lengths: Tensor) -> Tensor:
        history = nn.functional.pad(targets, (1, 0), value=self.embedding.num_embeddings - 1)
        states, _ = self.predictor(self.embedding(history))
        loss: Tensor = self.loss(self.encoder(frames), states, targets, encoder_lengths, target_lengths)
        return loss


def batch_of(sizes: dict[str, int], device: str, seed: int) -> tuple[Tensor, ...]:
    """Random numbers; lengths from 60 to 100 % of the longest, the same for every seed, and on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    count, frames, labels = sizes["batch"], sizes["frames"], sizes["labels"]
    share = torch.linspace(0.6, 1.0, count) if count > 1 else torch.ones(1)
    numbers = torch.randn(count, frames, sizes["features"], generator=generator)
    targets = torch.randint(sizes["classes"] - 1, (count, labels), generator=generator)
    return numbers.to(device), targets.to(device), (share * frames).long().clamp(min=1), (share * labels).long()


def spread(model: Model, wrap: str, dtype: str, device: str) -> nn.Module:
    """The model under DDP, or sharded by FSDP2."""
    if wrap == "ddp":
        return DistributedDataParallel(model, gradient_as_bucket_view=True)
    options: dict[str, Any] = {"mesh": init_device_mesh(device, (dist.get_world_size(),))}
    if dtype == "bf16":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for part in (*model.encoder.layers, model.loss, model):
        fully_shard(part, **options)
    return model


def measure(options: argparse.Namespace, sizes: dict[str, int]) -> dict[str, Any]:
    """Times of all steps and the peak memory, the largest of any process."""
    device = options.device
    torch.manual_seed(0)
    model = Model(sizes, options.backend).to(device)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    spread_model = spread(model, options.wrap, options.dtype, device)
    optimizer = torch.optim.AdamW(spread_model.parameters(), 1e-4, fused=True)
    batch = batch_of(sizes, device, dist.get_rank())
    autocast = options.dtype == "bf16" and options.wrap == "ddp"

    def step() -> None:
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            loss = spread_model(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(options.warmup):
        step()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(options.steps):
        synchronize(device)
        started = time.perf_counter()
        step()
        synchronize(device)
        seconds.append(time.perf_counter() - started)
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else process_peak_bytes()
    worst = torch.tensor([*seconds, peak], dtype=torch.float64, device=device)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    *seconds, peak = worst.tolist()
    return {"parameters": parameters, "seconds": seconds, "peak_bytes": int(peak)}


def process_peak_bytes() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    if "LOCAL_RANK" not in os.environ:
        sys.exit("error: expected to be started by torchrun --nproc-per-node N -m tests.benchmarks.scaling")
    try:
        baseline = json.loads(options.baseline.read_text()) if options.baseline else None
        if options.json:
            options.json.touch()
        if options.steps < 2:
            raise ValueError(f"--steps: expected a number >= 2, got {options.steps}")
        if options.device == "cuda" and torch.cuda.device_count() < int(os.environ["LOCAL_WORLD_SIZE"]):
            raise ValueError(f"--device: expected a GPU for each process, found {torch.cuda.device_count()}")
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    if options.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
    sizes = {name: getattr(options, name) for name in SIZES}
    found = measure(options, sizes)
    processes = dist.get_world_size()
    median = statistics.median(found["seconds"])
    found = {
        "processes": processes,
        "wrap": options.wrap,
        "backend": options.backend,
        "dtype": options.dtype,
        "sizes": sizes,
        "utterances_per_second": processes * sizes["batch"] / median,
        "median_seconds": median,
        **found,
        "machine_info": description(options.device),
        "datetime": datetime.datetime.now(datetime.timezone.utc).isoformat(),
    }
    if dist.get_rank() == 0:
        print(line(found, baseline))
        if options.json:
            options.json.write_text(json.dumps(found, indent=1))
    leave()


def line(found: dict[str, Any], baseline: dict[str, Any] | None) -> str:
    """One line on a run; with the efficiency where there is a run on one process to compare with."""
    first, _, last = statistics.quantiles(found["seconds"], n=4)
    text = (
        f"{found['processes']} x {found['sizes']['batch']} utterances, {found['wrap']}, {found['backend']}, "
        f"{found['dtype']}, {found['parameters'] / 1e6:.1f} M parameters: "
        f"{found['utterances_per_second']:.1f} utterances/s, {1000 * found['median_seconds']:.1f} ms a step "
        f"({1000 * (last - first):.1f}), peak {found['peak_bytes'] / 2**20:.0f} MiB"
    )
    if baseline is None:
        return text
    for name in ("wrap", "backend", "dtype", "sizes"):
        if baseline[name] != found[name]:
            sys.exit(f"error: --baseline: expected {name} = {found[name]}, got {baseline[name]}")
    speed = found["utterances_per_second"] / (baseline["utterances_per_second"] / baseline["processes"])
    return f"{text}; {speed:.2f} times one process, efficiency {speed / found['processes']:.0%}"


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="torchrun --nproc-per-node N -m tests.benchmarks.scaling")
    add = made.add_argument
    for name, (size, text) in SIZES.items():
        add(f"--{name}", type=int, default=size, help=f"{text} ({size})")
    add("--wrap", choices=("ddp", "fsdp"), default="ddp")
    add("--backend", choices=("auto", *rnnt.backends()), default="auto")
    add("--dtype", choices=("fp32", "bf16"), default="bf16")
    add("--device", choices=("cpu", "cuda"), default=default_device())
    add("--warmup", type=int, default=5, help="steps before the first that counts (5)")
    add("--steps", type=int, default=20, help="steps that count, at least 2 (20)")
    add("--json", type=Path, help="file to save the run to")
    add("--baseline", type=Path, help="a saved run on one process")
    return made


if __name__ == "__main__":
    main()
