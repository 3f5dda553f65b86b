"""The streaming transducer: features and labels in, loss out; and the same parts one step at a time.

    encoder    stack 4 frames (40 ms) -> Linear, LayerNorm -> residual causal convolutions, 5 frames wide
    predictor  the last two labels' embeddings ("stateless"), or an LSTM over all labels ("lstm")
    joint      rnnt.RNNTJointLoss: tanh(encoder + predictor) -> vocabulary, and the loss

The first blocks see `lookahead` frames to the right, which delays the output by 160 ms; nothing else looks ahead.
The encoder's input beyond an utterance's length never reaches its output: every block sees zeros there, as it does
at the end of a stream, so an utterance has the same states alone, in a batch and streamed.

features [B, F, bands] float32; feature_lengths [B]; targets [B, U] int64; label 0 is blank and starts a sequence.
Encoder states [B, F // 4, width]; predictor states [B, U + 1, width].  About 1.0 M parameters.
Before: batches.py.  After: decode.py, trainer.py.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import rnnt

BLANK = 0
STACK = 4  # feature frames of one encoder frame

State = Any  # a tensor or a tuple of tensors; opaque to the decoder


class Alphabet:
    """Characters as labels 1, 2, ...; label 0 is blank."""

    def __init__(self, characters: str) -> None:
        self.characters = characters
        self._labels = {character: label for label, character in enumerate(characters, start=1)}

    def __len__(self) -> int:
        """V: the vocabulary's size with blank."""
        return len(self.characters) + 1

    def encode(self, text: str) -> list[int]:
        unknown = sorted(set(text) - set(self._labels))
        if unknown:
            raise ValueError(
                f"text: expected characters of the model's alphabet {self.characters!r}, got also {unknown}"
            )
        return [self._labels[character] for character in text]

    def decode(self, labels: list[int]) -> str:
        return "".join(self.characters[label - 1] for label in labels)


class ConvBlock(nn.Module):
    """x + GELU(LayerNorm(convolution over `kernel` frames, the last `lookahead` of which lie in the future))."""

    def __init__(self, width: int, kernel: int, lookahead: int, dropout: float) -> None:
        super().__init__()
        self.past = kernel - 1 - lookahead
        self.lookahead = lookahead
        self.convolution = nn.Conv1d(width, width, kernel)
        self.norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, padded: Tensor) -> Tensor:
        """[B, past + frames + lookahead, width] -> [B, frames, width]."""
        current = padded[:, self.past : padded.shape[1] - self.lookahead]
        mixed = self.convolution(padded.transpose(1, 2)).transpose(1, 2)
        return current + self.dropout(F.gelu(self.norm(mixed)))


class Encoder(nn.Module):
    """Feature frames to encoder states; `forward` takes a batch of whole utterances, `stream` pieces of one."""

    def __init__(self, bands: int, width: int, blocks: int, kernel: int, lookahead: int, dropout: float) -> None:
        super().__init__()
        self.width = width
        self.bands = bands
        self.input = nn.Linear(STACK * bands, width)
        self.norm = nn.LayerNorm(width)
        ahead = [lookahead if block < 2 else 0 for block in range(blocks)]
        self.blocks = nn.ModuleList(ConvBlock(width, kernel, frames, dropout) for frames in ahead)

    def forward(self, features: Tensor, feature_lengths: Tensor) -> tuple[Tensor, Tensor]:
        """States [B, T, width] and their lengths [B] (on the device that `feature_lengths` is on)."""
        lengths = feature_lengths // STACK
        states = self._stack(features)
        frames = torch.arange(states.shape[1], device=states.device)
        inside = (frames < lengths.to(states.device)[:, None])[..., None]  # [B, T, 1]
        for block in self._blocks():
            states = states.masked_fill(~inside, 0.0)
            states = block(F.pad(states, (0, 0, block.past, block.lookahead)))
        return states, lengths

    def initial(self) -> list[Tensor]:
        """The stream's state before any audio: each block's last input frames, [1, frames, width]."""
        return [torch.zeros(1, block.past, self.width, device=self.input.weight.device) for block in self._blocks()]

    def stream(self, features: Tensor, history: list[Tensor], last: bool = False) -> tuple[Tensor, list[Tensor]]:
        """States [1, T, width] that the next features [1, F, bands] complete, and the state after them.

        F is a multiple of 4.  With `last` the stream ends here, and the look-ahead is filled with zeros.
        """
        states = self._stack(features)
        after = []
        for block, seen in zip(self._blocks(), history, strict=True):
            seen = torch.cat([seen, states], 1)
            if last:
                seen = F.pad(seen, (0, 0, 0, block.lookahead))
            needed = block.past + block.lookahead
            states = block(seen) if seen.shape[1] > needed else seen[:, :0]
            after.append(seen[:, max(0, seen.shape[1] - needed) :])
        return states, after

    def _stack(self, features: Tensor) -> Tensor:
        batch, count, _ = features.shape
        stacked = features[:, : count - count % STACK].reshape(batch, count // STACK, STACK * self.bands)
        return cast(Tensor, self.norm(self.input(stacked)))

    def _blocks(self) -> list[ConvBlock]:
        return [cast(ConvBlock, block) for block in self.blocks]


class StatelessPredictor(nn.Module):
    """The embeddings of the last `context` labels, side by side."""

    def __init__(self, vocab_size: int, width: int, context: int = 2) -> None:
        super().__init__()
        self.context = context
        self.embedding = nn.Embedding(vocab_size, width // context)

    def forward(self, targets: Tensor) -> Tensor:
        """States [B, U + 1, width] before and after each of targets [B, U]."""
        padded = F.pad(targets, (self.context, 0), value=BLANK)
        return self._states(padded.unfold(1, self.context, 1))

    def initial(self, batch: int) -> State:
        return torch.full((batch, self.context), BLANK, device=self.embedding.weight.device)

    def step(self, labels: Tensor, state: State) -> State:
        """The state after one more label [B]."""
        return torch.cat([state[:, 1:], labels[:, None]], 1)

    def output(self, state: State) -> Tensor:
        """[B, width]."""
        return self._states(state)

    def select(self, chosen: Tensor, new: State, old: State) -> State:
        """The utterances' new states where chosen [B], else their old ones."""
        return torch.where(chosen[:, None], new, old)

    def _states(self, labels: Tensor) -> Tensor:
        return cast(Tensor, self.embedding(labels).flatten(-2))


class LSTMPredictor(nn.Module):
    """One LSTM layer over the embeddings of all labels so far."""

    def __init__(self, vocab_size: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width // 2)
        self.lstm = nn.LSTM(width // 2, width, batch_first=True)

    def forward(self, targets: Tensor) -> Tensor:
        """States [B, U + 1, width] before and after each of targets [B, U]."""
        states, _ = self.lstm(self.embedding(F.pad(targets, (1, 0), value=BLANK)))
        return cast(Tensor, states)

    def initial(self, batch: int) -> State:
        zeros = self.embedding.weight.new_zeros(batch, self.lstm.hidden_size)
        start = torch.full((batch,), BLANK, device=zeros.device)
        return self.step(start, (zeros, zeros))

    def step(self, labels: Tensor, state: State) -> State:
        """The state after one more label [B]."""
        hidden, cell = state
        _, (hidden, cell) = self.lstm(self.embedding(labels[:, None]), (hidden[None], cell[None]))
        return hidden[0], cell[0]

    def output(self, state: State) -> Tensor:
        """[B, width]."""
        return cast(Tensor, state[0])

    def select(self, chosen: Tensor, new: State, old: State) -> State:
        """The utterances' new states where chosen [B], else their old ones."""
        return tuple(torch.where(chosen[:, None], n, o) for n, o in zip(new, old, strict=True))


class Transducer(nn.Module):
    """Encoder, predictor and joint loss in one module, so that wrappers such as DistributedDataParallel see all of it.

    Args:
        vocab_size: V, blank included.
        bands: mel bands of the features.
        predictor: "stateless" or "lstm".
        width: features of encoder and predictor states.
        joint: H, the joint network's width.
        blocks, kernel, lookahead: convolutions, their width in frames of 40 ms, and how many of these lie in the
            future for the first two.
        dropout: of the encoder's blocks.
        backend, tile_rows: how the loss is computed, see `rnnt.RNNTJointLoss`.
    """

    def __init__(
        self,
        vocab_size: int,
        bands: int = 40,
        *,
        predictor: str = "stateless",
        width: int = 192,
        joint: int = 128,
        blocks: int = 5,
        kernel: int = 5,
        lookahead: int = 2,
        dropout: float = 0.1,
        backend: str = "auto",
        tile_rows: int | str | None = "auto",
    ) -> None:
        super().__init__()
        predictors = {"stateless": StatelessPredictor, "lstm": LSTMPredictor}
        if predictor not in predictors:
            raise ValueError(f"predictor: expected one of {sorted(predictors)}, got {predictor!r}")
        self.encoder = Encoder(bands, width, blocks, kernel, lookahead, dropout)
        self.predictor: StatelessPredictor | LSTMPredictor = predictors[predictor](vocab_size, width)
        self.joint = rnnt.RNNTJointLoss(
            joint,
            vocab_size,
            encoder_features=width,
            predictor_features=width,
            blank=BLANK,
            reduction="mean_volume",  # loss per character: comparable between batches and runs
            backend=backend,
            tile_rows=tile_rows,
        )

    def forward(self, features: Tensor, feature_lengths: Tensor, targets: Tensor, target_lengths: Tensor) -> Tensor:
        """Negative log-likelihood per character, in nats."""
        states, lengths = self.encoder(features, feature_lengths)
        return cast(Tensor, self.joint(states, self.predictor(targets), targets, lengths, target_lengths))
