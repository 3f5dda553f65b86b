"""Faults that users of transducer losses met in public, as small inputs with known values: the joint network.

Every value was computed by path enumeration in float64 and is printed to 8 decimals.
"""

import pytest
import torch

import rnnt
from tests import fixtures
from tests.fixtures import FRAMES_P, LABELS_P, TARGETS_P, j_p
from tests.support import Joint, assert_budget, check_budget, check_printed, joint_budget, results, tilings

ACTIVATIONS = ["relu", "tanh"]


def numbers(batch, upstream=None, **options):
    """compute(backend, cast) for check_printed: loss, gradients, and their absolute sums under "|d_x|"."""

    def compute(backend, cast):
        found = results(batch.each(cast), upstream, backend=backend, **options)
        sizes = {f"|{name}|": x.double().abs().sum() for name, x in found.items() if name != "loss"}
        return {**found, **sizes}

    return compute


def sizes_j_p(activation):
    return {f"|{name}|": size for name, size in fixtures.GRADIENT_SIZES_J_P[activation].items()}


@pytest.mark.parametrize(("place", "tile_rows"), tilings())
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_batch_p(place, activation, tile_rows):
    expected = {"loss": fixtures.LOSSES_J_P[activation], **sizes_j_p(activation)}
    check_printed(place, numbers(j_p(), blank=0, activation=activation, tile_rows=tile_rows), expected)


@pytest.mark.parametrize(("activation", "size"), [("relu", 10.76725951), ("tanh", 24.26401821)])
def test_weighting_of_single_utterances(place, activation, size):
    """An upstream vector weights each utterance's own share of the weight's gradient."""
    compute = numbers(j_p(), torch.tensor([1.0, -2.0]), blank=0, activation=activation)
    check_printed(place, compute, {"|d_linear_weight|": size})


BIAS = [0.5, -1, 2, 0, 1]
D_BIAS = [-2.37186491, 0.14015588, 1.81510616, 0.38098319, 0.03561968]


@pytest.mark.parametrize(("place", "tile_rows"), tilings())
@pytest.mark.parametrize("zero", ["states", "weight"])
def test_bias_counts_once(place, zero, tile_rows):
    """With the bias alone every node has the same scores p: loss = -(T ln p(blank) + sum ln p(y) + ln C(T+U-1, U))."""
    encoder, predictor, weight, _ = fixtures.joint_sines(1, 3, 2, 6, 5)
    if zero == "states":
        encoder, predictor = torch.zeros_like(encoder), torch.zeros_like(predictor)
    else:
        weight = torch.zeros_like(weight)
    bias = torch.tensor(BIAS, dtype=torch.float64)
    batch = Joint(encoder, predictor, weight, bias, torch.tensor([[2, 4]]), torch.tensor([3]), torch.tensor([2]))
    compute = numbers(batch, blank=0, tile_rows=tile_rows)
    check_printed(place, compute, {"loss": [6.58043023], "d_linear_bias": D_BIAS})


@pytest.mark.parametrize(("place", "tile_rows"), tilings())
def test_no_bias_is_a_bias_of_zeros(place, tile_rows):
    batch = j_p().cast(place.finest, place.device)
    zeros = batch._replace(linear_bias=torch.zeros_like(batch.linear_bias))
    none = batch._replace(linear_bias=None)
    found = results(none, backend=place.backend, blank=0, tile_rows=tile_rows)
    assert "d_linear_bias" not in found
    assert_budget(found, joint_budget(zeros, blank=0))


def test_weight_gradient_is_summed_in_float32(place):
    """Sixteen-bit sums of many small terms stop growing: each of T nodes adds 1/5 to an entry."""
    frames = 64 if place.interpreted else 4096
    dtype = torch.float16 if place.interpreted else torch.bfloat16
    batch = Joint(
        torch.ones(1, frames, 64), torch.zeros(1, 1, 64), torch.zeros(5, 64), None,
        torch.zeros(1, 0, dtype=torch.int64), torch.tensor([frames]), torch.tensor([0]),
    )  # fmt: skip
    batch = batch.cast(dtype, place.device)
    found = results(batch, backend=place.backend, blank=0, activation="relu", tile_rows=16)["d_linear_weight"]
    expected = torch.full((5, 64), frames / 5, dtype=torch.float64)
    expected[0] = -frames * 4 / 5
    assert found.dtype == dtype
    torch.testing.assert_close(found.cpu().double(), expected, rtol=2**-8, atol=0)


@pytest.mark.parametrize("tile_rows", [7, None])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_nan_in_the_padding(place, activation, tile_rows):
    batch = j_p()
    batch.encoder[1, 2:] = torch.nan
    batch.predictor[1, 2:] = torch.nan
    targets = TARGETS_P.clone()
    targets[1, 1:] = 10**6
    batch = batch._replace(targets=targets)
    compute = numbers(batch, blank=0, activation=activation, tile_rows=tile_rows)
    check_printed(place, compute, {"loss": fixtures.LOSSES_J_P[activation], **sizes_j_p(activation)})
    found = compute(place.backend, lambda x: x.to(place.device, place.finest))
    assert not found["d_encoder"][1, 2:].any()
    assert not found["d_predictor"][1, 2:].any()


@pytest.mark.parametrize(
    ("tile_rows", "options"),
    [(1, {"clamp": 0.05}), (7, {"clamp": 0.05}), (None, {"clamp": 0.05}), (7, {"clamp": 0.1, "fastemit_lambda": 0.3})],
)
def test_clamp_and_fastemit(place, tile_rows, options):
    """The weight's gradient uses the clamped gradient of the scores, whatever the tile."""
    check_budget(place, j_p(), place.finest, torch.tensor([1.0, -2.0]), blank=0, tile_rows=tile_rows, **options)


@pytest.mark.parametrize(
    ("activation", "losses"), [("relu", [8.58674004, 6.21333294]), ("tanh", [11.23853980, 9.62076835])]
)
def test_empty_transcript_in_the_batch(place, activation, losses):
    batch = j_p()._replace(encoder_lengths=torch.tensor([4, 4]), target_lengths=torch.tensor([3, 0]))
    check_printed(place, numbers(batch, blank=0, activation=activation), {"loss": losses})


@pytest.mark.parametrize(
    ("sixteen", "activation", "losses"),
    [
        pytest.param(("encoder", "predictor"), "relu", [8.59119695, 5.42761153], id="states"),
        pytest.param(("linear_weight", "linear_bias"), "tanh", [11.24038677, 8.04611611], id="layer"),
    ],
)
def test_mixed_dtypes(place, sixteen, activation, losses):
    """bfloat16 beside float32: the call computes in float32, each gradient has its input's dtype."""
    batch = j_p().cast(torch.bfloat16).cast(torch.float64)

    def compute(backend, cast):
        mixed = batch.each(cast)
        if mixed.encoder.dtype == torch.float32:
            mixed = mixed._replace(**{name: getattr(mixed, name).bfloat16() for name in sixteen})
        found = results(mixed, backend=backend, blank=0, activation=activation)
        for name, x in mixed.floats().items():
            assert found[f"d_{name}"].dtype == x.dtype, name
        return found

    check_printed(place._replace(finest=torch.float32), compute, {"loss": losses})


def test_padding_beyond_the_longest(place):
    encoder, predictor, weight, bias = fixtures.joint_sines(2, 6, 5, 6, 5)
    targets = torch.nn.functional.pad(TARGETS_P, (0, 2), value=-100)
    batch = Joint(encoder, predictor, weight, bias, targets, FRAMES_P, LABELS_P)
    compute = numbers(batch, blank=0)
    check_printed(place, compute, {"loss": fixtures.LOSSES_J_P["tanh"], **sizes_j_p("tanh")})
    found = compute(place.backend, lambda x: x.to(place.device, place.finest))
    assert not found["d_encoder"][:, 4:].any()
    assert not found["d_predictor"][:, 4:].any()


def test_planes_of_batch_p(place):
    """The middle layer and the recursion on top of it give the loss of the whole."""

    def compute(backend, cast):
        batch = j_p().each(cast).on(place.device)
        planes = rnnt.joint_log_probs(*batch[:3], *batch[4:], linear_bias=batch.linear_bias, blank=0, backend=backend)
        return {"loss": rnnt.rnnt_loss_from_log_probs(*planes, *batch[5:], reduction="none", backend=backend)}

    check_printed(place, compute, {"loss": fixtures.LOSSES_J_P["tanh"]})
