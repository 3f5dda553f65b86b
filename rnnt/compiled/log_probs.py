"""Log-probabilities of the two arcs that leave each row of a tile, their gradient, and the compiled tile itself.

    product    = hidden linear_weight^T
    logits     = product + linear_bias
    lse        = log sum over v of exp(logits[v])
    logp_blank = logits[blank] - lse,   logp_label = logits[label] - lse

    Gradient of  -(w_blank logp_blank + w_label logp_label)  at the logits:
    g[v]       = (w_blank + w_label) exp(logits[v] - lse) - w_blank [v = blank] - w_label [v = label]

hidden [rows, H] -> product [rows, V] in the compute dtype -> logp_blank, logp_label, lse [rows], g [rows, V], computed
in float32 (float64 stays float64).  label is -1 where a row has no next label; its logp_label is 0.  The bias is added
in float32: a product rounded to 16 bits and, with the bias, rounded again errs to one side, differently for each class,
and a path adds up hundreds of blanks.  lse is two numbers, the largest score and the rest, subtracted one after the
other: an ulp of their sum is more than the log-probability of a near-certain class may be off.

Two functions of a tile are compiled, each into one graph whatever the lengths of a batch:

    score        logp_blank, logp_label and lse
    gradients    of the surrogate: zeros whose derivative is that of the loss, as the occupancies and lse, known by
                 then, are given

The surrogate runs under non-reentrant torch.utils.checkpoint, and its value depends on nothing, so that what is left of
the graph computes the tile once, where autograd asks for it, and differentiates it.  With lse given, g is one pass over
the product.  Untiled, `kept` brings the product from the forward pass, and the output layer is only differentiated.

Before: joint.py.  After: lattice.py.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, set_checkpoint_debug_enabled

from rnnt.compiled.joint import Anchors, Places, anchors_at, joint
from rnnt.compiled.tiles import Tables, TileRows, in_memory, look_up
from rnnt.problem import lse_dtype

# Up to so many classes Inductor keeps in registers on a GPU; more it reads in a loop, which took four times as long as
# parts of a row reduced on their own.
LONGEST_REDUCTION, PART = 1024, 64


class Tile(NamedTuple):
    """All that the compiled functions of the joint are specialised on; the rest are their arguments."""

    rows: int
    features: int
    classes: int
    inputs: tuple[torch.dtype, ...]  # of JointInputs
    needed: tuple[bool, ...]  # which of the gradients, of encoder, predictor, weight and bias
    gathers: bool  # the way of GatherSums
    device: torch.device
    compute_dtype: torch.dtype
    activation: str
    dropout_p: float
    blank: int
    clamp: float
    keep: bool  # the product is kept from the forward to the backward pass


class DenseTile(NamedTuple):
    """The same of dense scores."""

    rows: int
    classes: int
    dtype: torch.dtype
    device: torch.device
    blank: int
    clamp: float
    log_softmax: bool


class JointInputs(NamedTuple):
    encoder: Tensor  # [B T, H], constant
    predictor: Tensor  # [B U1, H], constant
    weight: Tensor  # [V, H] in the compute dtype
    bias: Tensor  # [V], float32 or float64


class Planes(NamedTuple):
    """What the lattice found, [B T U1] each, and the upstream gradient of each utterance."""

    blank_weight: Tensor
    label_weight: Tensor
    lse: Tensor
    upstream: Tensor  # [B]

    def at(self, node: Tensor, utterance: Tensor) -> Tensor:
        """[4 or 5, rows]: weights, upstream gradient, lse in parts_of; weights are 0 where node is -1."""
        there = node.clamp(min=0)
        weights = [torch.where(node < 0, 0, x[there]) for x in self[:2]]
        upstream = self.upstream[utterance].to(weights[0].dtype)
        return in_memory(torch.stack([*weights, upstream, *parts_of(self.lse[there], weights[0].dtype)]))


def score(tile: Tile, inputs: JointInputs, node: Tensor, tables: Tables) -> tuple[Tensor, ...]:
    """The product [rows, V], where it is to be kept, and logp_blank, logp_label, lse [rows]; without gradient.
    lse is in lse_dtype.
    """
    rows = look_up(tables, node)
    product = output_layer(tile, inputs, rows, Anchors())
    scores = _wide(product) + inputs.bias
    largest, rest = log_sum_exp(scores)
    lse = largest.to(lse_dtype(product.dtype)) + rest
    found = *pick(scores, rows.label, tile.blank, (largest, rest)), lse
    return (product, *found) if tile.keep else found


def gradients(
    tile: Tile, inputs: JointInputs, node: Tensor, tables: Tables, planes: Planes, kept: Tensor | None,
    places: Places | None,
) -> list[Tensor]:  # fmt: skip
    """Gradients of -(blank_weight logp_blank + label_weight logp_label), clamped at the logits, times the upstream
    gradient: at the tile's anchors, then of the weight [V, H] and the bias [V], all as they are needed.

    node: -1 where a row is of no node; kept [N, V]: products, or None.
    """
    # What a caller has switched on for debugging fails where a tile is traced.
    with torch.enable_grad(), torch.autograd.set_detect_anomaly(False), set_checkpoint_debug_enabled(False):
        frames, states, weight, bias = tile.needed
        anchors, wide_weight, layer = Anchors(), None, []
        if frames or states:
            anchors = anchors_at(places, tile.rows, tile.features, tile.compute_dtype, tile.device)
        if weight and tile.compute_dtype == torch.float16:
            wide_weight = torch.zeros_like(inputs.weight, dtype=torch.float32).requires_grad_()
            layer.append(wide_weight)
        elif weight:
            inputs = inputs._replace(weight=inputs.weight.detach().requires_grad_())
            layer.append(inputs.weight)
        if bias:
            inputs = inputs._replace(bias=inputs.bias.detach().requires_grad_())
            layer.append(inputs.bias)

        def surrogate(inputs: JointInputs, anchors: Anchors) -> Tensor:
            rows = look_up(tables, node.clamp(min=0))
            weights = planes.at(node, rows.frame // tables.frames)
            product = output_layer(tile, inputs, rows, anchors, wide_weight)
            before = None if kept is None else kept[rows.place]
            return Surrogate.apply(product, inputs.bias, before, rows.label, weights, tile.blank, tile.clamp)

        zeros = checkpoint(
            surrogate, inputs, anchors, use_reentrant=False, preserve_rng_state=False
        )  # dropout draws from no generator
        return list(torch.autograd.grad(zeros, anchors.leaves() + layer, torch.ones_like(zeros)))


def dense_score(tile: DenseTile, logits: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
    """logp_blank, logp_label [rows]."""
    scores = _wide(logits)
    return pick(scores, label, tile.blank, log_sum_exp(scores) if tile.log_softmax else ())


def dense_gradient(
    tile: DenseTile, logits: Tensor, label: Tensor, blank_weight: Tensor, label_weight: Tensor, upstream: Tensor
) -> Tensor:
    """upstream [rows] times g, clamped: [rows, V] in the logits' dtype."""
    scores = _wide(logits)
    lse = log_sum_exp(scores) if tile.log_softmax else ()
    gradient = scores_gradient(scores, label, blank_weight, label_weight, tile.blank, tile.clamp, lse)
    return times_upstream(gradient, upstream, blank_weight, label_weight).to(logits.dtype)


def output_layer(
    tile: Tile, inputs: JointInputs, rows: TileRows, anchors: Anchors, wide_weight: Tensor | None = None
) -> Tensor:
    """product [rows, V] in the compute dtype."""
    hidden = joint(inputs.encoder, inputs.predictor, anchors, rows, tile.activation, tile.dropout_p, tile.compute_dtype)
    if wide_weight is not None:
        return WideProduct.apply(hidden, inputs.weight, wide_weight)
    return torch.nn.functional.linear(hidden, inputs.weight)


def pick(scores: Tensor, label: Tensor, blank: int, lse: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """logp_blank, logp_label [rows] of the logits [rows, V]; lse: its parts; none: they are log-probabilities."""
    blank_score = scores[:, blank]
    label_score = scores.gather(1, label.clamp(0, scores.shape[1] - 1)[:, None])[:, 0]  # labels may be unchecked
    for part in lse:
        blank_score, label_score = blank_score - part, label_score - part
    return blank_score, torch.where(label < 0, 0, label_score)


def scores_gradient(
    scores: Tensor, label: Tensor, blank_weight: Tensor, label_weight: Tensor, blank: int, clamp: float,
    lse: Sequence[Tensor],
) -> Tensor:  # fmt: skip
    """g [rows, V], clamped; exactly 0 in rows whose weights are 0, whatever their logits."""
    v = torch.arange(scores.shape[1], device=scores.device)
    gradient = -torch.where(v == blank, blank_weight[:, None], 0)
    gradient = gradient - torch.where(v == label[:, None], label_weight[:, None], 0)
    if lse:
        weight = (blank_weight + label_weight)[:, None]
        for part in lse:
            scores = scores - part[:, None]
        gradient = gradient + torch.where(weight == 0, 0, weight * torch.exp(scores))
    return gradient.clamp(-clamp, clamp) if clamp > 0 else gradient


def times_upstream(gradient: Tensor, upstream: Tensor, blank_weight: Tensor, label_weight: Tensor) -> Tensor:
    """upstream [rows] times g; 0 in rows whose weights are 0, even when their utterance's upstream gradient is inf."""
    unweighted = (blank_weight == 0) & (label_weight == 0)
    return torch.where(unweighted, 0, upstream)[:, None] * gradient


def log_sum_exp(scores: Tensor) -> tuple[Tensor, Tensor]:
    """The largest score [rows], and the logarithm of the sum of exp(score - largest); their sum is lse.

    NaN, as log_softmax gives, where a score is inf; where all are -inf 0 and -inf.
    """
    classes = scores.shape[1]
    parted = classes > LONGEST_REDUCTION and classes % PART == 0
    if parted:
        scores = scores.unflatten(1, (-1, PART))
    largest = scores.amax(-1)
    total = (scores - _finite(largest)[..., None]).exp().sum(-1)
    if parted:
        parts, largest = largest, largest.amax(1)
        total = (total * (parts - _finite(largest)[:, None]).exp()).sum(1)
    rest = total.log()
    return _finite(largest), torch.where(rest == torch.inf, torch.nan, rest)


def _finite(largest: Tensor) -> Tensor:
    return torch.where(largest.abs() == torch.inf, 0, largest)


def parts_of(lse: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """lse in one or, where it is of more digits than `dtype`, two parts of that dtype, the larger first."""
    if lse.dtype == dtype:
        return (lse,)
    coarse = lse.to(dtype)
    return coarse, (lse - coarse).to(dtype)


class WideProduct(torch.autograd.Function):
    """product [rows, V] of hidden [rows, H] and weight [V, H], a constant: its gradient goes to wide_weight in float32,
    as a sum over the rows of a tile may be beyond float16's range, or below it."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, wide_weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        return torch.nn.functional.linear(hidden, weight)

    @staticmethod
    def backward(ctx: Any, d_product: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight = ctx.saved_tensors
        d_hidden = d_product @ weight if ctx.needs_input_grad[0] else None
        if hidden.is_cuda:  # not torch.mm: torch.compile knows its out_dtype only since torch 2.9
            d_weight = torch.bmm(d_product.T[None], hidden[None], out_dtype=torch.float32)[0]
        else:
            d_weight = d_product.T.float() @ hidden.float()
        return d_hidden, None, d_weight


class Surrogate(torch.autograd.Function):
    """Zeros [rows] whose derivative at the logits is g; before: the product as it was kept, or None."""

    @staticmethod
    def forward(
        ctx: Any, product: Tensor, bias: Tensor, before: Tensor | None, label: Tensor, weights: Tensor,
        blank: int, clamp: float,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(product if before is None else before, bias, label, weights)
        ctx.constants = blank, clamp
        return torch.zeros_like(weights[0])

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        product, bias, label, weights = ctx.saved_tensors
        blank_weight, label_weight, own_upstream, *lse = weights.unbind(0)
        upstream = upstream * own_upstream
        blank, clamp = ctx.constants
        scores = _wide(product) + bias
        gradient = scores_gradient(scores, label, blank_weight, label_weight, blank, clamp, lse)
        gradient = in_memory(times_upstream(gradient, upstream, blank_weight, label_weight).to(product.dtype))
        d_bias = gradient.sum(0, dtype=bias.dtype) if ctx.needs_input_grad[1] else None
        return gradient, d_bias, None, None, None, None, None


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
