"""The forward kernel of Hopper: against the reference and the kernel of all other chips, and that it compiles.

Gluon has no interpreter, so without a GPU all that can be checked is that the kernel compiles for Hopper, in the shared
memory that a multiprocessor has and with the tensor cores' instructions.
"""

import re

import pytest
import torch

from tests.support import assert_budget, assert_same_bits, joint_budget, named_dtypes, on_gpu, ragged, results

# T, U, V, H, activation, dropout_p, blank: whole blocks of classes, a class past them, blocks cut short, features
# that fill no slice, one to ten slices, blanks at both ends.
SHAPES = [
    (40, 21, 1024, 640, "relu", 0.0, 0),
    (40, 21, 1025, 640, "tanh", 0.1, -1),
    (23, 9, 500, 600, "sigmoid", 0.0, 3),
    (23, 9, 1025, 512, "relu", 0.3, 0),
    (60, 40, 257, 100, "tanh", 0.0, 256),
    (300, 80, 256, 64, "relu", 0.0, -1),
    (1, 0, 256, 64, "relu", 0.0, 0),
]


def on_hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


@pytest.fixture
def resident(monkeypatch):
    """One element for each call of the kernel."""
    if not on_hopper():
        pytest.skip("not a Hopper GPU")
    from rnnt.triton import resident

    calls = []
    call = resident.log_probs_fwd
    monkeypatch.setattr(resident, "log_probs_fwd", lambda *arguments: (calls.append(1), call(*arguments)))
    return calls


@pytest.mark.parametrize("dtype", named_dtypes("bf16", "fp16"))
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(map(str, shape)))
@pytest.mark.gpu
@pytest.mark.parametrize("backend", on_gpu("triton"))
def test_both_forward_kernels(backend, shape, dtype, resident, monkeypatch):
    T, U, V, H, activation, dropout_p, blank = shape
    batch = ragged(5, T, U, V, H).cast(dtype, "cuda").on("cuda")
    options = {"activation": activation, "dropout_p": dropout_p, "blank": blank}
    budget = joint_budget(batch, seed=7, **options)
    found = results(batch, seed=7, backend=backend, **options)
    assert len(resident) == 1
    assert_budget(found, budget)
    assert_same_bits(results(batch, seed=7, backend=backend, **options), found)
    monkeypatch.setattr("rnnt.triton.log_probs.resident_kernel", lambda device: None)
    assert_budget(results(batch, seed=7, backend=backend, **options), budget)
    assert len(resident) == 2


@pytest.mark.gpu
@pytest.mark.parametrize("backend", on_gpu("triton"))
def test_other_widths_take_the_other_kernel(backend, resident):
    for V, H, dtype in ((256, 704, torch.bfloat16), (300, 64, torch.bfloat16), (256, 64, torch.float32)):
        results(ragged(2, 5, 3, V, H).cast(dtype, "cuda").on("cuda"), backend=backend)
    results(ragged(2, 5, 3, 256, 64).cast(torch.bfloat16, "cuda").on("cuda"), backend=backend, tile_rows=None)
    assert resident == []


@pytest.mark.parametrize(("width", "dropout", "tail"), [(640, False, False), (600, True, True)])
def test_compiles_for_hopper(width, dropout, tail):
    triton = pytest.importorskip("triton")
    resident = pytest.importorskip("rnnt.triton.resident", exc_type=ImportError)
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource

    kernel = resident.log_probs_fwd_resident_kernel
    block = [resident.BLOCK_V, resident.BLOCK_H]
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16)
    constants = {
        "encoder_stride_h": 1, "predictor_stride_h": 1, "ACTIVATION": "tanh", "DROPOUT": dropout, "BIAS": True,
        "TAIL": tail, "RAGGED": width % resident.BLOCK_H > 0, "LONG": False, "STAGES": 2,
        "SLICES": -(-width // resident.BLOCK_H), "BLOCK_ROWS": resident.BLOCK_ROWS,
        "BLOCK_V": resident.BLOCK_V, "BLOCK_H": resident.BLOCK_H, "WARPS": resident.WARPS,
    }  # fmt: skip
    types = {
        "encoder_ptr": "*bf16", "predictor_ptr": "*bf16", "class_ptr": "*bf16", "bias_ptr": "*bf16",
        "logp_blank_ptr": "*fp32", "logp_label_ptr": "*fp32", "lse_ptr": "*fp32",
        "weight": f"tensordesc<bf16{block},{layout!r}>", "dropout_p": "fp32",
    }  # fmt: skip
    signature = {}
    for name in kernel.arg_names:
        default = "*i64" if name.endswith("_ptr") else "i32"
        signature[name] = "constexpr" if name in constants else types.get(name, default)
    divisible = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(kernel.arg_names)
        if name.endswith(("_ptr", "_stride_b", "_stride_t", "_stride_u")) or name in ("features", "whole_classes")
    }
    options = {"num_warps": resident.WARPS, "enable_fp_fusion": True}
    source = GluonASTSource(kernel, signature, constants, divisible)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert compiled.metadata.shared <= 227 * 1024
    assert len(re.findall(r"wgmma\.mma_async", compiled.asm["ptx"])) == 3 * resident.BLOCK_H // 16
