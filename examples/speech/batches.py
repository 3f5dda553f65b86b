"""Utterances to padded batches, in an order that depends on seed and epoch alone.

Utterances of similar length share a batch.  Epoch 0 goes from short to long: a transducer finds its first alignments
in short utterances within a few dozen steps, and may stay at "all blank" for long when it starts with long ones.
Later epochs jitter the lengths before sorting and visit the batches in random order.

Features [B, F, bands] float32 (zeros beyond the lengths) and targets [B, U] int64 are on the training device, the
lengths [B] int64 on the CPU, where the loss takes them without waiting for the device.
Before: features.py.  After: model.py.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from examples.speech.data import Utterance
from examples.speech.features import LogMel
from examples.speech.model import BLANK, STACK, Alphabet

NODES = 6000  # lattice nodes (encoder frames x label positions) that an utterance may take in a full batch: about 5 s


class Example(NamedTuple):
    """One utterance, ready for the model: features [F, bands], labels [U] int64."""

    features: Tensor
    labels: Tensor
    text: str
    name: str


class Batch(NamedTuple):
    features: Tensor  # [B, F, bands]
    feature_lengths: Tensor  # [B]
    targets: Tensor  # [B, U]
    target_lengths: Tensor  # [B]

    @property
    def characters(self) -> float:
        """What the loss per character is divided by: an utterance without labels counts as one."""
        return float(self.target_lengths.clamp(min=1).sum())


def prepare(
    utterances: Sequence[Utterance], extractor: LogMel, alphabet: Alphabet, device: torch.device, fit: bool = False
) -> list[Example]:
    """Examples of utterances, on the device.  `fit` sets the extractor's mean and deviation from them first."""
    mels = [extractor.mels(torch.from_numpy(u.samples), u.rate) for u in utterances]
    if fit:
        extractor.fit(mels)
    return [
        Example(
            ((mel - extractor.mean) / extractor.deviation).to(device),
            torch.tensor(alphabet.encode(u.text), device=device),
            u.text,
            u.name,
        )
        for mel, u in zip(mels, utterances, strict=True)
    ]


def epoch_order(examples: Sequence[Example], batch_size: int, seed: int, epoch: int) -> list[list[int]]:
    """Batches of indices into `examples`; every index occurs once.

    A batch holds at most `batch_size` utterances, and fewer long ones: at most `batch_size * NODES` lattice nodes with
    padding, unless it is a single utterance.
    """
    sizes = torch.tensor([len(example.features) for example in examples], dtype=torch.float64)
    generator = torch.Generator().manual_seed(1_000_003 * seed + epoch)
    if epoch > 0:
        sizes = sizes * torch.empty_like(sizes).uniform_(0.8, 1.25, generator=generator)
    batches: list[list[int]] = [[]]
    frames = columns = 0  # of the batch's longest utterances
    for index in sizes.argsort(stable=True).tolist():
        example = examples[index]
        frames = max(frames, len(example.features) // STACK)
        columns = max(columns, len(example.labels) + 1)
        count = len(batches[-1]) + 1
        if batches[-1] and (count > batch_size or count * frames * columns > batch_size * NODES):
            batches.append([])
            frames, columns = len(example.features) // STACK, len(example.labels) + 1
        batches[-1].append(index)
    if epoch > 0:
        batches = [batches[index] for index in torch.randperm(len(batches), generator=generator).tolist()]
    return batches


def collate(examples: Sequence[Example]) -> Batch:
    """One padded batch."""
    return Batch(
        pad_sequence([example.features for example in examples], batch_first=True),
        torch.tensor([len(example.features) for example in examples]),
        pad_sequence([example.labels for example in examples], batch_first=True, padding_value=BLANK),
        torch.tensor([len(example.labels) for example in examples]),
    )


def share(batch: Batch, rank: int, ranks: int) -> Batch:
    """Process `rank`'s utterances of a batch, every `ranks`-th, without padding that only the others need.

    Neighbours in a batch are of similar length, so that shares take about the same time.  Empty where there are fewer
    utterances than processes.
    """
    mine = Batch(*(x[rank::ranks] for x in batch))
    if len(mine.features) == 0:
        return mine
    frames, labels = int(mine.feature_lengths.max()), int(mine.target_lengths.max())
    return mine._replace(features=mine.features[:, :frames], targets=mine.targets[:, :labels])


def mask(batch: Batch, bands: int = 8, frames: int = 20) -> Batch:
    """The batch with one random stripe of up to `bands` bands and one of up to `frames` frames set to the mean.

    The same stripes for all utterances of the batch; drawn from torch's CPU generator, which all processes seed alike.
    """
    features = batch.features.clone()
    for axis, widest in ((2, bands), (1, min(frames, batch.features.shape[1] // 4))):
        width = int(torch.randint(0, widest + 1, ()))
        start = int(torch.randint(0, features.shape[axis] - width + 1, ()))
        features.narrow(axis, start, width).zero_()
    return batch._replace(features=features)
