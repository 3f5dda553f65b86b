"""Every Triton kernel, forward and backward, at sizes a sanitizer gets through: tests/sanitizer.sh runs this file.

Just over a tile of rows, two blocks of classes, and sizes that are no multiple of a block; the budget is computed on
the CPU, so that little but the backend's kernels runs on the GPU.
"""

import pytest
import torch

import rnnt
from tests.support import (
    assert_budget,
    budget_of,
    joint_budget,
    logits_budget,
    logits_results,
    named_dtypes,
    ragged,
    results,
    upstream_of,
)

pytestmark = [pytest.mark.gpu, pytest.mark.triton]

SIZES = (3, 17, 9, 131, 70)  # B, T, U, V, H


def on_cpu(found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: x.cpu() for name, x in found.items()}


@pytest.mark.parametrize("tile_rows", [64, None], ids=["tiled", "untiled"])
@pytest.mark.parametrize("dtype", named_dtypes("fp32", "bf16"))
def test_joint(dtype, tile_rows):
    """joint, log_probs and lattice, both ways, live_rows and the output layer's gradients."""
    batch = ragged(*SIZES).cast(dtype)
    upstream = upstream_of(batch)
    found = results(batch.on("cuda"), upstream, backend="triton", tile_rows=tile_rows)
    assert_budget(on_cpu(found), joint_budget(batch, upstream))


@pytest.mark.parametrize("dtype", named_dtypes("fp32", "bf16"))
def test_dense_scores(dtype):
    batch = ragged(*SIZES)
    logits = torch.randn(*batch.encoder.shape[:2], SIZES[2] + 1, SIZES[3]).to(dtype)
    found = logits_results(logits.cuda(), *batch[4:], backend="triton")
    assert_budget(on_cpu(found), logits_budget(logits, *batch[4:]))


def test_planes():
    """Between dense planes and packed rows."""
    batch = ragged(*SIZES).cast(torch.float32)

    def planes(batch, backend="reference"):
        blank, label = rnnt.joint_log_probs(*batch[:3], *batch[4:], linear_bias=batch.linear_bias, backend=backend)
        loss = rnnt.rnnt_loss_from_log_probs(blank, label, *batch[5:], reduction="none", backend=backend)
        return {"logp_blank": blank, "logp_label": label, "loss": loss}

    assert_budget(on_cpu(planes(batch.on("cuda"), "triton")), budget_of(batch, planes))
