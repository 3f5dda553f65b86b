"""Greedy decoding, of whole batches or of audio that arrives piece by piece: same code, same text.

    at each encoder frame: take the best symbol; while it is a label, append it and feed it to the predictor;
    blank goes on to the next frame

At most `MAX_LABELS_PER_FRAME` labels are taken from one frame of 40 ms, so that a bad model cannot loop for ever.
`python -m examples.speech.decode CHECKPOINT.pt a.wav b.wav` prints text as it is recognised, piece by piece.
Before: model.py.  After: metrics.py.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from examples.speech import checkpoint
from examples.speech.features import FeatureStream, LogMel
from examples.speech.model import BLANK, STACK, Alphabet, Transducer
from examples.speech.sources import read_wav

MAX_LABELS_PER_FRAME = 4  # 100 characters a second


class GreedySearch:
    """Labels of B utterances so far; `accept` extends them by encoder states in the order of time."""

    def __init__(self, model: Transducer, batch: int) -> None:
        self.model = model
        self.labels: list[list[int]] = [[] for _ in range(batch)]
        self.state = model.predictor.initial(batch)

    @torch.no_grad()
    def accept(self, states: Tensor, lengths: Tensor) -> None:
        """Go on through states [B, T, width], of which the first lengths [B] of each utterance count."""
        lengths = lengths.to(states.device)
        predictor, joint = self.model.predictor, self.model.joint
        for frame in range(states.shape[1]):
            active = frame < lengths  # [B]
            for _ in range(MAX_LABELS_PER_FRAME):
                best = joint.logits(states[:, frame], predictor.output(self.state)).argmax(-1)  # [B]
                active = active & (best != BLANK)
                emitted = torch.where(active, best, BLANK).tolist()
                if not any(emitted):
                    break
                for labels, label in zip(self.labels, emitted, strict=True):
                    labels += [label] if label != BLANK else []
                self.state = predictor.select(active, predictor.step(best, self.state), self.state)


@torch.no_grad()
def decode_batch(model: Transducer, features: Tensor, feature_lengths: Tensor) -> list[list[int]]:
    """Labels of whole utterances: features [B, F, bands], feature_lengths [B]."""
    states, lengths = model.encoder(features, feature_lengths)
    search = GreedySearch(model, len(features))
    search.accept(states, lengths)
    return search.labels


class StreamingRecogniser:
    """Audio in, text out, piece by piece: features, encoder and predictor carry their state from piece to piece."""

    def __init__(self, model: Transducer, extractor: LogMel, alphabet: Alphabet, rate: int) -> None:
        self.model = model
        self.alphabet = alphabet
        self.stream = FeatureStream(extractor, rate)
        self.frames = torch.zeros(0, extractor.bands)  # features that do not fill an encoder frame yet
        self.history = model.encoder.initial()
        self.search = GreedySearch(model, 1)

    def accept(self, samples: Tensor, last: bool = False) -> str:
        """The text that the next samples [N], float32 in [-1, 1], add.  `last` ends the recording."""
        features = self.stream.accept(samples)
        self.frames = torch.cat([self.frames.to(features), features])
        whole = len(self.frames) - len(self.frames) % STACK
        return self._advance(whole, last)

    @torch.no_grad()
    def _advance(self, whole: int, last: bool) -> str:
        if not whole and not last:
            return ""
        before = len(self.search.labels[0])
        states, self.history = self.model.encoder.stream(self.frames[None, :whole], self.history, last)
        self.frames = self.frames[whole:]
        self.search.accept(states, torch.tensor([states.shape[1]]))
        return self.alphabet.decode(self.search.labels[0][before:])


def load_recogniser(path: Path) -> tuple[Transducer, LogMel, Alphabet]:
    """Model, features and alphabet of a checkpoint that train.py wrote."""
    saved = checkpoint.read(path)
    alphabet = Alphabet(saved["alphabet"])
    extractor = LogMel(**saved["features"]["settings"])
    extractor.load_state_dict(saved["features"]["state"])
    model = Transducer(len(alphabet), extractor.bands, predictor=saved["settings"]["predictor"])
    model.load_state_dict(saved["model"])
    return model.eval(), extractor, alphabet


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.speech.decode", description="Recognise recordings.")
    parser.add_argument("checkpoint", type=Path, help="a .pt file that train.py wrote")
    parser.add_argument("wavs", type=Path, nargs="+", metavar="WAV")
    parser.add_argument("--piece", type=float, default=0.2, metavar="SECONDS", help="length of one piece of audio")
    options = parser.parse_args(arguments)
    try:
        model, extractor, alphabet = load_recogniser(options.checkpoint)
        for path in options.wavs:
            samples, rate = read_wav(path.read_bytes(), str(path))
            recogniser = StreamingRecogniser(model, extractor, alphabet, rate)
            print(f"{path}: ", end="")
            pieces = torch.from_numpy(samples).split(max(1, round(options.piece * rate)))
            for number, piece in enumerate(pieces, start=1):
                print(recogniser.accept(piece, last=number == len(pieces)), end="", flush=True)
            print()
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
