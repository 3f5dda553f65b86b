"""Peak memory above the inputs and their gradients: a tile and one gradient of the output layer, never [rows, V]."""

import pytest
import torch

from tests.support import joint_loss, on_gpu, ragged, with_gradients

MB = 1e6


def step(batch, **options):
    leaves = with_gradients(batch)
    joint_loss(leaves, reduction="sum", **options).backward()
    return leaves


def full_lattice(B, T, U, V, H, dtype, device):
    """A batch whose utterances all have the greatest lengths."""
    batch = ragged(B, T, U, 3, 1)
    generator = torch.Generator().manual_seed(0)
    shapes = {"encoder": (B, T, H), "predictor": (B, U + 1, H), "linear_weight": (V, H), "linear_bias": (V,)}
    floats = {name: 0.1 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    batch = batch._replace(
        **floats, targets=torch.ones_like(batch.targets), encoder_lengths=torch.full((B,), T),
        target_lengths=torch.full((B,), U),
    )  # fmt: skip
    return batch.cast(dtype, device).on(device)


def peak_on_cpu(function):
    """Most bytes of PyTorch's CPU tensors at once, above those at the start."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True) as profile:
        function()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    assert events
    level = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        level += event.nbytes()
        peak = max(peak, level)
    return peak


@pytest.mark.compiled
def test_compiled_on_the_cpu():
    """[N, V] float32 is 67 MB here; tiles, planes and gradients take less than a tenth of it."""
    batch = full_lattice(16, 50, 20, 1000, 16, torch.float32, "cpu")
    options = {"blank": 0, "backend": "compiled"}
    step(batch, **options)  # compiles
    inputs = sum(x.numel() * 4 for x in batch.floats().values())
    peak = peak_on_cpu(lambda: step(batch, **options))
    assert inputs < peak  # the copies that step makes, at the least: the measurement sees tensors
    assert peak - 2 * inputs < 0.1 * 16 * 50 * 21 * 1000 * 4


def test_peak_would_be_seen():
    """The check above can fail: the reference backend holds [N, V] several times."""
    batch = full_lattice(4, 100, 20, 1000, 32, torch.float32, "cpu")
    peak = peak_on_cpu(lambda: step(batch, blank=0, backend="reference"))
    assert peak > 2 * 4 * 100 * 21 * 1000 * 4


def peak_on_gpu(function):
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kept = function()
    torch.cuda.synchronize()
    assert kept is not None
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.gpu
@pytest.mark.parametrize("backend", on_gpu("compiled", "triton"))
def test_wide_vocabulary_on_the_gpu(backend):
    """B16-T455-U20-V4233, whose float32 logits are 2588.5 MB: less than a tenth of it above inputs and gradients."""
    batch = full_lattice(16, 455, 20, 4233, 256, torch.float32, "cuda")
    step(batch, blank=0, backend=backend)
    inputs = sum(x.numel() * 4 for x in batch.floats().values())
    peak = peak_on_gpu(lambda: step(batch, blank=0, backend=backend))
    assert peak - 2 * inputs < 0.1 * 2588.5 * MB


@pytest.mark.gpu
@pytest.mark.parametrize("backend", on_gpu("compiled", "triton"))
def test_very_wide_vocabulary_on_the_gpu(backend):
    """V32000-H1024 in bfloat16: many tiles share one float32 gradient of the weight."""
    V, H, tile_rows = 32000, 1024, 512
    batch = full_lattice(4, 100, 20, V, H, torch.bfloat16, "cuda")
    options = {"blank": 0, "backend": backend, "tile_rows": tile_rows}
    step(batch, **options)
    inputs = sum(x.numel() * 2 for x in batch.floats().values())
    peak = peak_on_gpu(lambda: step(batch, **options))
    tile = tile_rows * V * 4
    assert (
        peak - 2 * inputs < V * H * 4 + V * H * 2 + 4 * tile
    )  # one gradient, one copy of the weight, a tile's tensors
