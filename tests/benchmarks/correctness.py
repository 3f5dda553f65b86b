"""Is a backend right at the shape that is to be measured?

Two comparisons with the reference in float64, under the budget of `python -m rnnt check`: the losses of the whole
batch, which the reference takes one utterance at a time, and losses and gradients of a cut of the batch whose dense
tensor fits in memory.  Before: rnnt/bench/steps.py.  After: test_loss.py.
"""

import functools

import torch
from torch import Tensor

import rnnt
from rnnt.bench.shapes import Shape
from rnnt.bench.steps import Settings, Step, autocast
from rnnt.check import DTYPES, QUANTITIES, rounding_band

# Elements of the cut's dense tensor; the reference holds about a dozen tensors of that size.
CUT_ELEMENTS = {"cuda": 1 << 28, "cpu": 1 << 22}

FLOATS = ("encoder", "predictor", "linear_weight", "linear_bias")

Named = dict[str, Tensor]


def faults(shape: Shape, settings: Settings, device: str) -> list[str]:
    """One line for each quantity that is over its budget."""
    inputs = make_inputs(shape, settings, device)
    # "auto" drops nothing in float64, and what rounding hides in the shape's dtype.
    plain = settings._replace(backend="reference", tile_rows=None, occupancy_threshold="auto", graph=False)
    truth = reference(shape, plain, device)
    small = gradients(cut(inputs, shape), shape, settings)
    found = {f"{name} (cut of the batch)": small[name] for name in QUANTITIES}
    if settings.dropout_p == 0:  # the mask of an utterance depends on its place in the batch
        found["loss (whole batch)"] = losses(inputs, shape, settings)
    over = []
    for name, got in found.items():
        exact, eager = truth[name]
        largest = exact.abs().max()
        error, eager_error = (float((x.double() - exact).abs().max() / largest) for x in (got, eager))
        budget = 2 * eager_error + rounding_band(name.split()[0], DTYPES[shape.dtype])
        if not error <= budget:
            over.append(f"{name}: error {error:.1e} over the budget {budget:.1e}")
    return over


def make_inputs(shape: Shape, settings: Settings, device: str) -> Named:
    """The step's tensors by the loss's argument names; floats hold values that the shape's dtype can hold."""
    step = Step(shape, settings, device)
    floats = (*step.projected, step.output.weight, step.output.bias)
    inputs = {name: x.detach().to(DTYPES[shape.dtype]).to(x.dtype) for name, x in zip(FLOATS, floats, strict=True)}
    return inputs | dict(zip(("targets", "encoder_lengths", "target_lengths"), step.integers, strict=True))


def utterances(inputs: Named, chosen: list[int]) -> Named:
    return {name: x if name.startswith("linear") else x[chosen] for name, x in inputs.items()}


def cut(inputs: Named, shape: Shape) -> Named:
    """The longest and the shortest utterance when they fit, else the beginning of the longest."""
    room = CUT_ELEMENTS[inputs["encoder"].device.type] // shape.V
    both = shape.B > 1 and room >= 2 * shape.T * (shape.U + 1)
    few = utterances(inputs, [0, -1] if both else [0])
    T = max(min(shape.T, room // (shape.U + 1)), 1)
    few["encoder"] = few["encoder"][:, :T]
    few["encoder_lengths"] = few["encoder_lengths"].clamp(max=T)
    return few


def call(inputs: Named, shape: Shape, settings: Settings) -> Tensor:
    """Losses [B]."""
    torch.manual_seed(1)  # one dropout mask for all
    with autocast(shape, inputs["encoder"].device.type):
        return rnnt.joint_rnnt_loss(**inputs, reduction="none", **settings.arguments())


@torch.no_grad()
def losses(inputs: Named, shape: Shape, settings: Settings) -> Tensor:
    return call(inputs, shape, settings)


def gradients(inputs: Named, shape: Shape, settings: Settings) -> Named:
    """Losses, and gradients under a random upstream gradient."""
    leaves = {name: inputs[name].detach().requires_grad_() for name in FLOATS}
    values = call({**inputs, **leaves}, shape, settings)
    upstream = torch.randn(len(values), generator=torch.Generator().manual_seed(2)).to(values)
    found = torch.autograd.grad(values, list(leaves.values()), upstream)
    return {"loss": values.detach(), **{f"d_{name}": x for name, x in zip(FLOATS, found, strict=True)}}


@functools.lru_cache(maxsize=1)
def reference(shape: Shape, settings: Settings, device: str) -> dict[str, tuple[Tensor, Tensor]]:
    """Each quantity in float64, and as the reference computes it in the shape's dtype."""
    inputs = make_inputs(shape, settings, device)
    exact_inputs = {name: x.double() if name in FLOATS else x for name, x in inputs.items()}
    exact, eager = (gradients(cut(x, shape), shape, settings) for x in (exact_inputs, inputs))
    pairs = {f"{name} (cut of the batch)": (exact[name], eager[name]) for name in QUANTITIES}
    if settings.dropout_p == 0:
        whole, eager_whole = (
            torch.cat([losses(utterances(x, [b]), shape, settings) for b in range(shape.B)])
            for x in (exact_inputs, inputs)
        )
        pairs["loss (whole batch)"] = (whole, eager_whole)
    return pairs
