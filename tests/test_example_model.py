"""The example's features, streaming model, greedy search, error rates and alignment posterior."""

import math

import numpy as np
import pytest
import torch

from examples.speech.batches import Example, collate, epoch_order
from examples.speech.decode import MAX_LABELS_PER_FRAME, GreedySearch, StreamingRecogniser, decode_batch
from examples.speech.features import FeatureStream, LogMel, top_frequency
from examples.speech.metrics import character_error_rate, edit_distance, word_error_rate
from examples.speech.model import STACK, Alphabet, Encoder, LSTMPredictor, StatelessPredictor, Transducer
from examples.speech.report import occupancies

PREDICTORS = ["stateless", "lstm"]


def noise(seconds, rate, seed=0):
    return 0.1 * torch.randn(round(seconds * rate), generator=torch.Generator().manual_seed(seed))


def tone(hz, rate, seconds=0.5):
    return 0.5 * torch.sin(2 * math.pi * hz * torch.arange(round(seconds * rate)) / rate)


def small_encoder():
    torch.manual_seed(0)
    return Encoder(bands=6, width=16, blocks=4, kernel=5, lookahead=2, dropout=0.0).eval()


def talkative(predictor):
    """An untrained model whose best symbol changes from frame to frame, blank among them."""
    torch.manual_seed(1)
    model = Transducer(6, bands=20, predictor=predictor, width=32, joint=16, backend="reference").eval()
    with torch.no_grad():
        model.joint.output.weight *= 8
        model.joint.output.bias[0] += 1
    return model


# Features


@pytest.mark.parametrize(
    ("rate", "seconds", "frames"),
    [
        (8000, 1.0, 98),  # (8000 - 200) // 80 + 1
        (16000, 1.0, 98),  # (16000 - 400) // 160 + 1
        (22050, 1.0, 98),  # (22050 - 551) // 220 + 1
        (8000, 0.025, 1),
        (8000, 0.024, 0),
    ],
)
def test_number_of_frames(rate, seconds, frames):
    features = LogMel(bands=40)(noise(seconds, rate), rate)
    assert features.shape == (frames, 40)
    assert features.dtype == torch.float32


@pytest.mark.parametrize("hz", [300.0, 1000.0, 3000.0])
def test_tone_is_loudest_in_its_band(hz):
    bands, top = 40, 3800.0
    mel = [2595 * math.log10(1 + f / 700) for f in (60.0, top, hz)]
    nearest = round((mel[2] - mel[0]) / (mel[1] - mel[0]) * (bands + 1)) - 1
    mels = LogMel(bands, top).mels(tone(hz, 8000), 8000)
    assert set(mels.argmax(1).tolist()) == {nearest}


def test_features_do_not_depend_on_the_sample_rate():
    extractor = LogMel(40, 3800.0)
    found = [extractor.mels(tone(1000.0, rate), rate)[:40].amax(1) for rate in (8000, 16000, 44100)]
    assert torch.allclose(found[0], found[1], atol=0.05)
    assert torch.allclose(found[0], found[2], atol=0.05)


def test_silence_is_finite_and_low_rates_are_refused():
    extractor = LogMel(40, 3800.0)
    assert torch.allclose(extractor.mels(torch.zeros(8000), 8000), torch.tensor(math.log(1e-8)))
    with pytest.raises(ValueError, match="expected at least 7600 Hz"):
        extractor.mels(torch.zeros(8000), 4000)
    assert top_frequency([8000, 44100]) == 3800.0
    assert top_frequency([44100]) == 8000.0


def test_fit_normalises():
    extractor = LogMel(40)
    extractor.fit([extractor.mels(noise(1.0, 8000), 8000)])
    features = extractor(noise(1.0, 8000), 8000)
    assert torch.allclose(features.mean(0), torch.zeros(40), atol=1e-4)
    assert torch.allclose(features.std(0), torch.ones(40), atol=1e-4)


@pytest.mark.parametrize("piece", [1, 79, 400, 3000])
def test_streamed_features(piece):
    samples = noise(0.4, 8000)
    extractor = LogMel(40)
    stream = FeatureStream(extractor, 8000)
    streamed = torch.cat([stream.accept(part) for part in samples.split(piece)])
    torch.testing.assert_close(streamed, extractor(samples, 8000))


# Encoder


@pytest.mark.parametrize("pieces", [[40], [4] * 10, [8, 0, 4, 20, 8]])
def test_streamed_encoder(pieces):
    encoder = small_encoder()
    features = torch.randn(1, sum(pieces), 6)
    whole, lengths = encoder(features, torch.tensor([features.shape[1]]))
    history, streamed = encoder.initial(), []
    for number, part in enumerate(features.split(pieces, 1), start=1):
        states, history = encoder.stream(part, history, last=number == len(pieces))
        streamed.append(states)
    assert lengths.tolist() == [10]
    torch.testing.assert_close(torch.cat(streamed, 1), whole)


def test_encoder_in_a_batch_is_as_alone():
    encoder = small_encoder()
    features = torch.randn(3, 24, 6)
    lengths = torch.tensor([24, 9, 4])
    features[1, 9:] = math.nan
    features[2, 4:] = math.nan
    states, state_lengths = encoder(features, lengths)
    assert state_lengths.tolist() == [6, 2, 1]
    for index, (count, length) in enumerate(zip([6, 2, 1], lengths.tolist(), strict=True)):
        alone, _ = encoder(features[index : index + 1, :length], lengths[index : index + 1])
        torch.testing.assert_close(states[index, :count], alone[0])


def test_encoder_sees_160_ms_ahead_and_no_more():
    encoder = small_encoder()
    features = torch.randn(1, 80, 6)
    changed = features.clone()
    changed[:, 40:] += 1  # encoder frames from 10 on
    lengths = torch.tensor([80])
    difference = (encoder(features, lengths)[0] - encoder(changed, lengths)[0]).abs().amax((0, 2))
    assert (difference[:6] == 0).all()  # two blocks with two frames of 40 ms each: frame 6 is the first to see frame 10
    assert (difference[6:] > 0).all()


# Predictor


@pytest.mark.parametrize("kind", [StatelessPredictor, LSTMPredictor])
def test_predictor_step_by_step(kind):
    torch.manual_seed(0)
    predictor = kind(7, 8)
    targets = torch.tensor([[3, 1, 6, 6], [2, 5, 4, 1]])
    whole = predictor(targets)
    state = predictor.initial(2)
    outputs = [predictor.output(state)]
    for labels in targets.unbind(1):
        state = predictor.step(labels, state)
        outputs.append(predictor.output(state))
    assert whole.shape == (2, 5, 8)
    torch.testing.assert_close(torch.stack(outputs, 1), whole)


def test_stateless_predictor_knows_two_labels():
    predictor = StatelessPredictor(7, 8)
    states = predictor(torch.tensor([[1, 2, 3, 2, 3]]))[0]
    assert torch.equal(states[3], states[5])
    assert not torch.equal(states[2], states[4])  # 1 2 and 3 2


# Greedy search


class Script:
    """A model whose best symbol is listed for each (frame, last label); its encoder states are frame numbers."""

    def __init__(self, best):
        self.best = best
        self.predictor = self.joint = self

    def initial(self, batch):
        return torch.zeros(batch, dtype=torch.int64)

    def step(self, labels, state):
        return labels

    def output(self, state):
        return state

    def select(self, chosen, new, old):
        return torch.where(chosen, new, old)

    def logits(self, states, outputs):
        chosen = [self.best.get((int(t), int(y)), 0) for t, y in zip(states[:, 0], outputs, strict=True)]
        return torch.nn.functional.one_hot(torch.tensor(chosen), 10).float()


def test_greedy_search_by_hand():
    # Frame 0 emits 4, then 7, then goes on; frame 1 is blank after 7; frame 2 emits 4 after 7.
    script = Script({(0, 0): 4, (0, 4): 7, (2, 7): 4})
    frames = torch.arange(4.0)[None, :, None].expand(2, 4, 1)
    search = GreedySearch(script, 2)
    search.accept(frames, torch.tensor([4, 2]))
    assert search.labels == [[4, 7, 4], [4, 7]]


def test_greedy_search_ends_when_a_model_does_not():
    search = GreedySearch(Script({(0, 0): 3, (0, 3): 3}), 1)
    search.accept(torch.zeros(1, 1, 1), torch.tensor([1]))
    assert search.labels == [[3] * MAX_LABELS_PER_FRAME]


@pytest.mark.parametrize("predictor", PREDICTORS)
@pytest.mark.parametrize("piece", [160, 1234])
def test_streaming_recognition_is_offline_recognition(predictor, piece):
    model, extractor, alphabet = talkative(predictor), LogMel(20), Alphabet("abcde")
    recordings = [noise(1.1, 8000, seed=1), noise(0.6, 8000, seed=2)]
    extractor.fit(extractor.mels(samples, 8000) for samples in recordings)
    examples = [Example(extractor(s, 8000), torch.tensor([1]), "a", "") for s in recordings]
    batch = collate(examples)
    offline = [alphabet.decode(labels) for labels in decode_batch(model, batch.features, batch.feature_lengths)]
    for samples, text in zip(recordings, offline, strict=True):
        recogniser = StreamingRecogniser(model, extractor, alphabet, 8000)
        parts = samples.split(piece)
        heard = [recogniser.accept(part, last=number == len(parts)) for number, part in enumerate(parts, start=1)]
        assert "".join(heard) == text
        assert len(set(text)) >= 3
        assert sum(part != "" for part in heard) >= 3  # text comes while the audio does


# Error rates


@pytest.mark.parametrize(
    ("reference", "hypothesis", "distance"),
    [
        ("kitten", "sitting", 3),
        ("", "abc", 3),
        ("abc", "", 3),
        ("abc", "abc", 0),
        ("ab", "ba", 2),
        ("flaw", "lawn", 2),
    ],
)
def test_edit_distance(reference, hypothesis, distance):
    assert edit_distance(reference, hypothesis) == distance


def test_error_rates():
    references = ["one two three", "yes"]
    hypotheses = ["one too three", ""]
    assert character_error_rate(references, hypotheses) == (1 + 3) / (13 + 3)
    assert word_error_rate(references, hypotheses) == (1 + 1) / (3 + 1)
    with pytest.raises(ValueError, match="got none"):
        word_error_rate([""], ["a"])
    with pytest.raises(ValueError, match="expected 1"):
        word_error_rate(["a"], [])


# Alignment posterior


@pytest.mark.parametrize("predictor", PREDICTORS)
def test_posterior_sums(predictor):
    model = talkative(predictor)
    example = Example(torch.randn(44, 20), torch.tensor([1, 2, 2, 5]), "abbe", "")
    blank, label = occupancies(model, example)
    assert blank.shape == (11, 5)
    assert label.shape == (11, 4)
    torch.testing.assert_close(blank.sum(1), torch.ones(11), atol=1e-5, rtol=0)
    torch.testing.assert_close(label.sum(0), torch.ones(4), atol=1e-5, rtol=0)
    assert min(float(blank.min()), float(label.min())) >= -1e-6


def test_posterior_of_equally_likely_alignments():
    model = talkative("stateless")
    with torch.no_grad():
        model.joint.output.weight.zero_()
        model.joint.output.bias.zero_()
    blank, label = occupancies(model, Example(torch.randn(2 * STACK, 20), torch.tensor([3]), "c", ""))
    # Two frames, one label: it is emitted in frame 0 or in frame 1.
    torch.testing.assert_close(label, torch.tensor([[0.5], [0.5]]))
    torch.testing.assert_close(blank, torch.tensor([[0.5, 0.5], [0.0, 1.0]]))


# Batches


def test_epoch_order():
    rng = np.random.default_rng(0)
    sizes = rng.integers(8, 400, 101).tolist()
    examples = [Example(torch.zeros(size, 1), torch.ones(5, dtype=torch.int64), "", "") for size in sizes]
    first = [sizes[index] for batch in epoch_order(examples, 8, seed=3, epoch=0) for index in batch]
    assert first == sorted(sizes)
    for epoch in (1, 2):
        order = epoch_order(examples, 8, seed=3, epoch=epoch)
        assert sorted(index for batch in order for index in batch) == list(range(101))
        assert max(map(len, order)) == 8
        assert order == epoch_order(examples, 8, seed=3, epoch=epoch)
        assert order != epoch_order(examples, 8, seed=4, epoch=epoch)
    assert epoch_order(examples, 8, 3, 1) != epoch_order(examples, 8, 3, 2)


def test_long_utterances_come_in_smaller_batches():
    # 400 feature frames and 119 labels: 100 x 120 lattice nodes, twice what one of a full batch may take.
    examples = [Example(torch.zeros(400, 1), torch.ones(119, dtype=torch.int64), "", "")] * 12
    assert [len(batch) for batch in epoch_order(examples, 8, 0, 0)] == [4, 4, 4]
    longest = [Example(torch.zeros(4000, 1), torch.ones(999, dtype=torch.int64), "", "")] * 2
    assert [len(batch) for batch in epoch_order(longest, 8, 0, 0)] == [1, 1]


def test_alphabet():
    alphabet = Alphabet(" ab")
    assert len(alphabet) == 4
    assert alphabet.encode("b a") == [3, 1, 2]
    assert alphabet.decode([3, 1, 2]) == "b a"
    with pytest.raises(ValueError, match="'c'"):
        alphabet.encode("abc")
