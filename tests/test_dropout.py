"""Dropout: one mask a seed, whatever the tile size and the backend, forward and backward; and the mask's quality."""

import pytest
import torch

import rnnt
from rnnt.dropout import keep_mask
from tests.fixtures import joint_sines
from tests.support import (
    Joint,
    assert_budget,
    assert_same_bits,
    gpu_mark,
    joint_budget,
    joint_loss,
    ragged,
    results,
    tilings,
    upstream_of,
)

SEED = 2**40 + 3


@pytest.mark.parametrize(("place", "tile_rows"), tilings())
def test_one_mask_for_every_tile_size_and_backend(place, tile_rows):
    batch = ragged(4, 5, 3, 5, 6, blank=0).cast(place.finest, place.device)
    upstream = upstream_of(batch)
    found = results(batch, upstream, SEED, backend=place.backend, dropout_p=0.4, blank=0, tile_rows=tile_rows)
    assert_budget(found, joint_budget(batch, upstream, seed=SEED, dropout_p=0.4, blank=0))


@pytest.mark.parametrize("activation", ["relu", "sigmoid"])
def test_every_activation(place, activation):
    batch = ragged(3, 5, 3, 5, 6, blank=0).cast(place.finest, place.device)
    options = {"dropout_p": 0.4, "blank": 0, "activation": activation}
    found = results(batch, seed=SEED, backend=place.backend, tile_rows=7, **options)
    assert_budget(found, joint_budget(batch, seed=SEED, **options))


def test_same_seed_same_bits_another_seed_another_mask(place):
    batch = ragged(4, 5, 3, 5, 6, blank=0).cast(place.finest, place.device)
    options = {"backend": place.backend, "dropout_p": 0.4, "blank": 0, "tile_rows": 7}
    first = results(batch, seed=SEED, **options)
    assert_same_bits(results(batch, seed=SEED, **options), first)
    assert not torch.equal(results(batch, **options)["loss"], first["loss"])  # the generator went on
    assert not torch.equal(results(batch, seed=SEED + 1, **options)["loss"], first["loss"])


def test_loss_without_gradient(place):
    batch = ragged(4, 5, 3, 5, 6, blank=0).cast(place.finest, place.device)
    torch.manual_seed(SEED)
    with torch.no_grad():
        loss = joint_loss(batch, reduction="none", backend=place.backend, dropout_p=0.4, blank=0, tile_rows=7)
    assert_budget({"loss": loss}, joint_budget(batch, seed=SEED, dropout_p=0.4, blank=0))


def test_dropout_of_zero_is_none(place):
    batch = ragged(4, 5, 3, 5, 6, blank=0).cast(place.finest, place.device)
    found = results(batch, seed=1, backend=place.backend, dropout_p=0.0, tile_rows=7, blank=0)
    drawn = torch.rand(1, device=place.device)
    assert_same_bits(found, results(batch, seed=1, backend=place.backend, tile_rows=7, blank=0))
    torch.manual_seed(1)
    assert torch.equal(drawn, torch.rand(1, device=place.device))  # nothing was drawn in between


def test_planes_have_the_mask_of_the_loss(place):
    batch = ragged(4, 5, 3, 5, 6, blank=0).cast(place.finest, place.device)
    options = {"backend": place.backend, "dropout_p": 0.4, "blank": 0, "tile_rows": 7}
    torch.manual_seed(SEED)
    planes = rnnt.joint_log_probs(*batch[:3], *batch[4:], linear_bias=batch.linear_bias, **options)
    loss = rnnt.rnnt_loss_from_log_probs(*planes, *batch[5:], reduction="none", backend=place.backend)
    assert_budget({"loss": loss}, joint_budget(batch, seed=SEED, dropout_p=0.4, blank=0))


def test_gradient_is_that_of_the_sampled_loss(place):
    """The central difference along a direction, with the seed set again for each evaluation."""
    sizes = (1, 8, 3, 40, 8) if place.interpreted else (1, 64, 8, 512, 32)
    _, T, U, _, V = sizes
    batch = Joint(
        *joint_sines(*sizes), torch.arange(U)[None] % (V - 1), torch.tensor([T]), torch.tensor([U])
    )  # fmt: skip
    batch = batch.cast(place.finest, place.device)
    found = results(batch, seed=SEED, backend=place.backend, dropout_p=0.5)
    generator = torch.Generator().manual_seed(5)
    way = {name: torch.randn(x.shape, generator=generator, dtype=torch.float64) for name, x in batch.floats().items()}
    way = {name: (x / x.norm()).to(place.device) for name, x in way.items()}
    slope = sum((found[f"d_{name}"].double() * x).sum() for name, x in way.items())

    def loss_at(step):
        torch.manual_seed(SEED)
        moved = batch.floats()
        moved = batch._replace(**{name: (x.double() + step * way[name]).to(x.dtype) for name, x in moved.items()})
        with torch.no_grad():
            return joint_loss(moved, reduction="sum", backend=place.backend, dropout_p=0.5).double()

    step = torch.finfo(place.finest).eps ** (1 / 3)
    difference = (loss_at(step) - loss_at(-step)) / (2 * step)
    # One loss is rounded at its own scale; the third derivative adds step^2.
    rounding = 4 * torch.finfo(place.finest).eps * found["loss"].item() / step
    assert abs(difference - slope) <= rounding + 1e-3 * abs(slope)


def drops(place, tile_rows, T, H, p):
    """keep [T, H]: with H classes, identity weights, no labels and ones for hidden states, a dropped element is a
    zero of the encoder's gradient."""
    batch = Joint(
        torch.ones(1, T, H), torch.zeros(1, 1, H), torch.eye(H), None,
        torch.zeros(1, 0, dtype=torch.int64), torch.tensor([T]), torch.tensor([0]),
    ).cast(torch.float32, place.device)  # fmt: skip
    options = {"backend": place.backend, "activation": "relu", "dropout_p": p, "tile_rows": tile_rows}
    found = results(batch, seed=SEED, **options)
    keep = (found["d_encoder"][0] != 0).cpu()
    # The loss of exactly this mask: kept elements are scaled by 1 / (1 - p).
    logp = torch.log_softmax(keep.double() / (1 - p), dim=-1)[:, -1]
    torch.testing.assert_close(found["loss"].cpu().double(), -logp.sum()[None], rtol=1e-5, atol=0)
    return keep


MASK_TILINGS = [param for param in tilings() if param.values[1] != "auto" or param.values[0].backend == "reference"]


@pytest.mark.parametrize(("place", "tile_rows"), MASK_TILINGS)
def test_quality_of_the_mask(place, tile_rows):
    T, H = (24, 32) if place.interpreted else (200, 512)
    keep = drops(place, tile_rows, T, H, 0.5)
    check_quality(keep, 0.5)
    torch.manual_seed(SEED)
    seed = torch.randint(2**63 - 1, (1,), device=place.device)
    assert torch.equal(keep, keep_mask(seed, torch.arange(T, device=place.device), H, 0.5).cpu())


def check_quality(keep, p):
    """Kept share, and correlation with every near neighbour, within 4 standard deviations of independence."""
    n = keep.numel()
    assert abs(keep.double().mean() - (1 - p)) <= 4 * (p * (1 - p) / n) ** 0.5
    x = (keep.double() - (1 - p)) / (p * (1 - p)) ** 0.5
    for across, along in [(0, 1), (0, 2), (0, 4), (0, 8), (1, 0), (2, 0), (1, 1), (3, 4)]:
        product = x[across:, along:] * x[: x.shape[0] - across, : x.shape[1] - along]
        assert abs(product.mean()) <= 4 / product.numel() ** 0.5, (across, along)
    rows, columns = x.sum(dim=1) / x.shape[1] ** 0.5, x.sum(dim=0) / x.shape[0] ** 0.5  # near standard normal
    for sums in (rows, columns):
        assert abs(sums.square().mean() - 1) <= 4 * (2 / len(sums)) ** 0.5


@pytest.mark.parametrize("p", [0.02, 0.3, 0.5, 0.9])
@pytest.mark.parametrize("seed", [0, 1, 2**62 + 11])
@pytest.mark.parametrize("first_row", [0, 2**32 - 100, 2**40])
def test_quality_everywhere(p, seed, first_row):
    """Any keep share, any seed, and rows on both sides of 2^32."""
    rows = torch.arange(first_row, first_row + 256)
    check_quality(keep_mask(torch.tensor([seed]), rows, 320, p), p)


def test_rows_and_seeds_have_masks_of_their_own():
    """Numbers that agree in their low or high half do not share a mask."""
    seeds = [1, 2, 1 << 32, (1 << 32) + 1]
    rows = [5, 6, 5 + (1 << 32), 5 + (1 << 33)]
    masks = torch.stack([keep_mask(torch.tensor([s]), torch.tensor([r]), 4096, 0.5)[0] for s in seeds for r in rows])
    agree = (masks[:, None] == masks[None]).double().mean(-1)
    apart = agree[~torch.eye(len(masks), dtype=torch.bool)]
    assert (apart - 0.5).abs().max() <= 5 * 0.5 / 4096**0.5  # 240 pairs


def test_mask_of_a_row_does_not_depend_on_its_neighbours():
    seed = torch.tensor([SEED])
    rows = torch.arange(100).reshape(4, 25)
    mask = keep_mask(seed, rows, 17, 0.3)
    assert mask.shape == (4, 25, 17)
    assert torch.equal(mask[2, 3:4], keep_mask(seed, rows[2, 3:4], 17, 0.3))
    assert torch.equal(mask[..., :5], keep_mask(seed, rows, 5, 0.3))


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=gpu_mark("cuda"))])
def test_mask_is_the_same_on_every_device(device):
    seed, rows = torch.tensor([SEED]), torch.arange(2**32 - 50, 2**32 + 50)
    assert torch.equal(keep_mask(seed.to(device), rows.to(device), 300, 0.3).cpu(), keep_mask(seed, rows, 300, 0.3))
