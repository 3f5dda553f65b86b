"""Laws that hold whatever the numbers are: symmetries of the loss, and what must not make a difference.

Where a law says that two calls agree, both are held to the error budget against one and the same truth.
"""

import pytest
import torch

import rnnt
from tests.fixtures import P, j_p, s_p, sines
from tests.support import (
    Budget,
    Joint,
    assert_budget,
    assert_same_bits,
    budget_of,
    joint_budget,
    joint_loss,
    logits_results,
    ragged,
    results,
    tilings,
    upstream_of,
    with_gradients,
)

BLANK = 0


def batch_at(place) -> Joint:
    """B4-T5-U3-V5-H6: full, one frame, no labels, and one in between."""
    batch = ragged(4, 5, 3, 5, 6, blank=BLANK)
    batch = batch._replace(encoder_lengths=torch.tensor([5, 1, 4, 2]), target_lengths=torch.tensor([3, 3, 0, 2]))
    return batch.cast(place.finest, place.device)


def run(place, batch: Joint, upstream=None, **options) -> dict[str, torch.Tensor]:
    return results(batch, upstream, **{"backend": place.backend, "blank": BLANK, "tile_rows": 7, **options})


def budget(batch: Joint, upstream=None) -> Budget:
    return joint_budget(batch, upstream, blank=BLANK)


def test_class_gradients_of_a_node_add_up_to_zero(place):
    logits = s_p().to(place.device, place.finest)
    for options in ({}, {"fastemit_lambda": 0.1}):
        gradient = logits_results(logits, *P, blank=0, backend=place.backend, **options)["d_logits"].double()
        eager = logits_results(logits, *P, blank=0, backend="reference", **options)["d_logits"].double()
        band = torch.finfo(place.finest).eps * gradient.abs().sum(dim=-1)
        assert (gradient.sum(dim=-1).abs() <= 2 * eager.sum(dim=-1).abs().max() + band).all()


@pytest.mark.parametrize("scale", [1, 10, 100])
def test_losses_are_not_negative(place, scale):
    logits = scale * sines(2, 4, 3, 5).to(place.device, place.finest)
    assert (logits_results(logits, *P, blank=0, backend=place.backend)["loss"] >= 0).all()


def test_a_certain_path_costs_nothing(place):
    """Labels first, then blanks: every arc of this path has all the probability."""
    logits = torch.zeros(1, 3, 3, 5, dtype=place.finest, device=place.device)
    logits[0, 0, 0, 1] = logits[0, 0, 1, 2] = logits[0, :, 2, 0] = 1000.0
    args = torch.tensor([[1, 2]]), torch.tensor([3]), torch.tensor([2])
    found = logits_results(logits, *args, blank=0, backend=place.backend)
    assert found["loss"].item() == 0
    assert not found["d_logits"].any()


def test_alone_as_in_the_batch(place):
    batch = batch_at(place)
    upstream = upstream_of(batch)
    expected = budget(batch, upstream)
    assert_budget(run(place, batch, upstream), expected)
    pieces = []
    for b in range(len(upstream)):
        T, U = int(batch.encoder_lengths[b]), int(batch.target_lengths[b])
        alone = batch._replace(
            encoder=batch.encoder[b : b + 1, :T], predictor=batch.predictor[b : b + 1, : U + 1],
            targets=batch.targets[b : b + 1, :U], encoder_lengths=batch.encoder_lengths[b : b + 1],
            target_lengths=batch.target_lengths[b : b + 1],
        )  # fmt: skip
        found = run(place, alone, upstream[b : b + 1])
        found["d_encoder"] = torch.nn.functional.pad(found["d_encoder"], (0, 0, 0, 5 - T))
        found["d_predictor"] = torch.nn.functional.pad(found["d_predictor"], (0, 0, 0, 3 - U))
        pieces.append(found)
    together = {name: torch.cat([x[name] for x in pieces]) for name in ("loss", "d_encoder", "d_predictor")}
    for name in ("d_linear_weight", "d_linear_bias"):
        together[name] = sum(x[name] for x in pieces)
    assert_budget(together, expected)


def test_order_of_the_batch(place):
    batch = batch_at(place)
    upstream, order = upstream_of(batch), torch.tensor([2, 0, 3, 1])
    expected = budget(batch, upstream)
    fields = ("encoder", "predictor", "targets", "encoder_lengths", "target_lengths")
    shuffled = batch._replace(**{name: getattr(batch, name)[order] for name in fields})
    found = run(place, shuffled, upstream[order])
    for name in ("loss", "d_encoder", "d_predictor"):
        found[name] = found[name][order.argsort()]
    assert_budget(found, expected)


@pytest.mark.parametrize(("place", "tile_rows"), tilings())
def test_size_of_a_tile(place, tile_rows):
    batch = batch_at(place)
    upstream = upstream_of(batch)
    assert_budget(run(place, batch, upstream, tile_rows=tile_rows), budget(batch, upstream))


@pytest.mark.parametrize("seed", [1, 2])
def test_names_of_the_classes(place, seed):
    batch = batch_at(place)
    upstream = upstream_of(batch)
    expected = budget(batch, upstream)
    name = torch.randperm(5, generator=torch.Generator().manual_seed(seed)).to(place.device)  # new name of each class
    renamed = batch._replace(
        linear_weight=batch.linear_weight[name.argsort()],
        linear_bias=batch.linear_bias[name.argsort()],
        targets=name[batch.targets],
    )
    found = run(place, renamed, upstream, blank=int(name[BLANK]))
    for gradient in ("d_linear_weight", "d_linear_bias"):
        found[gradient] = found[gradient][name]
    assert_budget(found, expected)


def test_upstream_gradient_is_a_factor(place):
    """Minus one turns every sign and nothing else; zero gives zeros; a sum is what its parts give."""
    batch = batch_at(place)
    upstream = upstream_of(batch)
    found = run(place, batch, upstream)
    turned = run(place, batch, -upstream)
    assert_same_bits(turned, {name: x if name == "loss" else -x for name, x in found.items()})
    for name, x in run(place, batch, 0 * upstream).items():
        assert name == "loss" or not x.any(), name
    only = torch.diag(upstream)
    parts = [run(place, batch, only[b]) for b in range(len(upstream))]
    summed = {name: sum(part[name] for part in parts) for name in found if name != "loss"}
    assert_budget({"loss": found["loss"], **summed}, budget(batch, upstream))


def test_unlabelled_rest_of_the_batch_gets_no_gradient(place):
    """An utterance with upstream 0 leaves exact zeros at its own states."""
    found = run(place, batch_at(place), torch.tensor([0.0, 1.0, 0.0, -1.0]))
    for name in ("d_encoder", "d_predictor"):
        assert not found[name][[0, 2]].any(), name
        assert found[name][[1, 3]].any(), name


def test_twice_gives_the_same_bits(place):
    batch = batch_at(place)
    upstream = upstream_of(batch)
    for tile_rows in (7, None):
        first = run(place, batch, upstream, tile_rows=tile_rows)
        assert_same_bits(run(place, batch, upstream, tile_rows=tile_rows), first)


@pytest.mark.parametrize("options", [{"tile_rows": 7}, {"tile_rows": None}, {"clamp": 0.1}], ids=str)
def test_retained_graph(place, options):
    batch = with_gradients(batch_at(place))
    upstream = upstream_of(batch).to(batch.encoder)
    loss = joint_loss(batch, reduction="none", backend=place.backend, blank=BLANK, **options)
    first = torch.autograd.grad(loss, list(batch.floats().values()), upstream, retain_graph=True)
    second = torch.autograd.grad(loss, list(batch.floats().values()), 2 * upstream)
    for name, once, twice in zip(batch.floats(), first, second, strict=True):
        assert torch.equal(2 * once, twice), name


def test_retained_graph_of_logits(place):
    logits = s_p().to(place.device, place.finest).requires_grad_()
    loss = rnnt_losses(place, logits)
    (first,) = torch.autograd.grad(loss.sum(), logits, retain_graph=True)
    (second,) = torch.autograd.grad(loss.sum(), logits)
    assert torch.equal(first, second)


def rnnt_losses(place, logits):
    return rnnt.rnnt_loss(logits, *(x.to(place.device) for x in P), blank=0, reduction="none", backend=place.backend)


def strided(x: torch.Tensor) -> torch.Tensor:
    """The same values with the axes laid out in reverse, every second element of a larger tensor."""
    wide = torch.stack([x, torch.full_like(x, torch.nan)])
    order = list(range(wide.dim()))[::-1]
    return wide.permute(order).contiguous().permute(order)[0]


def test_any_strides(place):
    batch = batch_at(place)
    upstream = upstream_of(batch)
    odd = batch._replace(**{name: strided(x) for name, x in batch.floats().items()})
    odd = odd._replace(
        targets=batch.targets.T.contiguous().T,
        encoder_lengths=torch.stack([batch.encoder_lengths, batch.encoder_lengths], dim=1)[:, 0],
    )
    assert not any(x.is_contiguous() for x in odd.floats().values())
    leaves = odd._replace(**{name: x.requires_grad_() for name, x in odd.floats().items()})
    options = {"reduction": "none", "backend": place.backend, "blank": BLANK, "tile_rows": 7}
    loss = joint_loss(leaves, **options)
    loss.backward(upstream.to(loss))
    found = {"loss": loss.detach(), **{f"d_{name}": x.grad for name, x in leaves.floats().items()}}
    assert_budget(found, budget(batch, upstream))


def test_planes_of_any_strides(place):
    """As contiguous ones, which a compiled graph has seen before: a class of a log_softmax, expanded, and so on."""
    B, T, U = 2, 5, 2
    torch.manual_seed(0)
    x = torch.randn(B, 2 * T, U + 1, 7, dtype=place.finest).log_softmax(-1).to(place.device)
    lengths = torch.tensor([5, 4], device=place.device), torch.tensor([2, 1], device=place.device)

    def found(blank: torch.Tensor, label: torch.Tensor) -> dict[str, torch.Tensor]:
        leaves = blank.detach().requires_grad_(), label.detach().requires_grad_()
        loss = rnnt.rnnt_loss_from_log_probs(*leaves, *lengths, reduction="none", backend=place.backend)
        return {"loss": loss, **dict(zip(("blank", "label"), torch.autograd.grad(loss.sum(), leaves), strict=True))}

    everything = (
        x[:, :T, :, 0],
        x[:, ::2, :, 1],
        x[:, :T, :, 2].mT.contiguous().mT,
        x[:1, :1, :1, 3].expand(B, T, U + 1),
    )
    for blank in everything:
        label = x[:, :T, :U, 4]
        expected = found(blank.contiguous(), label.contiguous())
        assert_same_bits(found(blank, label), expected)


def test_expanded_inputs(place):
    """Stride 0: one encoder frame for all, one predictor state for all; and an upstream gradient of stride 0."""
    batch = batch_at(place)
    frame = batch.encoder[:1, :1].clone().requires_grad_()
    state = batch.predictor[:1, :1].clone().requires_grad_()
    wide = batch._replace(encoder=frame.expand_as(batch.encoder), predictor=state.expand_as(batch.predictor))
    loss = joint_loss(wide, reduction="sum", backend=place.backend, blank=BLANK, tile_rows=7)
    loss.backward()

    def dense(batch: Joint) -> dict[str, torch.Tensor]:
        found = results(batch, backend="reference", blank=BLANK)
        frame, state = found["d_encoder"].sum((0, 1)), found["d_predictor"].sum((0, 1))
        return {"loss": found["loss"].sum(), "d_frame": frame, "d_state": state}

    found = {"loss": loss.detach(), "d_frame": frame.grad[0, 0], "d_state": state.grad[0, 0]}
    assert_budget(found, budget_of(wide, dense))


@pytest.mark.parametrize("tile_rows", [7, None])
def test_hooks_on_saved_tensors_see_none_of_a_tiles(place, tile_rows):
    """What a caller does to saved tensors while the backward pass runs (offloading, say) is not done to each tile's."""

    def gradients(hooks):
        batch = with_gradients(j_p().cast(place.finest, place.device))
        loss = joint_loss(batch, reduction="sum", blank=0, backend=place.backend, tile_rows=tile_rows)
        with torch.autograd.graph.saved_tensors_hooks(*hooks):
            return torch.autograd.grad(loss, list(batch.floats().values()))

    packed = []

    def pack(x):
        packed.append(x)
        return x.contiguous().clone()

    plain, hooked = gradients((lambda x: x, lambda x: x)), gradients((pack, lambda x: x))
    assert not packed
    for right, found in zip(plain, hooked, strict=True):
        assert torch.equal(found, right)
