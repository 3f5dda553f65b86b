"""`python -m benchmarks.model`: right lengths, losses that agree, complete files and tables, and a search that ends.

A model of a few thousand parameters on the CPU.
"""

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from benchmarks import data, measure, model, table
from benchmarks.losses import LOSSES, Refused, reason_against, torchaudio_loss
from benchmarks.network import FULL, TINY, Transducer
from benchmarks.training import Setup, Training
from rnnt.bench.shapes import SHAPES
from tests.benchmarks.table import BEGIN, END

MEASURED = ("none", "reference", "dense-8-checkpoint")
SETUP = Setup("cpu", "float32", TINY)


def test_lengths_of_20_seconds() -> None:
    mel, labels = data.lengths("20s", 64, torch.Generator())
    assert (mel[0], mel[-1]) == (2000, 1200)
    assert (labels[0], labels[-1]) == (100, 60)
    assert torch.allclose(mel / 20, labels.float(), atol=0.53)


def test_lengths_of_librispeech() -> None:
    mel, labels = data.lengths("librispeech", 100_000, torch.Generator().manual_seed(0))
    for found, quantiles in ((mel / 4, data.FRAMES_4X), (labels, data.LABELS)):
        assert np.quantile(found.numpy(), data.LEVELS) == pytest.approx(quantiles, rel=0.05)
        assert found.min() >= quantiles[0]
        assert found.max() <= quantiles[-1]
    assert np.corrcoef(mel.numpy(), labels.numpy())[0, 1] == pytest.approx(data.CORRELATION, abs=0.01)


@pytest.fixture(scope="module")
def full() -> Transducer:
    with torch.device("meta"):
        return Transducer(FULL, LOSSES["none"])


def test_the_full_model(full: Transducer) -> None:
    """114 million parameters, an eighth of the frames, and the 20 s batch is the shape "speech" of the loss's bench."""
    assert round(sum(x.numel() for x in full.parameters()) / 1e6) == 114
    assert full.encoder.config._attn_implementation == "sdpa"
    for name in ("dropout", "layerdrop", "activation_dropout", "attention_dropout"):
        assert getattr(full.encoder.config, name) == 0
    mel, labels = data.lengths("20s", 64, torch.Generator())
    speech = SHAPES["speech"].lengths()
    assert labels.tolist() == speech[1]
    assert torch.allclose(full.encoder_lengths(mel).long(), torch.tensor(speech[0]), atol=1)  # rounded up
    assert full.encoder_lengths(4 * torch.tensor([284, 343])).tolist() == [142, 172]


def test_subsampling_in_parts() -> None:
    """The states and gradients of the whole."""
    training = Training(LOSSES["none"], SETUP)
    batch, subsampling = training.make_batches("librispeech", 5)[0], training.model.encoder.subsampling
    found = []
    for size in (128, 2):
        subsampling.size = size
        training.optimizer.zero_grad()
        states = subsampling(batch.features, batch.mask)
        states.square().sum().backward()
        found.append([states, *(x.grad for x in subsampling.parameters())])
    for whole, parts in zip(*found, strict=True):
        torch.testing.assert_close(parts, whole)


def test_torchaudio_runs_out_of_memory(full: Transducer, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchaudio 2.11 says on a GPU only what it asked PyTorch for."""

    def no_memory(*_: object) -> None:
        raise RuntimeError('torch_call_dispatcher( "aten::empty_like", "", stack.data()) API call failed at ops.h')

    monkeypatch.setitem(sys.modules, "torchaudio", SimpleNamespace(functional=SimpleNamespace(rnnt_loss=no_memory)))
    with torch.device("meta"):
        states = torch.empty(2, 3, FULL.hidden), torch.empty(2, 4, FULL.predictor)
        lengths = torch.empty(2)
        batch = SimpleNamespace(targets=torch.empty(2, 3), encoder_lengths=lengths, target_lengths=lengths)
    with pytest.raises(torch.OutOfMemoryError, match="torchaudio"):
        torchaudio_loss(full.joint, *states, batch)


def test_torchaudio_has_an_end(full: Transducer) -> None:
    """Checked before anything is computed; 80 utterances of 20 s are below it."""
    states = torch.empty(83, 250, FULL.hidden, device="meta"), torch.empty(83, 101, FULL.predictor, device="meta")
    with pytest.raises(Refused, match="torchaudio's last index"):
        torchaudio_loss(full.joint, *states, None)


def test_batches() -> None:
    training = Training(LOSSES["none"], SETUP)
    batches = training.make_batches("librispeech", 6)
    assert len(batches) == SETUP.batches
    again = training.make_batches("librispeech", 6)
    for batch, same in zip(batches, again, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(batch[:6], same[:6], strict=True))
        output = training.model.encoder(batch.features, attention_mask=batch.mask)
        assert output.attention_mask.sum(-1).tolist() == batch.frames == batch.encoder_lengths.tolist()
        assert output.last_hidden_state.shape[1] == max(batch.frames)
        assert batch.targets.shape[1] == max(batch.labels)
        assert batch.labels == batch.target_lengths.tolist()
        assert batch.targets.max() < TINY.V - 1
        assert torch.equal(batch.previous[:, 1:], batch.targets)
        assert (batch.previous[:, 0] == TINY.V - 1).all()
    assert not torch.equal(batches[0].encoder_lengths, batches[1].encoder_lengths)


def value_and_gradients(name: str) -> dict[str, torch.Tensor]:
    training = Training(LOSSES[name], SETUP)
    loss = training.loss(training.make_batches("librispeech", 10)[1])
    loss.backward()
    return {"loss": loss.detach()} | {key: x.grad for key, x in training.model.named_parameters()}


def test_losses_agree() -> None:
    """One model, one batch of two parts: the same loss and gradients, however they are computed."""
    usable = [name for name in LOSSES if name != "none" and reason_against(name, "cpu") is None]
    assert {"reference", "dense", "dense-8", "dense-8-checkpoint"} <= set(usable)
    truth = value_and_gradients("dense")
    assert truth["loss"] > 1
    scales = {key: float(x.abs().max()) for key, x in truth.items()}
    for key in scales:
        if key.startswith("encoder."):  # biases before a softmax or a batch norm have a gradient of 0, and rounding
            scales[key] = max(scales.values())
    for name in usable:
        for key, x in value_and_gradients(name).items():
            assert float((x - truth[key]).abs().max()) < 1e-5 * scales[key], (name, key)


def test_no_loss_trains_all_but_the_joint() -> None:
    gradients = value_and_gradients("none")
    for key, x in gradients.items():
        assert (x is None) == key.startswith("joint."), key


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RNNT_COMMIT", "0123456789abcdef")
        tiny = ["--tiny", "--device", "cpu", "--rounds", "2", "--losses", *MEASURED]
        status = model.main([*tiny, "--json", str(folder / "run.json")])
    assert status == 0
    return SimpleNamespace(folder=folder, run=json.loads((folder / "run.json").read_text()))


def test_saved_run(saved: SimpleNamespace) -> None:
    run = saved.run
    assert run["machine_info"]["torch"] == torch.__version__
    assert run["packages"]["transformers"]
    assert (run["model"], run["dtype"], run["validate"], run["memory_limit"]) == ("tiny", "float32", True, None)
    assert run["parameters"] == Training(LOSSES["none"], SETUP).parameters
    assert [(x["data"], x["loss"]) for x in run["records"]] == [(d, name) for d in data.DATA for name in MEASURED]
    for record in run["records"]:
        assert record["outcome"] == "measured"
        assert record["batch"] == 4
        assert record["stats"]["rounds"] == 2
        assert record["peak_bytes"] > 0
        assert record["floor_seconds"]["both"] > record["floor_seconds"]["forward"] > 0
    evenly = run["records"][0]
    assert evenly["rows"] == sum(t * (u + 1) for t, u in zip((25, 22, 19, 15), (10, 9, 7, 6), strict=True))


def test_picture(saved: SimpleNamespace) -> None:
    pytest.importorskip("matplotlib")
    from benchmarks.picture import draw

    records = [{**x, "tried": {}, "stopped_by": None, "utterances_per_second": 9.0} for x in saved.run["records"]]
    records[1] = {"loss": "triton", "data": "20s", "tried": {}, "stopped_by": None, "outcome": "out of memory"}
    draw({**saved.run, "records": saved.run["records"] + records}, saved.folder / "run.png")
    assert (saved.folder / "run.png").read_bytes().startswith(b"\x89PNG")


def test_table(saved: SimpleNamespace, tmp_path: Path) -> None:
    text = table.render([saved.run])
    lines = [x for x in text.splitlines() if x.startswith("|")]
    assert len(lines) == 2 + 2 * len(MEASURED)
    assert {x.count("|") for x in lines} == {len(table.STEP_HEAD) + 1}
    assert [x.split(" | ")[1] for x in lines[2:]] == 2 * list(MEASURED)
    assert lines[2].startswith("| 20s, 4: 25 frames, 10 labels,")
    assert "commit 0123456789, transformers" in text

    document = tmp_path / "models.md"
    document.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    assert table.main([str(saved.folder / "run.json"), "--document", str(document)]) == 0
    assert document.read_text() == f"before\n{BEGIN}\n{text}{END}\nafter\n"
    document.write_text("no markers")
    assert table.main([str(saved.folder / "run.json"), "--document", str(document)]) == 1


def test_the_tables_figures() -> None:
    """Shares are of the step without a loss; what was not measured says why; a later record replaces an earlier one."""
    common = {"data": "20s", "batch": 8, "rows": 1000, "frames": 20, "labels": 5}
    common |= {"floor_seconds": {"forward": 0.001, "both": 0.002}, "outcome": "measured"}

    def record(name: str, seconds: float, gib: float, **more: Any) -> dict[str, Any]:
        return {**common, "loss": name, "stats": {"median": seconds, "iqr": 0.001}, "peak_bytes": gib * 2**30, **more}

    large = {"tried": {}, "stopped_by": None}
    records = [
        record("triton", 9.0, 9.0),
        record("none", 0.1, 10.0),
        record("triton", 0.105, 10.2),
        {"loss": "reference", "data": "20s", "batch": 8, "outcome": "out of memory"},
        record("none", 1.0, 30.0, batch=400, utterances_per_second=400.0, **large),
        record("dense", 1.0, 30.0, batch=200, utterances_per_second=200.0, **large),
    ]
    groups = table.latest(records)
    rows = {row[1]: row for row in table.step_rows(groups)}
    assert rows["triton"][0].startswith("20s, 8: 20 frames, 5 labels, 1,000 valid rows; floor 1.00 / 2.00 ms")
    assert rows["triton"][2:] == ["105 (1.00)", "+5.00", "+5.0 %", "2.50", "10.2 GiB", "+2.0 %"]
    assert rows["none"][2:] == ["100 (1.00)", "", "", "", "10.0 GiB", ""]
    assert rows["reference"][2:] == ["out of memory", "", "", "", "", ""]
    assert table.largest_rows(groups)[1] == ["", "dense", "200", "1000 (1.00)", "30.0 GiB", "200", "50 %"]


@pytest.mark.parametrize("largest", [0, 7, 8, 9, 63, 64, 100, 128, 200, 1000])
def test_search(largest: int) -> None:
    tried = []

    def fits(B: int) -> bool:
        tried.append(B)
        return largest >= B

    assert measure.largest_batch(fits, 64, ceiling=500) == min(largest, 500) // 8 * 8
    assert len(set(tried)) == len(tried)
    assert all(B % 8 == 0 and 0 < B <= 500 for B in tried)
    too_large = [B for B in tried if largest < B]
    assert too_large == sorted(too_large, reverse=True)


def test_largest_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Out of memory ends a trial, not the run; where the timed steps need more than one step did, less is taken."""
    room, steps = 20, {24: 0}

    def step(training: Training, batch: data.Batch) -> torch.Tensor:
        B = len(batch.frames)
        steps[B] = steps.get(B, 0) + 1
        if room + 4 < B or (room < B and steps[B] > SETUP.batches):
            raise torch.OutOfMemoryError("none left")
        return original(training, batch)

    original = Training.step
    monkeypatch.setattr(Training, "step", step)
    record = measure.measure_largest("dense", "20s", SETUP, rounds=1, start=16)
    assert (record["outcome"], record["batch"], record["stopped_by"]) == ("measured", 16, None)
    assert record["tried"] == {"16": "measured", "32": "out of memory", "24": "out of memory"}
    assert record["utterances_per_second"] == pytest.approx(16 / record["stats"]["median"])

    room = 0
    record = measure.measure_largest("dense", "20s", SETUP, rounds=1, start=16)
    assert record["outcome"] == "out of memory"


def test_refusal_ends_the_search(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(joint: Any, encoder: torch.Tensor, predictor: torch.Tensor, batch: data.Batch) -> torch.Tensor:
        if len(encoder) > 8:
            raise Refused("too many")
        return LOSSES["none"].function(joint, encoder, predictor, batch)

    monkeypatch.setitem(LOSSES, "dense", LOSSES["dense"]._replace(function=refuse))
    record = measure.measure_largest("dense", "20s", SETUP, rounds=1, start=16)
    assert (record["outcome"], record["batch"], record["stopped_by"]) == ("measured", 8, "too many")
    assert measure.measure("dense", "20s", 9, SETUP, rounds=1)["outcome"] == "refused"
    assert capsys.readouterr().err == ""


@pytest.mark.gpu
def test_the_largest_batch_of_a_gpu(tmp_path: Path) -> None:
    """Memory really runs out; in a process of its own, which alone is limited."""
    path = tmp_path / "run.json"
    chosen = "--tiny --device cuda --data librispeech --losses none dense --batch 8 --rounds 2 --largest"
    command = [sys.executable, "-m", "benchmarks.model", *chosen.split(), "--memory-limit", "0.25", "--json", str(path)]
    done = subprocess.run(command, cwd=Path(__file__).parent.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    run = json.loads(path.read_text())
    none, dense = run["records"][2:]
    assert none["outcome"] == dense["outcome"] == "measured"
    assert none["batch"] >= dense["batch"] > 0
    assert "out of memory" in dense["tried"].values()
    assert dense["peak_bytes"] < run["memory_limit"] * 2**30


def test_what_fails_is_no_figure(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(Training, "step", lambda training, batch: torch.tensor(float("nan")))
    record = measure.measure("none", "20s", 2, SETUP, rounds=1)
    assert record["outcome"] == "failed"
    assert record["reason"] == "ValueError: the loss is nan after the timed steps"
    assert "stats" not in record
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--losses", "triton"], "--losses triton: not usable on cpu"),
        (["--batch", "0"], "--batch: expected numbers of at least 1, got [0]"),
        (["--largest"], "expected --device cuda"),
        (["--picture", "run.jpg"], "expected a file name that ends in .png"),
        (["--json", "/nowhere/run.json"], "expected a file in a folder that exists"),
    ],
)
def test_options_that_are_wrong(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(SystemExit) as stopped:
        model.main(["--device", "cpu", "--tiny", *arguments])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_the_document_names_every_loss() -> None:
    text = (Path(__file__).parent.parent / "docs" / "models.md").read_text()
    assert set(LOSSES) <= set(re.findall(r"`([a-z0-9-]+)`", text))
    assert BEGIN in text
    assert END in text
