"""Packed rows against a plain enumeration of the valid nodes."""

import pytest
import torch

from rnnt.layout import dense_mask, dense_rows, label_mask, row_offsets, rows_at
from rnnt.problem import Alignment
from tests.support import DEVICES


def alignment_of(lengths, labels, frames, columns, device="cpu", rows=None):
    targets = torch.arange(1, len(lengths) * (columns - 1) + 1).reshape(len(lengths), columns - 1)
    total = sum(t * (u + 1) for t, u in zip(lengths, labels, strict=True))
    tensors = (x.to(device) for x in (targets, torch.tensor(lengths), torch.tensor(labels)))
    return Alignment(*tensors, 0, frames, total if rows is None else rows)


def nodes(lengths, labels):
    """(b, t, u) of every row, u fastest."""
    pairs = enumerate(zip(lengths, labels, strict=True))
    return [(b, t, u) for b, (T, U) in pairs for t in range(T) for u in range(U + 1)]


BATCHES = [
    ([1], [0], 1, 1),
    ([3], [2], 3, 3),
    ([4, 1, 2], [2, 3, 0], 5, 4),
    ([1, 1, 7, 2], [0, 5, 0, 1], 9, 8),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("lengths", "labels", "frames", "columns"), BATCHES)
def test_rows(lengths, labels, frames, columns, device):
    alignment = alignment_of(lengths, labels, frames, columns, device)
    expected = nodes(lengths, labels)
    offsets = row_offsets(alignment)
    assert offsets[0] == 0
    assert offsets[-1] == len(expected) == alignment.rows
    rows = rows_at(alignment, offsets, torch.arange(len(expected) + 3, device=device))
    assert rows.valid.tolist() == [True] * len(expected) + [False] * 3
    assert rows.utterance.tolist() == [b for b, _, _ in expected] + [0] * 3
    assert rows.frame.tolist() == [b * frames + t for b, t, _ in expected] + [0] * 3
    assert rows.state.tolist() == [b * columns + u for b, _, u in expected] + [0] * 3
    targets = alignment.targets.tolist()
    label = [targets[b][u] if u < labels[b] else -1 for b, _, u in expected]
    assert rows.label.tolist()[: len(expected)] == label
    node = [(b * frames + t) * columns + u for b, t, u in expected]
    assert rows.node(columns).tolist()[: len(expected)] == node
    dense = dense_rows(alignment).flatten()[node]
    assert dense.tolist() == list(range(len(expected)))


@pytest.mark.parametrize(("lengths", "labels", "frames", "columns"), BATCHES)
def test_masks(lengths, labels, frames, columns):
    alignment = alignment_of(lengths, labels, frames, columns)
    found = dense_mask(alignment).nonzero().tolist()
    assert [tuple(x) for x in found] == nodes(lengths, labels)
    labelled = [(b, t, u) for b, t, u in nodes(lengths, labels) if u < labels[b]]
    assert [tuple(x) for x in label_mask(alignment).nonzero().tolist()] == labelled


def test_any_order_of_rows():
    lengths, labels, frames, columns = BATCHES[2]
    alignment = alignment_of(lengths, labels, frames, columns)
    order = torch.tensor([7, 0, 15, 3, 15])
    rows = rows_at(alignment, row_offsets(alignment), order)
    expected = nodes(lengths, labels)
    assert rows.frame.tolist() == [expected[i][0] * frames + expected[i][1] for i in order.tolist()]


def test_indices_are_64_bits_wide():
    """Rows of one long utterance behind another pass 2^31 without wrapping; nothing of that size is allocated."""
    lengths = torch.tensor([70000, 70000])
    targets = torch.ones(1, 1, dtype=torch.int64).expand(2, 40000)
    alignment = Alignment(targets, lengths, torch.tensor([40000, 40000]), 0, 70000, 2 * 70000 * 40001)
    offsets = row_offsets(alignment)
    assert offsets.tolist() == [0, 70000 * 40001, 2 * 70000 * 40001]
    last = torch.tensor([2 * 70000 * 40001 - 1, 2**31 + 5])
    rows = rows_at(alignment, offsets, last)
    assert rows.utterance.tolist() == [1, 0]
    assert rows.frame.tolist() == [2 * 70000 - 1, (2**31 + 5) // 40001]
    assert rows.state.tolist() == [2 * 40001 - 1, (2**31 + 5) % 40001]
    assert rows.node(40001).tolist() == last.tolist()
