"""The joint's pipeline in order: joint -> log_probs -> lattice -> losses [B], and back.

    forward     for each tile of all rows { score } -> planes -> lattice -> losses, weights of the nodes
    backward    for each tile of live rows { gradients } -> d_encoder, d_predictor, d_weight, d_bias

The gradient at a row is its weights (the occupancies of its two arcs, FastEmit's share included) times a bounded vector
times its utterance's upstream gradient.  Rows whose occupancy is below the threshold get weight 0; a row is live when a
weight is not 0, and the others take no part in the backward pass.  `joint_log_probs` differs in its weights alone.

Running sums of gradients are float32 (float64 stays float64), taken in a fixed order, cast to their input's dtype once.
What is kept from forward to backward is two weights and lse of a node; untiled, the products too.  The backward pass
waits for the device, before its tiles, to read how many rows are live and where tiles begin among them; where the
caller wants no waiting (validate=False), all nodes are sent.

The passes are operators of torch.library, opaque to torch.compile of a model around them.
Before: backends.py.  Beside: dense_loss.py, which enters the pipeline later.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rnnt.compiled import lattice, log_probs
from rnnt.compiled.joint import GatherSums, IndexSums, matrix
from rnnt.compiled.log_probs import JointInputs, Planes, Tile
from rnnt.compiled.tiles import (
    LARGEST_TILE,
    all_nodes,
    compiled,
    live_nodes,
    mark_dynamic,
    nodes,
    plane,
    static_size,
    tables_of,
    tiles_of,
    vector,
)
from rnnt.layout import dense_mask, label_mask
from rnnt.problem import Alignment, JointProblem, lse_dtype
from rnnt.scale import scale_of

ALIGNMENT = 16, 64  # classes of less than 512, and of more: whole blocks of a matrix product
FLOAT16_SHIFT = 12
LONGEST_SUM = 2**13  # rows of a float32 product over rows: longer ones, in one chain of additions, lose digits


def joint_loss(problem: JointProblem) -> Tensor:
    losses, *_ = joint_loss_operator(
        *_arguments(problem), problem.fastemit_lambda, problem.occupancy_threshold, _wanted(problem)
    )
    return losses


def joint_log_probs(problem: JointProblem) -> tuple[Tensor, Tensor]:
    logp_blank, logp_label, *_ = joint_log_probs_operator(*_arguments(problem), _wanted(problem))
    return logp_blank, logp_label


def _floats(problem: JointProblem) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    return problem.encoder, problem.predictor, problem.linear_weight, problem.linear_bias


def _wanted(problem: JointProblem) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in _floats(problem))


# The two passes over tiles.


def _score(problem: JointProblem, keep: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """logp_blank, logp_label (its last column is of no use), lse [B, T, U1]; room for `keep` rows' products [keep, V],
    0: none are kept."""
    alignment, node = problem.alignment, all_nodes(problem.alignment)
    inputs = _constants(problem)
    size = _size(problem.linear_weight, problem.compute_dtype, problem.tile_rows)
    call = compiled(log_probs.score, _tile(problem, inputs, size, keep > 0))
    kept = inputs.weight.new_empty((keep, len(inputs.weight)))
    parts = iter(kept.split(size))
    tables = tables_of(alignment, keep=False, seed=problem.seed)
    values = []
    for tile in tiles_of(alignment, node, size, missing=0):  # whose scores are of no use
        *found, lse = call(inputs, tile, tables)
        if keep:
            next(parts).copy_(found.pop(0))  # which frees it before the next tile
        values.append((*found, lse))
    logp_blank, logp_label, lse = (plane(x, node, alignment) for x in zip(*values, strict=True))
    return logp_blank, logp_label, lse, kept


def _gradients(
    problem: JointProblem, blank: Tensor, label: Tensor, lse: Tensor, upstream: Tensor, kept: Tensor,
    needed: list[bool],
) -> list[Tensor]:  # fmt: skip
    """Gradients of the four float inputs, empty where they are not needed; weights and lse [B, T, U1], upstream [B]."""
    alignment, wide = problem.alignment, blank.dtype
    features = problem.encoder.shape[2]
    size = _size(problem.linear_weight, problem.compute_dtype, problem.tile_rows, backward=True)
    unit = _unit(problem, upstream, blank, label)
    upstream = upstream / unit

    inputs = _constants(problem)
    layer = zip((inputs.weight, inputs.bias), needed[2:], strict=True)
    layer_sums = [torch.zeros_like(x, dtype=wide) for x, need in layer if need]

    products = mark_dynamic(kept, 0) if len(kept) > 0 else None
    tables = tables_of(alignment, keep=products is not None, seed=problem.seed)
    planes = Planes(*(vector(x) for x in (blank, label, lse, upstream)))
    sums_type = IndexSums if problem.device.type == "cpu" else GatherSums
    tile = _tile(problem, inputs, size, products is not None, needed, sums_type is GatherSums)
    call = compiled(log_probs.gradients, tile, differentiates=True)

    live = live_nodes(blank, label, alignment)  # waits for the device, which is still busy with the forward pass
    sums = sums_type(live, alignment, size, features, needed[:2], problem.compute_dtype)
    for number, node in enumerate(tiles_of(alignment, live.node, size, missing=-1)):
        gradients = call(inputs, node, tables, planes, products, sums.places_of(number))
        for total in reversed(layer_sums):
            total += gradients.pop()  # which frees it before the next tile
        sums.add(number, node, gradients)
        del gradients
    found = iter([x for x, need in zip(sums.results(), needed, strict=False) if need] + layer_sums)
    return [
        _times(next(found)[: len(x)], unit, x.dtype) if need else x.new_empty(0) for x, need in _needed(problem, needed)
    ]


def _times(x: Tensor, unit: Tensor, dtype: torch.dtype) -> Tensor:
    """x times unit in `dtype`, without the product in x's dtype."""
    return torch.mul(x, unit, out=torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format))


def _unit(problem: JointProblem, upstream: Tensor, blank: Tensor, label: Tensor) -> Tensor:
    """Power of two, by which the upstream gradients [B] are divided on their way: gradients travel in the compute dtype
    at the scale of one utterance, whatever scale the caller gives the loss.

    float16 has little range, so it is used to the top: d_logits, at most twice the largest of the weights blank and
    label, is scaled up to 2^13, unless d_pre, at most twice that times the largest |weight|, came above 2^15 then.
    """
    unit = scale_of(upstream).to(blank.dtype)
    if problem.compute_dtype == torch.float16:
        largest = scale_of(problem.linear_weight).to(unit.dtype) / (1 - problem.dropout_p)
        unit = unit * scale_of(blank, label) / torch.clamp(2.0**13 / scale_of(largest), max=2.0**FLOAT16_SHIFT)
    return unit


def _needed(problem: JointProblem, needed: list[bool]) -> list[tuple[Tensor, bool]]:
    """The four float inputs (an absent bias is its own gradient, empty), and whether their gradients are needed."""
    inputs = [problem.linear_weight if x is None else x for x in _floats(problem)]
    return list(zip(inputs, needed, strict=True))


def _constants(problem: JointProblem) -> JointInputs:
    """The tile's inputs; classes are padded to whole rows of memory with scores of -inf, whose probability is 0: a
    library's matrix product is slow on a vocabulary of 1025."""
    weight, bias = problem.linear_weight.detach(), problem.linear_bias
    missing = _padded(len(weight)) - len(weight)
    wide = torch.promote_types(problem.compute_dtype, torch.float32)
    bias = weight.new_zeros(len(weight), dtype=wide) if bias is None else bias.detach().to(wide)
    weight = weight.to(problem.compute_dtype)
    if missing:
        weight = torch.nn.functional.pad(weight, (0, 0, 0, missing))
        bias = torch.nn.functional.pad(bias, (0, missing), value=-torch.inf)
    return JointInputs(
        encoder=matrix(problem.encoder),
        predictor=matrix(problem.predictor),
        weight=weight.contiguous(),
        bias=bias.contiguous(),
    )


def _padded(classes: int) -> int:
    multiple = ALIGNMENT[classes > 512]
    return -(-classes // multiple) * multiple


def _tile(
    problem: JointProblem,
    inputs: JointInputs,
    rows: int,
    keep: bool,
    needed: Sequence[bool] = (),
    gathers: bool = False,
) -> Tile:
    return Tile(
        rows=rows,
        features=problem.encoder.shape[2],
        classes=len(inputs.weight),
        inputs=tuple(x.dtype for x in inputs),
        needed=tuple(needed),
        gathers=gathers,
        device=problem.device,
        compute_dtype=problem.compute_dtype,
        activation=problem.activation,
        dropout_p=problem.dropout_p,
        blank=problem.alignment.blank,
        clamp=problem.clamp,
        keep=keep,
    )


def _size(weight: Tensor, dtype: torch.dtype, tile_rows: int | str | None, backward: bool = False) -> int:
    """Rows of a tile."""
    classes, features = _padded(len(weight)), weight.shape[1]
    row_bytes = (classes + features) * dtype.itemsize  # product, over which its gradient is laid, and hidden
    size = static_size(tile_rows, row_bytes, dtype, weight.device)
    if backward and dtype.itemsize >= 4 and not isinstance(tile_rows, int):
        size = min(size, LONGEST_SUM)
    return size


def clipped_tile_rows(problem: JointProblem) -> int | str | None:
    """tile_rows, of which not many more than the lattice's nodes are of any use; in powers of two, and only for tiles
    beyond those of "auto", so that batches of other sizes are not compiled anew."""
    if not isinstance(problem.tile_rows, int) or problem.tile_rows <= LARGEST_TILE["cuda"]:
        return problem.tile_rows
    most = 1 << (int(nodes(problem.alignment)) - 1).bit_length()
    return min(problem.tile_rows, max(most, LARGEST_TILE["cuda"]))


def _kept_rows(rows: int, weight: Tensor, dtype: torch.dtype) -> int:
    """Whole tiles for the rows that a caller asks for: known before any length is read, as torch.compile wants it."""
    size = _size(weight, dtype, None)
    return -(-rows // size) * size


# Operators.  Their arguments are a problem taken apart: floats, integers, then what is not a tensor; rows 0: N is not
# known, as lengths are not when torch.compile traces a model.


def _arguments(problem: JointProblem) -> tuple[Any, ...]:
    alignment, tile_rows = problem.alignment, problem.tile_rows
    return (
        *_floats(problem), alignment.targets, alignment.encoder_lengths, alignment.target_lengths, problem.seed,
        alignment.blank, 0 if torch.compiler.is_compiling() else alignment.rows, alignment.host_sync,
        problem.activation, problem.dropout_p, problem.clamp,
        tile_rows if isinstance(tile_rows, int) else 0, tile_rows is None,
        problem.compute_dtype,
    )  # fmt: skip


def _problem(
    encoder: Tensor, predictor: Tensor, linear_weight: Tensor, linear_bias: Tensor | None,
    targets: Tensor, encoder_lengths: Tensor, target_lengths: Tensor, seed: Tensor | None,
    blank: int, rows: int, host_sync: bool, activation: str, dropout_p: float, clamp: float,
    tile_rows: int, untiled: bool, dtype: torch.dtype,
    fastemit_lambda: float = 0.0, occupancy_threshold: float = 0.0,
) -> JointProblem:  # fmt: skip
    frames = encoder.shape[1]
    if rows == 0:  # not known yet
        rows = int((encoder_lengths * (target_lengths + 1)).sum()) if host_sync else _capacity(encoder, predictor)
    problem = JointProblem(
        encoder, predictor, linear_weight, linear_bias,
        Alignment(targets, encoder_lengths, target_lengths, blank, frames, rows, host_sync),
        activation, dropout_p, seed, fastemit_lambda, clamp, None if untiled else tile_rows or "auto",
        occupancy_threshold, dtype,
    )  # fmt: skip
    return replace(problem, tile_rows=clipped_tile_rows(problem))


@torch.library.custom_op("rnnt::compiled_joint_loss", mutates_args=())
def joint_loss_operator(
    encoder: Tensor, predictor: Tensor, linear_weight: Tensor, linear_bias: Tensor | None,
    targets: Tensor, encoder_lengths: Tensor, target_lengths: Tensor, seed: Tensor | None,
    blank: int, rows: int, host_sync: bool, activation: str, dropout_p: float, clamp: float,
    tile_rows: int, untiled: bool, dtype: torch.dtype,
    fastemit_lambda: float, occupancy_threshold: float, with_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """losses [B]; for the backward pass, else empty, two weights [B, T, U1], lse [B, T, U1] and, untiled, products
    [rows, V]."""
    problem = _problem(
        encoder, predictor, linear_weight, linear_bias, targets, encoder_lengths, target_lengths, seed,
        blank, rows, host_sync, activation, dropout_p, clamp, tile_rows, untiled, dtype,
    )  # fmt: skip
    with torch.no_grad():
        rows = rows or _capacity(encoder, predictor)
        keep = _kept_rows(rows, linear_weight, dtype) if untiled and with_gradient else 0
        logp_blank, logp_label, lse, kept = _score(problem, keep)
        losses, blank_weight, label_weight = lattice.losses_and_weights(
            logp_blank, logp_label, problem.alignment, fastemit_lambda, occupancy_threshold, with_gradient
        )
    return losses, blank_weight, label_weight, lse if with_gradient else lse.new_empty((0, 0, 0)), kept


@torch.library.custom_op("rnnt::compiled_joint_log_probs", mutates_args=())
def joint_log_probs_operator(
    encoder: Tensor, predictor: Tensor, linear_weight: Tensor, linear_bias: Tensor | None,
    targets: Tensor, encoder_lengths: Tensor, target_lengths: Tensor, seed: Tensor | None,
    blank: int, rows: int, host_sync: bool, activation: str, dropout_p: float, clamp: float,
    tile_rows: int, untiled: bool, dtype: torch.dtype, with_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """logp_blank [B, T, U1], logp_label [B, T, U]; for the backward pass, else empty, lse [B, T, U1] and, untiled,
    products [rows, V]."""
    problem = _problem(
        encoder, predictor, linear_weight, linear_bias, targets, encoder_lengths, target_lengths, seed,
        blank, rows, host_sync, activation, dropout_p, clamp, tile_rows, untiled, dtype,
    )  # fmt: skip
    with torch.no_grad():
        rows = rows or _capacity(encoder, predictor)
        keep = _kept_rows(rows, linear_weight, dtype) if untiled and with_gradient else 0
        logp_blank, logp_label, lse, kept = _score(problem, keep)
    return logp_blank, logp_label[:, :, :-1].contiguous(), lse if with_gradient else lse.new_empty((0, 0, 0)), kept


@torch.library.custom_op("rnnt::compiled_joint_backward", mutates_args=())
def joint_backward_operator(
    encoder: Tensor, predictor: Tensor, linear_weight: Tensor, linear_bias: Tensor | None,
    targets: Tensor, encoder_lengths: Tensor, target_lengths: Tensor, seed: Tensor | None,
    blank: int, rows: int, host_sync: bool, activation: str, dropout_p: float, clamp: float,
    tile_rows: int, untiled: bool, dtype: torch.dtype,
    blank_weight: Tensor, label_weight: Tensor, lse: Tensor, kept: Tensor, upstream: Tensor, needed: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """d_encoder, d_predictor, d_linear_weight, d_linear_bias; empty where not needed."""
    problem = _problem(
        encoder, predictor, linear_weight, linear_bias, targets, encoder_lengths, target_lengths, seed,
        blank, rows, host_sync, activation, dropout_p, clamp, tile_rows, untiled, dtype,
    )  # fmt: skip
    with _above_autograd(), torch.no_grad(), torch.autocast(encoder.device.type, enabled=False):
        gradients = _gradients(problem, blank_weight, label_weight, lse, upstream, kept, needed)
    d_encoder, d_predictor, d_weight, d_bias = gradients
    return d_encoder, d_predictor, d_weight, d_bias


def _above_autograd() -> AbstractContextManager[None]:
    """PyTorch runs operators with autograd's dispatch keys excluded; differentiating a tile needs them."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in (torch._C.DispatchKey.AutogradFunctionality, torch._C.DispatchKey.AutogradOther):
        excluded = excluded.remove(key)
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded)


@joint_loss_operator.register_fake
def _(encoder, predictor, *arguments):  # type: ignore[no-untyped-def]
    untiled, dtype, *_, with_gradient = arguments[13:]
    losses = encoder.new_empty(len(encoder), dtype=torch.promote_types(dtype, torch.float32))
    weights = [losses.new_empty(_nodes(encoder, predictor, with_gradient)) for _ in range(2)]
    lse = losses.new_empty(weights[0].shape, dtype=lse_dtype(dtype))
    rows = arguments[7] or _capacity(encoder, predictor)
    return losses, *weights, lse, _kept(arguments[0], untiled and with_gradient, rows, dtype)


@joint_log_probs_operator.register_fake
def _(encoder, predictor, *arguments):  # type: ignore[no-untyped-def]
    untiled, dtype, with_gradient = arguments[13:]
    blank = encoder.new_empty(_nodes(encoder, predictor), dtype=torch.promote_types(dtype, torch.float32))
    label = torch.empty_like(blank[:, :, :-1], memory_format=torch.contiguous_format)
    lse = blank.new_empty(_nodes(encoder, predictor, with_gradient), dtype=lse_dtype(dtype))
    rows = arguments[7] or _capacity(encoder, predictor)
    return blank, label, lse, _kept(arguments[0], untiled and with_gradient, rows, dtype)


@joint_backward_operator.register_fake
def _(encoder, predictor, linear_weight, linear_bias, *arguments):  # type: ignore[no-untyped-def]
    inputs = encoder, predictor, linear_weight, linear_weight if linear_bias is None else linear_bias
    return tuple(x.new_empty(x.shape if need else 0) for x, need in zip(inputs, arguments[-1], strict=True))


def _capacity(encoder: Tensor, predictor: Tensor) -> int:
    return len(encoder) * encoder.shape[1] * predictor.shape[1]


def _nodes(encoder: Tensor, predictor: Tensor, exist: bool = True) -> tuple[int, int, int]:
    return (len(encoder), encoder.shape[1], predictor.shape[1]) if exist else (0, 0, 0)


def _kept(weight: Tensor, exists: bool, rows: int, dtype: torch.dtype) -> Tensor:
    return weight.new_empty((_kept_rows(rows, weight, dtype) if exists else 0, _padded(len(weight))), dtype=dtype)


def _joint_context(ctx: Any, inputs: tuple[Any, ...], *results: Tensor) -> None:
    ctx.save_for_backward(*inputs[:8], *results)
    ctx.numbers = inputs[8:17]
    ctx.set_materialize_grads(False)


def _joint_backward(
    ctx: Any, tensors: list[Tensor], blank: Tensor, label: Tensor, lse: Tensor, kept: Tensor, upstream: Tensor
) -> list[Tensor | None]:
    needed = [need and x is not None for need, x in zip(ctx.needs_input_grad[:4], tensors[:4], strict=True)]
    gradients = joint_backward_operator(*tensors, *ctx.numbers, blank, label, lse, kept, upstream, needed)
    return [gradient if need else None for gradient, need in zip(gradients, needed, strict=True)]


def _joint_loss_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, *for_backward = output
    ctx.mark_non_differentiable(*for_backward)
    _joint_context(ctx, inputs, *for_backward)


def _joint_loss_backward(ctx: Any, d_losses: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    if d_losses is None:
        return (None,) * 20
    *tensors, blank, label, lse, kept = ctx.saved_tensors  # once: activation checkpointing forbids a second look
    return *_joint_backward(ctx, tensors, blank, label, lse, kept, d_losses), *(None,) * 16


def _joint_log_probs_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, _, *for_backward = output
    ctx.mark_non_differentiable(*for_backward)
    _joint_context(ctx, inputs, *for_backward)
    ctx.shape = output[0].shape


def _joint_log_probs_backward(ctx: Any, d_blank: Tensor | None, d_label: Tensor | None, *_: None) -> tuple[Any, ...]:
    """The weights are minus the gradients of the planes, which are not read outside the lengths."""
    *tensors, lse, kept = ctx.saved_tensors
    encoder, _, _, _, targets, encoder_lengths, target_lengths, _ = tensors
    blank, rows, host_sync = ctx.numbers[:3]
    alignment = Alignment(targets, encoder_lengths, target_lengths, blank, encoder.shape[1], rows, host_sync)
    inside, has_label = dense_mask(alignment), label_mask(alignment)
    zero = lse.new_zeros((), dtype=torch.promote_types(ctx.numbers[-1], torch.float32))
    blank_weight = label_weight = zero.expand(ctx.shape)
    if d_blank is not None:
        blank_weight = torch.where(inside, -d_blank, zero)
    if d_label is not None:
        label_weight = torch.nn.functional.pad(torch.where(has_label, -d_label, zero), (0, 1))
    upstream = zero.new_ones(ctx.shape[0])
    return *_joint_backward(ctx, tensors, blank_weight, label_weight, lse, kept, upstream), *(None,) * 14


joint_loss_operator.register_autograd(_joint_loss_backward, setup_context=_joint_loss_context)
joint_log_probs_operator.register_autograd(_joint_log_probs_backward, setup_context=_joint_log_probs_context)
