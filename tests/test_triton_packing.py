"""Utterances placed and checked by a kernel."""

import pytest
import torch

from rnnt.backends import interpreting
from rnnt.problem import Alignment
from rnnt.validation import Check
from tests.support import gpu_mark

DEVICE = "cpu" if interpreting() else "cuda"
pytestmark = [pytest.mark.triton, *gpu_mark(DEVICE)]


def test_the_kernel_that_checks_finds_what_the_host_does():
    """Lengths and labels at the edges of their ranges, and one past them; more labels than are read at a time."""
    from rnnt.triton.packing import place_utterances

    utterances, labels, frames, classes, blank = 40, 300, 7, 50, 3
    generator = torch.Generator().manual_seed(0)

    def drawn(low, high, *size):
        return torch.randint(low, high + 1, size, generator=generator)

    targets = drawn(4, classes - 1, utterances, labels)
    encoder_lengths, target_lengths = drawn(1, frames, utterances), drawn(0, labels, utterances)
    encoder_lengths[:4] = torch.tensor([0, frames + 1, -1, frames])
    target_lengths[3:8] = torch.tensor([labels, labels + 1, -1, 0, 200])
    for b, (u, label) in enumerate([(199, classes), (200, classes), (298, -1), (299, blank), (0, blank)], start=7):
        target_lengths[b] = 200 if b < 9 else labels
        targets[b, u] = label
    wrong = []
    for b in range(utterances):
        one = targets[b : b + 1], encoder_lengths[b : b + 1], target_lengths[b : b + 1]
        try:
            Check(*one, frames, classes, blank).rows()
            wrong.append(0)
        except ValueError:
            wrong.append(1)
    integers = [x.to(DEVICE) for x in (targets, encoder_lengths, target_lengths)]
    check = Check(*integers, frames, classes, blank)
    alignment = Alignment(*integers, blank, frames, 0)
    rows, *found = place_utterances(alignment, check).verdict.tolist()
    assert found == wrong
    assert wrong[:12] == [1, 1, 1, 0, 1, 1, 0, 1, 0, 1, 1, 1]
    assert rows == int((encoder_lengths.clamp(0, frames) * (target_lengths.clamp(0, labels) + 1)).sum())
