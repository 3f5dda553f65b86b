"""What the compiled backend does on a GPU alone, run on the CPU: diagonals in chunks, gathered sums, and passes that
never wait."""

import dataclasses
import functools

import pytest
import torch

from rnnt.compiled import lattice, loss
from rnnt.compiled.joint import GatherSums, IndexSums, anchors_at, joint, utterance_spans
from rnnt.compiled.tiles import LiveNodes, all_nodes, live_nodes, look_up, tables_of, tiles_of
from rnnt.problem import Alignment, JointProblem
from tests.support import assert_budget, joint_budget, named_dtypes, ragged, ragged_lengths, results, upstream_of

pytestmark = pytest.mark.compiled
FEATURES = 6


def alignment_of(B: int, T: int, U: int, *, host_sync: bool = True) -> Alignment:
    frames, labels = ragged_lengths(B, T, U, torch.Generator().manual_seed(0))
    rows = int((frames * (labels + 1)).sum()) if host_sync else B * T * (U + 1)
    return Alignment(torch.ones(B, U, dtype=torch.int64), frames, labels, 0, T, rows, host_sync)


def some_live(alignment: Alignment, share: float) -> LiveNodes:
    """Nodes as the backward pass takes them: about `share` of those inside the lengths, or all without a sync."""
    inside = torch.zeros(alignment.utterances, alignment.frames, alignment.columns)
    kept = torch.rand(alignment.rows, generator=torch.Generator().manual_seed(1)) < share
    inside.view(-1)[all_nodes(alignment)] = kept.float()
    return live_nodes(inside, inside, alignment)


@pytest.mark.parametrize("sizes", [(3, 50, 20), (1, 33, 0), (2, 1, 40), (1, 30, 1), (1, 1, 0)], ids=str)
@pytest.mark.parametrize(("block", "chunk"), [(2, 2), (4, 16), (8, 8), (32, 256)])
@pytest.mark.parametrize("impossible", [False, True], ids=["possible", "impossible-arcs"])
def test_scores_by_chunks_are_those_in_turn(monkeypatch, sizes, block, chunk, impossible):
    monkeypatch.setattr(lattice, "BLOCK", block)
    monkeypatch.setattr(lattice, "CHUNK", chunk)
    # The graphs of a GPU are compiled there.
    monkeypatch.setattr(lattice, "compiled", lambda function, planes, **options: functools.partial(function, planes))
    B, T, U = sizes
    alignment, columns = alignment_of(*sizes), max(U + 1, 2)
    generator = torch.Generator().manual_seed(1)
    blank, label = (-3 * torch.rand(B, T, columns, generator=generator, dtype=torch.float64) for _ in range(2))
    if impossible:
        for plane in (blank, label):
            plane[torch.rand(plane.shape, generator=generator) < 0.1] = -torch.inf
    lengths = torch.stack((alignment.encoder_lengths, alignment.target_lengths)).repeat(1, 2)
    right = lattice.scores_in_turn(blank, label, lengths)
    found = lattice.scores_by_chunks(blank, label, lengths)
    torch.testing.assert_close(found[: len(right)], right, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", named_dtypes("fp64", "fp32", "bf16"))
@pytest.mark.parametrize("needed", [(True, True), (True, False), (False, True)], ids=["both", "frames", "states"])
@pytest.mark.parametrize("sizes", [(3, 5, 3), (1, 1, 0), (1, 7, 0), (4, 1, 5), (7, 30, 11)], ids=str)
@pytest.mark.parametrize("host_sync", [True, False], ids=["sync", "no-sync"])
def test_gathered_sums_are_those_of_index_add(dtype, needed, sizes, host_sync):
    alignment = alignment_of(*sizes, host_sync=host_sync)
    live = some_live(alignment, 0.5)
    generator = torch.Generator().manual_seed(2)
    constants = [torch.ones(sizes[0] * length, FEATURES, dtype=dtype) for length in (sizes[1], sizes[2] + 1)]
    for tile in (7, 64):
        ways = [way(live, alignment, tile, FEATURES, list(needed), dtype) for way in (IndexSums, GatherSums)]
        tables = tables_of(alignment, keep=False, seed=None)
        with torch.no_grad():
            for number, node in enumerate(tiles_of(alignment, live.node, tile, missing=-1)):
                d_pre = torch.randn(tile, FEATURES, generator=generator, dtype=torch.float64)
                d_pre = (d_pre * (node >= 0)[:, None]).to(dtype)
                rows = look_up(tables, node.clamp(min=0))
                for way in ways:
                    anchors = anchors_at(way.places_of(number), tile, FEATURES, dtype, d_pre.device)
                    with torch.enable_grad():
                        pre = joint(*constants, anchors, rows, "relu", 0.0, dtype)
                    way.add(number, node, list(torch.autograd.grad(pre, anchors.leaves(), d_pre)))
        for right, found in zip(*(way.results() for way in ways), strict=True):
            torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-5)


def test_a_tile_reaches_the_utterances_of_its_rows():
    """Sums look at no others, or each tile would cost as much as the whole lattice; two at least."""
    alignment = alignment_of(5, 6, 3)
    live = some_live(alignment, 0.7)
    utterance = live.node // (6 * 4)
    spans = utterance_spans(live.counts, 10)
    assert len(spans) == -(-len(utterance) // 10) > 1
    for (first, count), rows in zip(spans, utterance.split(10), strict=True):
        assert first <= rows[0]
        assert rows[-1] < first + count <= 5
        assert count == max(rows[-1] - rows[0] + 1, 2)


@pytest.mark.parametrize("rows", ["N", "capacity"])
@pytest.mark.parametrize("tile_rows", [7, "auto", None])
@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
def test_without_waiting(monkeypatch, rows, tile_rows, dropout_p):
    """As on a GPU with validate=False, with N from lengths on the CPU, and without; padding is NaN."""
    batch = ragged(4, 6, 3, 5, 6, blank=0).cast(torch.float64)
    for b, (frames, labels) in enumerate(zip(batch.encoder_lengths, batch.target_lengths, strict=True)):
        batch.encoder[b, frames:], batch.predictor[b, labels + 1 :] = torch.nan, torch.nan
    upstream = upstream_of(batch)
    options = {"blank": 0, "dropout_p": dropout_p}
    arguments = loss._arguments

    def never_waiting(problem: JointProblem) -> tuple[object, ...]:
        capacity = 4 * 6 * 4
        known = problem.alignment.rows if rows == "N" else capacity
        alignment = dataclasses.replace(problem.alignment, rows=known, host_sync=False)
        return arguments(dataclasses.replace(problem, alignment=alignment))

    monkeypatch.setattr(loss, "_arguments", never_waiting)
    monkeypatch.setattr(loss, "IndexSums", GatherSums)
    found = results(batch, upstream, seed=3, backend="compiled", tile_rows=tile_rows, **options)
    padded = batch.each(lambda x: x.nan_to_num())
    assert_budget(found, joint_budget(padded, upstream, seed=3, **options))
