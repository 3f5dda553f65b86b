"""Faults that users of transducer losses met in public, as small inputs with known values: dense scores.

Every value was computed by path enumeration in float64 and is printed to 8 decimals.
"""

import pytest
import torch

import rnnt
from tests import fixtures
from tests.fixtures import FRAMES_P, LABELS_P, TARGETS_P, P, s_p, sines
from tests.support import assert_budget, budget_of, check_printed, logits_results


def numbers(logits, *args, reduction="none", upstream=None, **options):
    """compute(backend, cast) for check_printed: loss, gradient, its entries at (b, 0, 0), and its absolute sums."""

    def compute(backend, cast):
        x = cast(logits).clone().requires_grad_()
        loss = rnnt.rnnt_loss(x, *(arg.to(x.device) for arg in args), reduction=reduction, backend=backend, **options)
        loss.backward(torch.ones_like(loss) if upstream is None else torch.full_like(loss, upstream))
        sizes = x.grad.double().abs().sum(dim=(1, 2, 3))
        first = x.grad[:, 0, 0]
        return {"loss": loss, "d_logits": x.grad, "first": first, "|each|": sizes, "|all|": sizes.sum()}

    return compute


def test_batch_p(place):
    expected = {
        "loss": fixtures.LOSSES_S_P,
        "|each|": fixtures.GRADIENT_SIZES_S_P,
        "first": [fixtures.GRADIENT_S_P[0, 0, 0], fixtures.GRADIENT_S_P[1, 0, 0]],
    }
    check_printed(place, numbers(s_p(), *P, blank=0), expected)


@pytest.mark.parametrize("blank", [4, -1])
def test_last_blank(place, blank):
    args = (fixtures.TARGETS_BLANK_LAST, FRAMES_P, LABELS_P)
    check_printed(place, numbers(s_p(), *args, blank=blank), {"loss": fixtures.LOSSES_S_P_BLANK_LAST})


@pytest.mark.parametrize(("T", "U", "V"), [(2, 5, 4), (1, 2, 5), (1, 0, 5), (4, 0, 5), (3, 3, 5)])
def test_equal_scores(place, T, U, V):
    """More labels than frames is ordinary, and so is no label at all."""
    args = (torch.ones(1, U, dtype=torch.int64), torch.tensor([T]), torch.tensor([U]))
    expected = {"loss": [fixtures.uniform_loss(T, U, V)]}
    if T + U > 1:
        first = [1 / V] * V
        first[0] -= (T - 1) / (T + U - 1)
        first[1] -= U / (T + U - 1)
        expected["first"] = [first]
    check_printed(place, numbers(torch.zeros(1, T, U + 1, V), *args, blank=0), expected)


def test_loss_subtracted_from_a_constant(place):
    """A negative upstream gradient keeps its sign."""
    args = (torch.ones(1, 14, dtype=torch.int64), torch.tensor([10]), torch.tensor([14]))
    first = torch.full((1, 20), -0.05, dtype=torch.float64)
    first[0, 19], first[0, 1] = 0.34130435, 0.55869565
    compute = numbers(torch.zeros(1, 10, 15, 20), *args, blank=19, upstream=-1.0)
    check_printed(place, compute, {"loss": [58.28394766], "first": first, "|all|": 43.5})


def test_upstream_of_zero_gives_zeros(place):
    logits = s_p().to(place.device, place.finest)
    found = logits_results(logits, *P, blank=0, backend=place.backend, upstream=torch.zeros(2))
    assert not found["d_logits"].any()


@pytest.mark.parametrize(
    ("reduction", "value"),
    [("sum", 14.13053675), ("mean", 7.06526838), ("mean_target", 4.04885199), ("mean_volume", 3.53263419)],
)
def test_reductions(place, reduction, value):
    """One batch, four readings of "reduced"."""
    check_printed(place, numbers(s_p(), *P, blank=0, reduction=reduction), {"loss": value})


def test_mean_divides_the_gradient_too(place):
    expected = {"loss": 7.06526838, "|all|": 6.86910044}
    check_printed(place, numbers(s_p(), *P, blank=0, reduction="mean"), expected)


def test_fastemit(place):
    """The label's share is scaled before the softmax's chain rule; the reported loss stays plain."""
    compute = numbers(s_p(), *P, blank=0, fastemit_lambda=0.1)
    check_printed(place, compute, {"loss": fixtures.LOSSES_S_P, "|each|": [9.62841326, 4.64151896]})
    first = [-0.27430754, -0.27542502, 0.06012885, 0.34048840, 0.14911531]
    check_printed(place, lambda *at: {"first": compute(*at)["first"][0]}, {"first": first})


@pytest.mark.parametrize(
    ("options", "upstream", "total"),
    [
        pytest.param({"reduction": "sum"}, 1.0, 4.11954461, id="sum"),
        pytest.param({"reduction": "mean"}, 1.0, 2.05977231, id="mean"),
        pytest.param({"reduction": "sum"}, 1024.0, 4218.41368413, id="loss-scaled"),
    ],
)
def test_clamp_comes_before_reduction_and_scale(place, options, upstream, total):
    check_printed(place, numbers(s_p(), *P, blank=0, clamp=0.05, upstream=upstream, **options), {"|all|": total})


def test_clamped_sizes(place):
    compute = numbers(s_p(), *P, blank=0, clamp=0.05)
    check_printed(place, compute, {"loss": fixtures.LOSSES_S_P, "|each|": [3.17018830, 0.94935631]})


@pytest.mark.parametrize("clamp", [0, -1, -0.05])
def test_clamp_is_off_at_zero_and_below(place, clamp):
    compute = numbers(s_p(), *P, blank=0, clamp=clamp)
    check_printed(place, compute, {"|each|": fixtures.GRADIENT_SIZES_S_P})


def test_inputs_are_left_alone(place):
    """The scores come from another operation, which needs them for its own gradient, and serve a second loss."""

    def run(z, backend="reference"):
        z = z.clone().requires_grad_()
        args = [x.to(place.device) for x in P]
        p = torch.tanh(z)
        before = p.detach().clone()
        losses = [rnnt.rnnt_loss(p, *args, blank=0, reduction="sum", backend=backend) for _ in range(2)]
        sum(losses).backward()
        assert torch.equal(p, before)
        assert losses[0] == losses[1]
        return {"loss": losses[0].detach(), "d_z": z.grad}

    z = s_p().to(place.device, place.finest)
    assert_budget(run(z, place.backend), budget_of(z, run))


def test_log_softmax_twice_changes_nothing(place):
    def compute(backend, cast):
        z = cast(s_p()).requires_grad_()
        args = [x.to(place.device) for x in P]
        loss = rnnt.rnnt_loss(z.log_softmax(-1), *args, blank=0, reduction="none", backend=backend)
        loss.sum().backward()
        return {"loss": loss, "first": z.grad[:, 0, 0], "|each|": z.grad.double().abs().sum(dim=(1, 2, 3))}

    expected = {
        "loss": fixtures.LOSSES_S_P,
        "first": [fixtures.GRADIENT_S_P[0, 0, 0], fixtures.GRADIENT_S_P[1, 0, 0]],
        "|each|": fixtures.GRADIENT_SIZES_S_P,
    }
    check_printed(place, compute, expected)


def test_gradient_of_log_probs_is_minus_the_occupancy(place):
    compute = numbers(s_p().log_softmax(-1), *P, blank=0, fused_log_softmax=False)

    def first_utterance(*at):
        found = compute(*at)
        return {"loss": found["loss"], "|total|": found["d_logits"][0].sum(), "first": found["first"][0]}

    first = [-0.61175689, -0.38824311, 0, 0, 0]
    check_printed(place, first_utterance, {"loss": fixtures.LOSSES_S_P, "|total|": -7.0, "first": first})


@pytest.mark.parametrize("k", range(5))
def test_classes_renamed(place, k):
    """Rolling the classes, with blank and targets, changes nothing."""
    args = ((TARGETS_P + k) % 5, FRAMES_P, LABELS_P)
    compute = numbers(s_p().roll(k, dims=-1), *args, blank=k)
    check_printed(place, compute, {"loss": fixtures.LOSSES_S_P, "|each|": fixtures.GRADIENT_SIZES_S_P})


def test_nan_in_the_padding(place):
    x = s_p()
    x[1, 2:] = x[1, :, 2:] = torch.nan
    targets = TARGETS_P.clone()
    targets[1, 1:] = 10**6
    compute = numbers(x, targets, FRAMES_P, LABELS_P, blank=0)
    check_printed(place, compute, {"loss": fixtures.LOSSES_S_P, "|each|": fixtures.GRADIENT_SIZES_S_P})
    gradient = compute(place.backend, lambda x: x.to(place.device, place.finest))["d_logits"]
    assert not gradient[1, 2:].any()
    assert not gradient[1, :, 2:].any()


def test_more_padding_than_the_longest_needs(place):
    targets = torch.nn.functional.pad(TARGETS_P, (0, 2), value=-100)
    compute = numbers(sines(2, 6, 5, 5), targets, FRAMES_P, LABELS_P, blank=0)
    check_printed(place, compute, {"loss": fixtures.LOSSES_S_P, "|each|": fixtures.GRADIENT_SIZES_S_P})
    gradient = compute(place.backend, lambda x: x.to(place.device, place.finest))["d_logits"]
    assert not gradient[:, 4:].any()
    assert not gradient[:, :, 4:].any()


def test_empty_transcript(place):
    args = (torch.zeros(1, 0, dtype=torch.int64), torch.tensor([3]), torch.tensor([0]))
    check_printed(place, numbers(sines(1, 3, 0, 6), *args, blank=0), {"loss": [3.57727994]})


@pytest.mark.parametrize("reduction", ["mean_target", "mean_volume"])
def test_empty_transcript_counts_as_one_label(place, reduction):
    args = (torch.zeros(1, 0, dtype=torch.int64), torch.tensor([3]), torch.tensor([0]))
    compute = numbers(sines(1, 3, 0, 6), *args, blank=0, reduction=reduction)
    check_printed(place, compute, {"loss": 3.57727994})


def test_more_labels_than_frames(place):
    args = (torch.tensor([[1, 2, 3, 4, 5]]), torch.tensor([2]), torch.tensor([5]))
    check_printed(place, numbers(sines(1, 2, 5, 6), *args, blank=0), {"loss": [11.46056393]})


def test_sixteen_bits_do_not_stall(place):
    """A sum of 400 terms of 1.6 kept in bfloat16 stops near 512, and 80000 is past float16's largest number."""
    dtype = torch.float16 if place.interpreted else torch.bfloat16
    args = (torch.zeros(1, 0, dtype=torch.int64), torch.tensor([400]), torch.tensor([0]))
    zeros = torch.zeros(1, 400, 1, 5, dtype=dtype, device=place.device)
    loss = logits_results(zeros, *args, blank=0, backend=place.backend)["loss"]
    eager = logits_results(zeros, *args, blank=0, backend="reference")["loss"]
    assert loss.dtype == torch.float32
    right = 643.77516497
    assert abs(loss.item() - right) <= 2 * abs(eager.item() - right) + right * torch.finfo(torch.float32).eps


def test_float16_holds_large_losses(place):
    B = 1 if place.interpreted else 4
    args = (torch.zeros(B, 0, dtype=torch.int64), torch.full((B,), 400), torch.zeros(B, dtype=torch.int64))
    logits = torch.tensor([-200.0, 0.0]).half().expand(B, 400, 1, 2).to(place.device)
    found = logits_results(logits, *args, blank=0, backend=place.backend)
    assert found["loss"].tolist() == [80000.0] * B
    assert found["d_logits"].dtype == torch.float16
    args = [x.to(place.device) for x in args]
    assert rnnt.rnnt_loss(logits, *args, blank=0, reduction="sum", backend=place.backend).item() == 80000.0 * B
