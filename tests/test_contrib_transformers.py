"""rnnt.contrib.transformers: a ParakeetForRNNT after `use_rnnt` against the same model with its own loss.

Expected values are the model's own: its forward's dense scores through transformers' loss (see parakeet.py).
"""

import copy
import pickle

import pytest
import torch

pytest.importorskip("transformers")

from transformers import ParakeetForRNNT

import rnnt.contrib.transformers as contrib
from rnnt.contrib.transformers import use_rnnt
from tests import parakeet as tiny
from tests.parakeet import BLANK, batch, dense_loss, exact_convolutions, own_loss, parakeet, results, torchaudio_loss
from tests.support import assert_budget, budget_from, places

__all__ = ["exact_convolutions", "own_loss"]  # fixtures

FLOAT32 = 1e-5  # of the largest gradient; losses: relative
NEAR_THE_LOSS = ("d_joint.", "d_encoder_projector.", "d_decoder.decoder_projector.")  # the joint and what it adds


def own(**options):
    """The model that is not touched, its scores through `dense_loss`."""
    model = parakeet(**options)
    model.loss_function = dense_loss
    return model


def assert_close(found, expected, tolerance):
    assert found.keys() == expected.keys()
    scale = max(float(x.abs().max()) for name, x in expected.items() if name != "loss")
    for name, x in expected.items():
        error = (found[name].double().cpu() - x.double().cpu()).abs().max()
        allowed = tolerance * (float(x.abs()) if name == "loss" else scale)
        assert error <= allowed, f"{name}: error {error:.3e} over {allowed:.3e}"


def live(expected):
    """Names of what is not zero but for rounding (the gradient of a bias before a normalisation is)."""
    scale = max(float(x.abs().max()) for x in expected.values())
    return [name for name, x in expected.items() if x.abs().max() > 1e-6 * scale]


# The same numbers


def test_loss_and_gradients(place):
    """In the finest dtype; the tile is smaller than the lattice."""
    options = {"device": place.device, "dtype": place.finest}
    found = results(
        use_rnnt(parakeet(**options), place.backend, 128 if place.backend == "triton" else 7), batch(**options)
    )
    expected = results(own(device=place.device, dtype=torch.float64), batch(place.device, torch.float64))
    assert len(expected) > 30
    assert_close(found, expected, 1e-11 if place.finest == torch.float64 else 10 * FLOAT32)


def test_float32_budget(place):
    """At most twice the error of the model's own dense scores in float32.

    Of one draw of it for what the loss itself is differentiated by.  What has come back through the encoder is a draw
    of the encoder's rounding, which differs from machine to machine: of pairs of the model's own draws (features moved
    by 1e-3, each against its own float64 truth; measured on the CPU) 16 % break twice the largest error of one, 0.25 %
    that of eight, so there the largest of eight counts.
    """
    truth = results(own(device=place.device, dtype=torch.float64), batch(place.device, torch.float64))
    eager = results(own(device=place.device), batch(place.device))
    found = results(use_rnnt(parakeet(place.device), place.backend), batch(place.device))
    names = live(truth)
    near = {n for n in names if n == "loss" or n.startswith(NEAR_THE_LOSS)}
    assert {"d_joint.head.weight", "d_encoder_projector.weight"} <= near < set(names)
    budget = budget_from({n: eager[n] for n in names}, {n: truth[n] for n in names}, torch.float32)
    assert_budget({n: found[n] for n in near}, budget)
    for seed in range(1, 8):
        moved = batch(place.device)
        noise = torch.randn(moved["input_features"].shape, generator=torch.Generator().manual_seed(seed))
        moved["input_features"] += 1e-3 * noise.to(place.device)
        eager = results(own(device=place.device), moved)
        moved["input_features"] = moved["input_features"].double()
        exact = results(own(device=place.device, dtype=torch.float64), moved)
        for n in names:
            torch.maximum(budget.eager[n], (eager[n].double() - exact[n]).abs(), out=budget.eager[n])
    assert_budget({n: found[n] for n in names}, budget)


@pytest.mark.parametrize("place", [x for x in places() if not x.values[0].interpreted])
def test_autocast_budget(place):
    """Under bfloat16 autocast likewise; parameters and their gradients stay float32.

    Entry by entry for what the loss itself is differentiated by.  Gradients that have come back through the bfloat16
    encoder or prediction network are draws of those layers' rounding, for the model's own loss as for this one, and the
    largest of one draw does not bound the largest of another: there the root mean square of each tensor is compared.
    Measured on the CPU: of 40 draws of the model's own loss (features moved by 1e-3, each against its own float64
    truth), 57 % of the pairs break that bound somewhere; one tensor's largest error runs from 1.2e-3 to 9.7e-3.
    """
    truth = results(own(device=place.device, dtype=torch.float64), batch(place.device, torch.float64))
    eager_model, model = own(device=place.device), use_rnnt(parakeet(place.device), place.backend)
    with torch.autocast(place.device, torch.bfloat16):
        eager = results(eager_model, batch(place.device))
        found = results(model, batch(place.device))
    assert all(x.dtype == torch.float32 for x in found.values())
    names = live(truth)
    budget = budget_from({n: eager[n] for n in names}, {n: truth[n] for n in names}, torch.bfloat16)
    near = {n for n in names if n == "loss" or n.startswith(NEAR_THE_LOSS)}
    assert (
        {"d_joint.head.weight", "d_encoder_projector.weight", "d_decoder.decoder_projector.weight"} <= near < set(names)
    )
    assert_budget({n: found[n] for n in near}, budget)
    assert_budget({n: found[n] for n in names}, budget, measures=("rms",))


@pytest.mark.parametrize("reduction", ["mean_volume", "mean_batch", "mean", "sum", "none"])
def test_own_reductions(own_loss, reduction):
    """transformers' names and formulas, from transformers' code."""
    inputs = batch()
    found = use_rnnt(parakeet(), "reference")(**inputs, reduction=reduction).loss
    expected = parakeet()(**inputs, reduction=reduction).loss
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected, rtol=FLOAT32, atol=0)


def test_own_loss_and_gradients(own_loss):
    assert_close(results(use_rnnt(parakeet(), "reference"), batch()), results(parakeet(), batch()), FLOAT32)


@pytest.mark.skipif(torchaudio_loss() is None, reason="torchaudio cannot be imported")
def test_own_loss_needs_no_stand_in():
    """The two tests above again, with nothing in torchaudio's place."""
    found = results(use_rnnt(parakeet(), "reference"), batch())
    assert_close(found, results(parakeet(), batch()), FLOAT32)


def test_reduction_counts_no_labels_as_none(own_loss):
    """An utterance without labels counts as 0 in the volume, as in transformers (elsewhere in this package: as 1)."""
    inputs = batch()
    inputs["labels"][1] = BLANK
    found, expected = (model(**inputs).loss for model in (use_rnnt(parakeet(), "reference"), parakeet()))
    torch.testing.assert_close(found, expected, rtol=FLOAT32, atol=0)


def test_unknown_reduction():
    with pytest.raises(ValueError, match="reduction: expected one of 'mean_volume'"):
        use_rnnt(parakeet(), "reference")(**batch(), reduction="mean_target")


@pytest.mark.parametrize("activation", ["relu", "tanh", "sigmoid"])
def test_activations(activation):
    options = {"dtype": torch.float64, "hidden_act": activation}
    found = results(use_rnnt(parakeet(**options), "reference"), batch(dtype=torch.float64))
    assert_close(found, results(own(**options), batch(dtype=torch.float64)), 1e-11)


def test_blank_first():
    """The blank is the configuration's, wherever it is."""
    options = {"dtype": torch.float64, "blank_token_id": 0}
    inputs = batch(dtype=torch.float64)
    for name in ("labels", "decoder_input_ids"):
        inputs[name] = (inputs[name] + 1) % tiny.VOCABULARY
    assert_close(results(use_rnnt(parakeet(**options), "reference"), inputs), results(own(**options), inputs), 1e-11)


def test_no_labels_at_all():
    """U = 0, where transformers' own forward drops the wrong axis: blanks only, scored by hand."""
    inputs = batch(dtype=torch.float64)
    inputs |= {"labels": inputs["labels"][:, :0], "decoder_input_ids": inputs["decoder_input_ids"][:, :1]}
    found = use_rnnt(parakeet(dtype=torch.float64), "reference")(**inputs, reduction="none").loss
    model = parakeet(dtype=torch.float64)
    encoded = model.get_audio_features(inputs["input_features"], inputs["attention_mask"])
    scores = model.joint(model.decoder(inputs["decoder_input_ids"]), encoded.pooler_output)
    blank = scores.log_softmax(-1)[..., BLANK] * encoded.attention_mask
    torch.testing.assert_close(found, -blank.sum(1), rtol=1e-12, atol=0)


def test_options_reach_the_loss():
    """FastEmit scales the gradient, not the value; a clamp bounds it."""
    plain = results(use_rnnt(parakeet(), "reference"), batch())
    for options in ({"fastemit_lambda": 0.5}, {"clamp": 0.01}):
        found = results(use_rnnt(parakeet(), "reference", **options), batch())
        assert torch.equal(found["loss"], plain["loss"])
        assert not torch.allclose(found["d_joint.head.weight"], plain["d_joint.head.weight"])


# The scores


def largest_allocation(function):
    """Bytes of the largest block of CPU memory that PyTorch allocates, compiled code included."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True) as profile:
        function()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    assert events
    return max(event.nbytes() for event in events)


@pytest.mark.compiled
def test_scores_are_never_there():
    """B4-T64-U31-V199: no block is half as large as [B, T, U1, V] in float32."""
    inputs = batch(B=4, frames=256, U=31)
    scores = 4 * 64 * 32 * 199 * 4
    model = use_rnnt(parakeet(vocab_size=199), "compiled", tile_rows=512)
    results(model, inputs)  # compiles
    assert largest_allocation(lambda: results(model, inputs)) < scores / 2
    model.eval()
    assert largest_allocation(lambda: results(model, inputs)) >= scores


def test_scores_would_be_seen():
    """The check above can fail: the untouched model makes that tensor."""
    model = own(vocab_size=199)
    assert largest_allocation(lambda: results(model, batch(B=4, frames=256, U=31))) >= 4 * 64 * 32 * 199 * 4


@pytest.mark.gpu
def test_scores_are_never_there_on_the_gpu():
    inputs = batch("cuda", B=8, frames=800, U=63)
    scores = 8 * 200 * 64 * 4001 * 4
    model = use_rnnt(parakeet("cuda", vocab_size=4001), tile_rows=2048)
    results(model, inputs)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    results(model, inputs)
    assert torch.cuda.max_memory_allocated() - before < scores / 2


def test_output_has_no_logits():
    model = use_rnnt(parakeet(), "reference")
    output, expected = model(**batch()), own()(**batch())
    assert output.logits is None
    assert set(output.keys()) == set(expected.keys()) - {"logits"}
    torch.testing.assert_close(output.last_hidden_state, expected.last_hidden_state)
    entries = model(**batch(), return_dict=False)
    assert all(isinstance(x, torch.Tensor) for x in entries)
    assert len(entries) == len(own()(**batch(), return_dict=False)) - 1


def test_labels_by_position():
    inputs = batch()
    names = ("input_features", "attention_mask", "decoder_input_ids", None, None, None, "labels")
    output = use_rnnt(parakeet(), "reference")(*(inputs.get(name) for name in names))
    assert output.logits is None
    torch.testing.assert_close(output.loss, own()(**inputs).loss)


# What stays as it was


def without_labels():
    return {name: x for name, x in batch().items() if name != "labels"}


@pytest.mark.parametrize("training", [True, False])
def test_no_labels(training):
    model, untouched = use_rnnt(parakeet(), "reference").train(training), parakeet().train(training)
    assert torch.equal(model(**without_labels()).logits, untouched(**without_labels()).logits)
    assert model(**without_labels()).loss is None


def test_evaluation():
    model, untouched = use_rnnt(parakeet(), "reference").eval(), own().eval()
    with torch.no_grad():
        found, expected = model(**batch()), untouched(**batch())
    assert found.keys() == expected.keys()
    assert torch.equal(found.logits, expected.logits)
    torch.testing.assert_close(found.loss, expected.loss, rtol=FLOAT32, atol=0)


def test_evaluation_without_logits():
    model, untouched = use_rnnt(parakeet(), "reference", eval_logits=False).eval(), own().eval()
    with torch.no_grad():
        found, expected = model(**batch()), untouched(**batch())
    assert found.logits is None
    torch.testing.assert_close(found.loss, expected.loss, rtol=FLOAT32, atol=0)


def test_generation():
    models = use_rnnt(parakeet(), "reference"), parakeet()
    inputs = {name: x for name, x in batch().items() if name in ("input_features", "attention_mask")}
    found, expected = (
        model.eval().generate(**inputs, decoder_start_token_id=BLANK, max_new_tokens=40) for model in models
    )
    assert torch.equal(found.sequences, expected.sequences)
    assert torch.equal(found.durations, expected.durations)


def test_parameters_and_class_stay():
    model, untouched = use_rnnt(parakeet(), "reference"), parakeet()
    assert type(model) is ParakeetForRNNT
    assert list(model.state_dict()) == list(untouched.state_dict())
    assert [name for name, _ in model.named_modules()] == [name for name, _ in untouched.named_modules()]
    assert ParakeetForRNNT.forward is type(model).forward
    assert not isinstance(untouched.joint, contrib.TransducerJoint)
    assert untouched.loss_function is not model.loss_function


def test_save_and_load(tmp_path):
    model = use_rnnt(parakeet(), "reference")
    model.save_pretrained(tmp_path)
    loaded = ParakeetForRNNT.from_pretrained(tmp_path)
    assert loaded.config.architectures == ["ParakeetForRNNT"]
    assert not isinstance(loaded.joint, contrib.TransducerJoint)
    assert torch.equal(loaded.eval()(**without_labels()).logits, model.eval()(**without_labels()).logits)
    again = use_rnnt(loaded, "reference").train()
    torch.testing.assert_close(again(**batch()).loss, model.train()(**batch()).loss)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["copy", "pickle"])
def test_copies(duplicate):
    """A copy trains by itself: its loss uses its own weights."""
    model = use_rnnt(parakeet(dtype=torch.float64), "reference")
    twin = duplicate(model)
    with torch.no_grad():
        model.joint.head.weight.zero_()
    assert_close(
        results(twin, batch(dtype=torch.float64)), results(own(dtype=torch.float64), batch(dtype=torch.float64)), 1e-11
    )
    assert twin(**batch(dtype=torch.float64)).logits is None


def test_second_call_replaces_the_options():
    model = use_rnnt(parakeet(), "reference", fastemit_lambda=0.5)
    assert use_rnnt(model, "reference") is model
    assert len(model._forward_hooks) == len(model._forward_pre_hooks) == 1
    assert_close(results(model, batch()), results(use_rnnt(parakeet(), "reference"), batch()), 0.0)


def test_another_loss_function_turns_it_off():
    model = use_rnnt(parakeet(), "reference")
    model.loss_function = dense_loss
    assert model(**batch()).logits is not None
    assert use_rnnt(model, "reference")(**batch()).logits is None


def test_an_error_leaves_nothing_behind():
    """After a batch that fails, scores are not held back, even where the call goes around the hooks."""
    model = use_rnnt(parakeet(), "reference")
    wrong = batch()
    wrong["labels"][0, 0] = tiny.VOCABULARY
    with pytest.raises(ValueError, match=r"targets\[0, 0\]: expected a label"):
        model(**wrong)
    assert isinstance(model.forward(**without_labels()).logits, torch.Tensor)


def test_forward_without_hooks():
    """model.forward, called by itself: scores as before, and the same loss on them."""
    model = use_rnnt(parakeet(), "reference")
    model(**batch())
    output, expected = model.forward(**batch()), own()(**batch())
    assert torch.equal(output.logits, expected.logits)
    torch.testing.assert_close(output.loss, expected.loss, rtol=FLOAT32, atol=0)
