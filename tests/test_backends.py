"""Every backend against the reference over chosen ragged shapes, dtypes, tile sizes and options.

No V or H is a multiple of a block; every batch has an utterance with one frame and one without labels.
"""

from typing import Any, NamedTuple

import pytest
import torch

import rnnt
from tests.support import (
    DTYPES,
    TF32_SWITCHES,
    Budget,
    assert_budget,
    at_places,
    budget_of,
    check_budget,
    joint_budget,
    logits_budget,
    logits_results,
    on_gpu,
    ragged,
    results,
    tf32_switched,
    upstream_of,
    with_gradients,
)


class Case(NamedTuple):
    B: int
    T: int
    U: int
    V: int
    H: int
    dtype: str
    tile_rows: int | str | None
    options: dict[str, Any]
    scale: float = 1.0  # of the output layer: the larger, the more certain the alignments

    def __str__(self) -> str:
        sizes = "-".join(f"{name}{getattr(self, name)}" for name in "BTUVH")
        options = [f"{name}={value}" for name, value in self.options.items()]
        return "-".join(
            [sizes, self.dtype, f"tile={self.tile_rows}", *options, *([f"scale={self.scale:g}"] * (self.scale != 1))]
        )


PLAIN = {"activation": "tanh"}
RELU_FIRST = {"activation": "relu", "blank": 0}
SIGMOID_MIDDLE = {"activation": "sigmoid", "blank": 20}
REGULARISED = {"fastemit_lambda": 0.3, "clamp": 0.1}

CPU = [
    Case(3, 17, 5, 37, 24, "fp32", 32, PLAIN),
    Case(3, 17, 5, 37, 24, "fp16", 32, RELU_FIRST),
    Case(4, 9, 12, 37, 24, "fp32", None, SIGMOID_MIDDLE),
    Case(5, 12, 3, 37, 24, "fp32", 7, REGULARISED),
    Case(3, 40, 2, 37, 24, "fp32", "auto", PLAIN, scale=4),
]
COMPILED = [
    Case(3, 17, 5, 37, 24, "fp64", 32, PLAIN),
    Case(3, 17, 5, 131, 40, "bf16", 32, RELU_FIRST),
    Case(3, 17, 5, 37, 24, "bf16", None, PLAIN),
    Case(4, 60, 20, 37, 24, "fp32", "auto", PLAIN),
]
GPU = [
    Case(4, 61, 17, 131, 72, "fp32", 256, PLAIN),
    Case(4, 61, 17, 131, 72, "bf16", 256, RELU_FIRST),
    Case(4, 61, 17, 131, 72, "fp16", None, SIGMOID_MIDDLE),
    Case(4, 61, 17, 131, 72, "bf16", None, REGULARISED),
    Case(3, 150, 40, 1025, 640, "bf16", "auto", PLAIN),
    Case(3, 150, 40, 1025, 640, "fp32", None, PLAIN),
    Case(6, 20, 33, 257, 200, "bf16", 1000, PLAIN, 4),
]
GPU_TRITON = [
    Case(1, 1, 0, 2, 1, "fp32", 1, {}),
    Case(2, 7, 3, 5, 6, "fp16", 1, {}),
    Case(5, 33, 9, 130, 129, "fp16", 77, PLAIN),
    Case(5, 33, 9, 127, 127, "bf16", 77, SIGMOID_MIDDLE),
    Case(5, 33, 9, 127, 127, "fp32", "auto", RELU_FIRST),
    Case(8, 90, 30, 4233, 512, "bf16", 2048, REGULARISED),
    Case(2, 400, 128, 1025, 640, "bf16", "auto", PLAIN),
    Case(3, 50, 300, 33, 64, "fp16", "auto", PLAIN),
]


def joint_cases() -> list[Any]:
    """CPU and GPU for every place; COMPILED and GPU_TRITON where their backend is meant."""
    chosen = at_places(CPU + COMPILED, GPU + GPU_TRITON)
    return [
        param
        for param in chosen
        if (param.values[1] not in COMPILED or param.values[0].backend == "compiled")
        and (param.values[1] not in GPU_TRITON or param.values[0].backend == "triton")
    ]


@pytest.mark.parametrize(("place", "case"), joint_cases())
def test_joint(place, case):
    blank = case.options.get("blank", -1)
    batch = ragged(case.B, case.T, case.U, case.V, case.H, blank=blank, scale=case.scale)
    check_budget(place, batch, DTYPES[case.dtype], tile_rows=case.tile_rows, **case.options)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", on_gpu("compiled", "triton"))
@pytest.mark.parametrize(("name", "on", "off"), TF32_SWITCHES)
def test_float32_follows_the_tf32_switch(backend, name, on, off):
    """Products of the reference backend, and with them the budget, follow either name of the switch."""
    batch = ragged(3, 150, 40, 1025, 640).cast(torch.float32, "cuda")
    upstream = upstream_of(batch)
    found = {}
    for value in (off, on):
        with tf32_switched(name, value):
            found[value] = results(batch, upstream, backend=backend)
            assert_budget(found[value], joint_budget(batch, upstream))
    for tensor in ("loss", "d_linear_weight"):
        assert not found[on][tensor].equal(found[off][tensor]), f"{tensor}: the same with TF32 and without"


LOGITS_CPU = [Case(3, 17, 5, 37, 1, "fp32", None, {}), Case(3, 17, 5, 37, 1, "fp16", None, {"blank": 3, **REGULARISED})]
LOGITS_GPU = [
    Case(4, 61, 17, 131, 1, "fp32", None, {}),
    Case(4, 61, 17, 131, 1, "bf16", None, {"blank": 3, **REGULARISED}),
    Case(2, 90, 30, 4233, 1, "fp16", None, {"fused_log_softmax": False, "blank": 0}),
    Case(2, 40, 300, 5, 1, "fp32", None, {"blank": 0}),
]


@pytest.mark.parametrize(("place", "case"), at_places(LOGITS_CPU, LOGITS_GPU))
def test_logits(place, case):
    batch = ragged(case.B, case.T, case.U, case.V, case.H, blank=case.options.get("blank", -1))
    generator = torch.Generator().manual_seed(2)
    logits = 2 * torch.randn(case.B, case.T, case.U + 1, case.V, generator=generator, dtype=torch.float64)
    if not case.options.get("fused_log_softmax", True):
        logits = logits.log_softmax(-1)
    logits = logits.to(place.device, DTYPES[case.dtype])
    options = {"upstream": upstream_of(batch), **case.options}
    found = logits_results(logits, *batch[4:], backend=place.backend, **options)
    assert_budget(found, logits_budget(logits, *batch[4:], **options))


def planes_results(batch, upstream, backend):
    """joint_log_probs, and the gradients of sum(upstream * planes)."""
    leaves = with_gradients(batch)
    blank, label = rnnt.joint_log_probs(*leaves[:3], *leaves[4:], linear_bias=leaves.linear_bias, backend=backend)
    ((blank * upstream[0].to(blank)).sum() + (label * upstream[1].to(label)).sum()).backward()
    gradients = {f"d_{name}": x.grad for name, x in leaves.floats().items()}
    return {"logp_blank": blank.detach(), "logp_label": label.detach(), **gradients}


@pytest.mark.parametrize(("place", "case"), at_places(CPU[:1], GPU[:2]))
def test_planes(place, case):
    """The middle layer under an arbitrary upstream gradient, of either sign and on every node."""
    batch = ragged(case.B, case.T, case.U, case.V, case.H).cast(DTYPES[case.dtype], place.device)
    generator = torch.Generator().manual_seed(4)
    upstream = [torch.randn(case.B, case.T, n, generator=generator) for n in (case.U + 1, case.U)]
    for gradient in upstream:  # what comes from outside the lengths is not read
        gradient[1, 1:] = torch.nan
        gradient[2, :, 1:] = torch.nan
    expected = budget_of(batch, lambda x: planes_results(x, upstream, "reference"))
    assert_budget(planes_results(batch, upstream, place.backend), expected)


def test_one_plane_alone(place):
    """A loss of one of the two planes leaves the other's gradient undefined, which is zero."""
    batch = ragged(2, 4, 3, 5, 6).cast(place.finest, place.device)
    both = [torch.zeros(2, 4, 4), torch.ones(2, 4, 3)]
    expected = planes_results(batch, both, place.backend)
    leaves = with_gradients(batch)
    _, label = rnnt.joint_log_probs(*leaves[:3], *leaves[4:], linear_bias=leaves.linear_bias, backend=place.backend)
    label.sum().backward()
    for name, x in leaves.floats().items():
        assert torch.equal(x.grad, expected[f"d_{name}"]), name


def lattice_results(planes, lengths, backend, **options):
    blank, label = (x.detach().clone().requires_grad_() for x in planes)
    loss = rnnt.rnnt_loss_from_log_probs(blank, label, *lengths, reduction="none", backend=backend, **options)
    loss.sum().backward()
    d_label = torch.zeros_like(label) if label.grad is None else label.grad  # None where no utterance has a label
    return {"loss": loss.detach(), "d_blank": blank.grad, "d_label": d_label}


def planes_of(B, T, U, spread):
    """Blank and label share the probability, by a random score of this standard deviation."""
    score = spread * torch.randn(B, T, U + 1, generator=torch.Generator().manual_seed(T + U))
    return torch.nn.functional.logsigmoid(score), torch.nn.functional.logsigmoid(-score[:, :, :-1])


LATTICES = [(1, 1, 0), (2, 1, 6), (3, 30, 0), (3, 12, 31), (1, 300, 80)]
LONG = [(1, 1500, 300), (2, 4000, 600), (1, 20, 2000)]


@pytest.mark.parametrize(("place", "sizes"), at_places(LATTICES, LATTICES + LONG))
def test_lattice(place, sizes):
    """The recursion alone; its error does not grow with the lattice.

    The longest recursion's occupancies, which lie in [0, 1], are held to the promise of 1e-5 at any size: a float32
    logarithm in each of 4600 steps is more than the budget's few roundings.
    """
    B, T, U = sizes
    batch = ragged(B, T, U, 5, 1, seed=T)
    planes = [x.to(place.device) for x in planes_of(B, T, U, 2)]
    lengths = [x.to(place.device) for x in batch[5:]]
    truth = lattice_results([x.double() for x in planes], lengths, "reference")
    exact = {name: torch.zeros_like(x) for name, x in truth.items()}
    found = lattice_results(planes, lengths, place.backend)
    budget = Budget(truth, exact, torch.float32)
    if sizes != LONG[1]:
        assert_budget(found, budget)
        return
    assert_budget({"loss": found["loss"]}, budget)
    for name in ("d_blank", "d_label"):
        torch.testing.assert_close(found[name].double(), truth[name], rtol=0, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("spread", [pytest.param(0, id="flat"), pytest.param(16, id="sharp")])
@pytest.mark.parametrize("backend", on_gpu("compiled", "triton"))
def test_long_lattice_flat_and_sharp(backend, spread):
    """T = 4000, U = 600: every path alike, or one far ahead of the others."""
    B, T, U = 1, 4000, 600
    planes = [x.cuda() for x in planes_of(B, T, U, spread)]
    lengths = torch.tensor([T]).cuda(), torch.tensor([U]).cuda()
    truth = lattice_results([x.double() for x in planes], lengths, "reference")
    found = lattice_results(planes, lengths, backend)
    torch.testing.assert_close(found["loss"].double(), truth["loss"], rtol=1e-6, atol=1e-5)
    for name in ("d_blank", "d_label"):
        torch.testing.assert_close(found[name].double(), truth[name], rtol=0, atol=1e-5)
