"""float32 on the Triton backend with PyTorch's TF32 switch on."""

import pytest
import torch

from rnnt.backends import interpreting
from tests.support import TF32_SWITCHES, gpu_mark, ragged, results, tf32_switched, upstream_of

DEVICE = "cpu" if interpreting() else "cuda"
pytestmark = [pytest.mark.triton, *gpu_mark(DEVICE)]
config = pytest.importorskip("rnnt.triton.config")


@pytest.mark.parametrize(("name", "on", "off"), TF32_SWITCHES)
def test_switch_by_either_name(name, on, off):
    """The older name raises when it is read once the newer one has been set."""
    for value, allowed in ((on, True), (off, False), (on, True)):
        with tf32_switched(name, value):
            assert config.tf32_allowed() is allowed


def rounded(x):
    """To the nearest number with 10 bits of fraction, by Dekker's splitting."""
    shifted = x * (2**13 + 1)
    return shifted - (shifted - x)


class RoundedLinear(torch.autograd.Function):
    """A linear layer whose three products have rounded operands."""

    @staticmethod
    def forward(ctx, hidden, weight, bias):
        ctx.save_for_backward(hidden, weight)
        return torch.nn.functional.linear(rounded(hidden), rounded(weight), bias)

    @staticmethod
    def backward(ctx, d_logits):
        hidden, weight = ctx.saved_tensors
        d_rows, rows = d_logits.flatten(0, -2), hidden.flatten(0, -2)
        return rounded(d_logits) @ rounded(weight), rounded(d_rows).T @ rounded(rows), d_rows.sum(0)


@pytest.mark.parametrize("tile_rows", [16, None], ids=["tiled", "untiled"])
def test_operands_are_rounded_to_nearest(tile_rows, monkeypatch):
    """Tensor cores cut off what TF32 has no room for, which errs to one side: it is rounded before.  Products are those
    of the rounded operands, which float32 holds, up to the few that round to the other side."""
    batch = ragged(2, 9, 4, 37, 24).cast(torch.float32, DEVICE)
    upstream, options = upstream_of(batch), {"activation": "relu", "tile_rows": tile_rows, "occupancy_threshold": 0}
    exact = results(batch, upstream, backend="triton", **options)
    monkeypatch.setattr("rnnt.triton.operands.precision", lambda dtype: "tf32")
    found = results(batch, upstream, backend="triton", **options)
    monkeypatch.setattr(
        "rnnt.reference.log_probs.output_layer",
        lambda hidden, problem: RoundedLinear.apply(hidden, problem.linear_weight, problem.linear_bias),
    )
    expected = results(batch, upstream, backend="reference", **options | {"tile_rows": "auto"})
    for name, right in expected.items():
        rounding = (exact[name] - right).norm()
        assert rounding > 0, f"{name}: nothing was rounded"
        assert (found[name] - right).norm() < rounding / 8, name
