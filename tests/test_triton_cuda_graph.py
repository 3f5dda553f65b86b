"""Training steps in a CUDA graph: forward and backward, captured once, give eager's bits on whatever is copied in.

With validate=False and lengths on the device nothing is read back, and every shape depends on the padded sizes alone.
Dropout's seed comes from torch's generator, which PyTorch carries into a graph: a replay draws what eager would.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support import Joint, assert_same_bits, joint_loss, named_dtypes, ragged, with_gradients

pytestmark = [pytest.mark.gpu, pytest.mark.triton]


def batch_of(seed: int, dtype: torch.dtype) -> Joint:
    """At most 2200 rows: many tiles of 128, of which some have no row.  Each seed has lengths of its own."""
    batch = ragged(5, 40, 10, 37, 24, seed=seed)
    return Joint(*(x.roll(seed, 0) for x in batch)).cast(dtype, "cuda")


def step(leaves: Joint, **options: Any) -> dict[str, Tensor]:
    loss = joint_loss(leaves, reduction="mean_volume", backend="triton", validate=False, **options)
    floats = leaves.floats()
    gradients = torch.autograd.grad(loss, list(floats.values()))
    named = {f"d_{name}": gradient for name, gradient in zip(floats, gradients, strict=True)}
    return {"loss": loss.detach(), **named}


def captured(leaves: Joint, **options: Any) -> tuple[torch.cuda.CUDAGraph, dict[str, Tensor]]:
    """A graph of one step, and the tensors that each replay writes its results to."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # compiles the kernels and fills the allocator's pools
        for _ in range(3):
            step(leaves, **options)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step(leaves, **options)
    return graph, found


@pytest.mark.parametrize("dropout_p", [0.0, 0.2])
@pytest.mark.parametrize("tile_rows", [128, None], ids=["tiled", "untiled"])
@pytest.mark.parametrize("dtype", named_dtypes("fp32", "bf16"))
def test_replays_have_the_bits_of_eager(dtype, tile_rows, dropout_p):
    options = {"tile_rows": tile_rows, "dropout_p": dropout_p}
    static = with_gradients(batch_of(0, dtype))
    graph, found = captured(static, **options)
    for seed in (1, 2):
        fresh = batch_of(seed, dtype)
        with torch.no_grad():
            for held, new in zip(static, fresh, strict=True):
                held.copy_(new)
        torch.manual_seed(seed)
        replayed = []
        for _ in range(2):
            graph.replay()
            replayed.append({name: x.clone() for name, x in found.items()})
        torch.manual_seed(seed)
        for got in replayed:
            assert_same_bits(got, step(with_gradients(fresh), **options))
        assert torch.equal(replayed[0]["loss"], replayed[1]["loss"]) == (dropout_p == 0)  # a mask of its own each
