"""What the tests share: where they run, the inputs they run on, and the error budget they judge by.

Places.  A test that takes the fixture `place` runs once for each backend and device: on the CPU the backends of
RNNT_TEST_BACKENDS (comma separated; by default reference and compiled, or triton alone under TRITON_INTERPRET=1),
and on a GPU, where there is one, the same or by default all three.  A backend asked for that does not work fails
its tests; nothing is skipped.

Budget.  Inputs are rounded to their dtype first, so that everybody computes the same problem.  Then, for each tensor,

    error(backend) <= 2 error(eager) + band,    error(x) = |x - truth|

with truth the reference backend in float64 with every row in the backward pass, and eager the reference backend in the
dtype under test.  The band is what rounding alone may add, in units of the dtype (its eps at the tensor's largest
value): half a unit for 16-bit results or products, one rounding, and a sixteenth of it for losses, which sum many
roundings of both signs; four units in float32, the most that another order of the same sums changes (measured over
permuted classes and features); the same in float64, times the largest loss, since scores of the lattice as large as
the loss are rounded there too.  Held against the largest error and against the root of the mean square; for losses,
relative to each loss.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import rnnt
from rnnt.backends import NAMES, interpreting


class Place(NamedTuple):
    backend: str
    device: str
    finest: torch.dtype  # the finest dtype the backend computes in

    def __str__(self) -> str:
        return f"{self.backend}-{self.device}"

    @property
    def interpreted(self) -> bool:
        """Triton kernels on the CPU: right but slow, and without bfloat16 (its matrix product is wrong there)."""
        return self.backend == "triton" and self.device == "cpu"


def places() -> list[Any]:
    """pytest parameters, one per backend and device under test."""
    asked = [name for name in os.environ.get("RNNT_TEST_BACKENDS", "").split(",") if name]
    unknown = set(asked) - set(NAMES)
    if unknown:
        raise pytest.UsageError(f"RNNT_TEST_BACKENDS: expected names from {sorted(NAMES)}, got {sorted(unknown)}")
    gpu = torch.cuda.is_available()
    on_cpu = asked or (["triton"] if interpreting() else ["reference", "compiled"])
    if gpu and not interpreting():
        on_cpu = [name for name in on_cpu if name != "triton"]  # asked for, and found on the GPU
    on_gpu = [] if interpreting() else asked or ["reference", "compiled", "triton"]
    finest = {"reference": torch.float64, "compiled": torch.float64, "triton": torch.float32}
    at = [(name, "cpu") for name in on_cpu] + [(name, "cuda") for name in on_gpu]
    found = [Place(name, device, finest[name]) for name, device in at]
    return [
        pytest.param(place, id=str(place), marks=[getattr(pytest.mark, place.backend), *gpu_mark(place.device)])
        for place in found
    ]


def at_places(cases: list[Any], gpu_cases: list[Any]) -> list[Any]:
    """pytest parameters (place, case): `cases` for places on the CPU, `gpu_cases` on the GPU."""
    return [
        pytest.param(place, case, id=f"{place}-{case}", marks=marks)
        for (place,), marks, _ in places()
        for case in (gpu_cases if place.device == "cuda" else cases)
    ]


def on_gpu(*backends: str) -> list[Any]:
    """pytest parameters of tests that make their own tensors on the GPU."""
    asked = [param.values[0].backend for param in places() if param.values[0].device == "cuda"]
    return [pytest.param(name, marks=getattr(pytest.mark, name)) for name in backends if name in (asked or backends)]


def tilings() -> list[Any]:
    """pytest parameters (place, tile_rows): a row, a few, chosen, untiled.

    The reference backend has no tiles, and under the interpreter a tile of one row is one of several.
    """

    def sizes(place: Place) -> list[int | str | None]:
        if place.backend == "reference":
            return ["auto"]
        return [7, None] if place.interpreted else [1, 7, "auto", None]

    return [
        pytest.param(place, tile_rows, id=f"{place}-tile={tile_rows}", marks=marks)
        for (place,), marks, _ in places()
        for tile_rows in sizes(place)
    ]


def gpu_mark(device: str) -> list[Any]:
    return [pytest.mark.gpu] if device == "cuda" else []


DEVICES = [pytest.param(device, marks=gpu_mark(device)) for device in ("cpu", "cuda")]


class Joint(NamedTuple):
    """The tensors of one call of joint_rnnt_loss."""

    encoder: Tensor
    predictor: Tensor
    linear_weight: Tensor
    linear_bias: Tensor | None
    targets: Tensor
    encoder_lengths: Tensor
    target_lengths: Tensor

    def floats(self) -> dict[str, Tensor]:
        named = {name: getattr(self, name) for name in ("encoder", "predictor", "linear_weight", "linear_bias")}
        return {name: x for name, x in named.items() if x is not None}

    def each(self, cast: Callable[[Tensor], Tensor]) -> "Joint":
        return self._replace(**{name: cast(x) for name, x in self.floats().items()})

    def cast(self, dtype: torch.dtype, device: str | None = None) -> "Joint":
        return self.each(lambda x: x.to(device=device, dtype=dtype)).on(device)

    def on(self, device: str | None) -> "Joint":
        return Joint(*(x if x is None or device is None else x.to(device) for x in self))


def joint_loss(joint: Joint, **options: Any) -> Tensor:
    return rnnt.joint_rnnt_loss(
        joint.encoder, joint.predictor, joint.linear_weight, joint.targets, joint.encoder_lengths,
        joint.target_lengths, linear_bias=joint.linear_bias, **options,
    )  # fmt: skip


def with_gradients(joint: Joint) -> Joint:
    return joint.each(lambda x: x.detach().clone().requires_grad_())


def results(joint: Joint, upstream: Tensor | None = None, seed: int | None = None, **options: Any) -> dict[str, Tensor]:
    """Losses [B] and the gradients of sum(upstream * losses) by tensor name; upstream None: ones; seed: of dropout."""
    joint = with_gradients(joint)
    if seed is not None:
        torch.manual_seed(seed)
    loss = joint_loss(joint, reduction="none", **options)
    loss.backward(torch.ones_like(loss) if upstream is None else upstream.to(loss))
    return {"loss": loss.detach(), **{f"d_{name}": x.grad for name, x in joint.floats().items()}}


def logits_results(logits: Tensor, *args: Any, upstream: Tensor | None = None, **options: Any) -> dict[str, Tensor]:
    """The same for rnnt_loss; args are targets, logit_lengths, target_lengths."""
    logits = logits.detach().clone().requires_grad_()
    args = tuple(x.to(logits.device) for x in args)
    loss = rnnt.rnnt_loss(logits, *args, reduction="none", **options)
    loss.backward(torch.ones_like(loss) if upstream is None else upstream.to(loss))
    return {"loss": loss.detach(), "d_logits": logits.grad}


def ragged_lengths(B: int, T: int, U: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """The first utterance is full, the second has one frame, the third no labels."""
    frames = torch.randint(1, T + 1, (B,), generator=generator)
    labels = torch.randint(0, U + 1, (B,), generator=generator)
    frames[0], labels[0] = T, U
    frames[1:2], labels[2:3] = 1, 0
    return frames, labels


def ragged(
    B: int, T: int, U: int, V: int, H: int, *, blank: int = -1, scale: float = 1.0, seed: int = 0, bias: bool = True
) -> Joint:
    """A random ragged batch in float64; labels come from few classes, so that they repeat."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    frames, labels = ragged_lengths(B, T, U, generator)
    classes = torch.tensor([v for v in range(V) if v != blank % V])
    few = classes[torch.randint(len(classes), (3,), generator=generator)]
    targets = few[torch.randint(3, (B, U), generator=generator)]
    return Joint(
        normal(B, T, H), normal(B, U + 1, H), scale * normal(V, H) / H**0.5, normal(V) if bias else None,
        targets, frames, labels,
    )  # fmt: skip


def upstream_of(joint: Joint, seed: int = 1) -> Tensor:
    """A random upstream gradient [B]; some entries are negative."""
    return torch.randn(len(joint.targets), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Budget(NamedTuple):
    truth: dict[str, Tensor]  # float64
    eager: dict[str, Tensor]  # |eager - truth|, float64
    dtype: torch.dtype  # of the products

    def band(self, name: str, dtype: torch.dtype) -> float:
        """The rounding band of a result of this dtype, at the scale 1."""
        return max(self._rounding(name, x) for x in {dtype, self.dtype})

    def _rounding(self, name: str, dtype: torch.dtype) -> float:
        eps = torch.finfo(dtype).eps
        if dtype.itemsize == 2:
            return eps / 32 if name == "loss" else eps / 2
        if dtype == torch.float64 and "loss" in self.truth:
            return 4 * eps * max(float(self.truth["loss"].max()), 1.0)
        return 4 * eps


def budget_from(eager: dict[str, Tensor], truth: dict[str, Tensor], dtype: torch.dtype) -> Budget:
    assert eager.keys() == truth.keys(), f"{sorted(eager)} {sorted(truth)}"
    return Budget(truth, {name: (eager[name].double() - truth[name]).abs() for name in truth}, dtype)


def budget_of(batch: Any, run: Callable[[Any], dict[str, Tensor]]) -> Budget:
    """The budget of run(batch), with run on the reference backend; batch: Joint or the logits.

    float64 has no truth above it: its error is taken to be float32's, in proportion to the two units of rounding.
    """
    cast = batch.to if isinstance(batch, Tensor) else batch.cast
    dtype = batch.dtype if isinstance(batch, Tensor) else batch.encoder.dtype
    if dtype != torch.float64:
        return budget_from(run(batch), run(cast(torch.float64)), dtype)
    ratio = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
    below = budget_of(cast(torch.float32), run)
    return Budget(run(batch), {name: error * ratio for name, error in below.eager.items()}, dtype)


def joint_budget(batch: Joint, upstream: Tensor | None = None, **options: Any) -> Budget:
    return budget_of(batch, lambda x: results(x, upstream, backend="reference", **options))


def logits_budget(logits: Tensor, *args: Any, **options: Any) -> Budget:
    return budget_of(logits, lambda x: logits_results(x, *args, backend="reference", **options))


def assert_budget(got: dict[str, Tensor], budget: Budget, measures: tuple[str, ...] = ("largest", "rms")) -> None:
    """Each tensor of `got` finite and within its budget (see the top of this file); the message has the worst entry."""
    assert got
    failures = []
    for name, found in got.items():
        right, eager = budget.truth[name], budget.eager[name]
        assert found.shape == right.shape, f"{name}: shape {tuple(found.shape)}, expected {tuple(right.shape)}"
        assert found.isfinite().all(), f"{name}: not finite at {(~found.isfinite()).nonzero()[0].tolist()}"
        if right.numel() == 0:
            continue
        error = (found.double() - right).abs()
        rounding = budget.band(name, found.dtype) * right.abs()
        if name == "loss":  # each has its own scale
            scale = right.abs().clamp(min=torch.finfo(found.dtype).tiny)
            error, eager, rounding = error / scale, eager / scale, rounding / scale
        for measure in measures:
            of = {"largest": Tensor.max, "rms": _rms}[measure]
            allowed = 2 * of(eager) + of(rounding)
            if not of(error) <= allowed:
                at = tuple(int(i) for i in torch.unravel_index(error.argmax(), error.shape))
                failures.append(
                    f"{name}{list(at)}: {measure} error {of(error):.3e} over the budget {allowed:.3e} "
                    f"(eager's error {of(eager):.3e}); got {found[at]:.8g}, expected {right[at]:.8g}"
                )
    assert not failures, "\n".join(failures)


def _rms(x: Tensor) -> Tensor:
    return x.square().mean().sqrt()


def check_budget(
    place: Place, batch: Joint, dtype: torch.dtype, upstream: Tensor | None = None, **options: Any
) -> None:
    """The backend at `place` in `dtype`, on a float64 batch rounded to it, within the budget."""
    batch = batch.cast(dtype, place.device)
    upstream = upstream_of(batch) if upstream is None else upstream
    found = results(batch, upstream, backend=place.backend, **options)
    assert_budget(found, joint_budget(batch, upstream, **options))
    assert found["loss"].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert all(found[f"d_{name}"].dtype == dtype for name in batch.floats())


Cast = Callable[[Tensor], Tensor]


def check_printed(place: Place, compute: Callable[[str, Cast], dict[str, Tensor]], printed: dict[str, Any]) -> None:
    """compute(backend, cast) against numbers printed to 8 decimals; compute casts every float input.

    In float64 to the last digit.  A backend without float64 is held to the budget on the same inputs, against the
    float64 reference that gives the printed numbers; but for names like "|d_logits|", which are sums of a tensor there.
    """

    def compare(found: dict[str, Tensor]) -> None:
        for name, value in printed.items():
            right = torch.as_tensor(value, dtype=torch.float64)
            message = f"{name}: got {found[name]}, expected {right}"
            torch.testing.assert_close(found[name].detach().cpu(), right, rtol=1e-12, atol=5.1e-9, msg=message)

    device, dtype = place.device, place.finest
    if dtype == torch.float64:
        compare(compute(place.backend, lambda x: x.to(device, dtype)))
        return
    compare(compute("reference", lambda x: x.to(device, torch.float64)))
    got = compute(place.backend, lambda x: x.to(device, dtype))
    eager = compute("reference", lambda x: x.to(device, dtype))
    truth = compute("reference", lambda x: x.to(device, dtype).to(torch.float64))
    found = {name: x.detach() for name, x in got.items() if not name.startswith("|")}
    assert_budget(found, budget_from(eager, truth, dtype))


def assert_same_bits(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name in expected:
        assert torch.equal(got[name], expected[name]), f"{name}: bits differ"


DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


# PyTorch's switch for float32 products, by its older name and its newer one: on, off.
TF32_SWITCHES = [
    pytest.param(name, *values, id=name)
    for name, values in (("allow_tf32", (True, False)), ("fp32_precision", ("tf32", "ieee")))
    if hasattr(torch.backends.cuda.matmul, name)
]


@contextmanager
def tf32_switched(name: str, value: bool | str) -> Iterator[None]:
    before = getattr(torch.backends.cuda.matmul, name)
    setattr(torch.backends.cuda.matmul, name, value)
    try:
        yield
    finally:
        setattr(torch.backends.cuda.matmul, name, before)


def named_dtypes(*names: str) -> list[Any]:
    return [pytest.param(DTYPES[name], id=name) for name in names]
