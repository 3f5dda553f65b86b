"""The example's training, checkpoints and commands, on recordings made of tones: one tone a letter."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from examples.speech import checkpoint, data, decode, train
from examples.speech.trainer import Settings, Trainer
from tests.test_example_data import wav_bytes

RATE = 8000
TONES = {"a": 400.0, "b": 700.0, "c": 1200.0, "d": 2000.0, " ": 0.0}


def recording(text):
    """120 ms of tone for each letter."""
    time = np.arange(round(0.12 * RATE)) / RATE
    return np.concatenate([np.sin(2 * np.pi * TONES[letter] * time) for letter in text])


def tones(folder):
    """Recordings of made-up words with their transcript, in the folder."""
    rng = np.random.default_rng(0)
    lines = []
    for number in range(40):
        text = "".join(rng.choice(list("abcd"), rng.integers(2, 6)))
        (folder / f"{number}.wav").write_bytes(wav_bytes(np.round(8000 * recording(text))))
        lines.append(f"{number}: {text}\n")
    (folder / "transcript.txt").write_text("".join(lines))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tones(tmp_path_factory.mktemp("tones"))


@pytest.fixture(scope="module")
def corpus(folder):
    return data.load(None, [folder])


def settings(**changes):
    return Settings(**{"corpus": "folder", "backend": "reference", "epochs": 4, "batch": 6, "evaluations": 4} | changes)


def parameters(trainer):
    return torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])


@pytest.mark.parametrize(("predictor", "dtype"), [("stateless", "fp32"), ("lstm", "fp32"), ("stateless", "bf16")])
def test_loss_falls(corpus, predictor, dtype):
    trainer = Trainer(settings(epochs=8, warmup=5, predictor=predictor, dtype=dtype), corpus)
    trainer.train()
    assert all(map(math.isfinite, trainer.losses))
    assert sum(trainer.losses[-5:]) < 0.5 * sum(trainer.losses[:5])
    assert trainer.progress == 1
    assert [e["step"] for e in trainer.evaluations][-1] == trainer.step
    assert len(trainer.evaluations) == 4


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["reference", "compiled", "triton"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_loss_falls_on_a_gpu(corpus, backend, dtype):
    trainer = Trainer(settings(epochs=8, warmup=5, backend=backend, device="cuda", dtype=dtype), corpus)
    trainer.train()
    assert all(map(math.isfinite, trainer.losses))
    assert sum(trainer.losses[-5:]) < 0.5 * sum(trainer.losses[:5])


def test_tones_are_learnt(corpus):
    trainer = Trainer(settings(epochs=20, warmup=10, evaluations=1), corpus)
    trainer.train()
    assert trainer.evaluations[-1]["cer"] < 0.3


@pytest.mark.parametrize("stop", [3, 12])
def test_resumed_run_equals_uninterrupted_run(corpus, tmp_path, stop):
    chosen = settings(epochs=3, warmup=5, mask=True)
    whole = Trainer(chosen, corpus)
    whole.train()
    first = Trainer(chosen, corpus)
    first.train(stop_at_step=stop)
    assert first.step == stop
    checkpoint.write(first.state(), tmp_path / "last.pt")
    second = Trainer(chosen, corpus, checkpoint.read(tmp_path / "last.pt"))
    second.train()
    assert second.losses == whole.losses
    assert torch.equal(parameters(second), parameters(whole))
    assert [e["cer"] for e in second.evaluations] == [e["cer"] for e in whole.evaluations]


def test_same_seed_same_run_other_seed_other_run(corpus):
    losses = []
    for seed in (0, 0, 1):
        trainer = Trainer(settings(seed=seed), corpus)
        trainer.train(stop_at_step=4)
        losses.append(trainer.losses)
    assert losses[0] == losses[1]
    assert losses[0] != losses[2]


def test_minutes_end_a_run(corpus):
    trainer = Trainer(settings(epochs=None, minutes=0.5 / 60, evaluations=2), corpus)
    trainer.train()
    assert 0.5 <= trainer.seconds < 5
    assert trainer.evaluations[-1]["seconds"] == trainer.seconds


def test_learning_rate_schedule(corpus):
    trainer = Trainer(settings(epochs=100, warmup=4), corpus)
    rates = []
    for epoch, step in ((0, 0), (0, 3), (49, 900), (75, 1000), (100, 2000)):
        trainer.epoch, trainer.step = epoch, step
        rates.append(trainer._rate())
    assert rates == pytest.approx([0.25, 1.0, 1.0, 0.5, 0.0])


@pytest.fixture(scope="module")
def finished(folder, tmp_path_factory):
    """The folder of a short run of the command."""
    out = tmp_path_factory.mktemp("run")
    arguments = f"--data {folder} --backend reference --device cpu --epochs 2 --batch 6 --evaluations 2 --out {out}"
    assert train.main(arguments.split()) == 0
    return out


def test_command_writes_its_run(finished):
    log = json.loads((finished / "log.json").read_text())
    assert log["settings"]["backend"] == "reference"
    assert {"seed", "device", "dtype", "corpus"} <= set(log["settings"])
    assert {"step", "loss", "cer", "wer", "step_ms", "peak_mib", "seconds"} <= set(log["evaluations"][-1])
    assert len(log["losses"]) == log["evaluations"][-1]["step"]
    assert 0.9e6 < log["parameters"] < 1.1e6
    assert (finished / "report.png").read_bytes().startswith(b"\x89PNG")
    assert {path.name for path in finished.iterdir()} == {"last.pt", "best.pt", "log.json", "report.png"}


def test_command_shows_progress_and_sentences(folder, tmp_path, capsys):
    arguments = (
        f"--data {folder} --backend reference --device cpu --epochs 2 --evaluations 2 --tile-rows none --out {tmp_path}"
    )
    assert train.main(arguments.split()) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("folder: train ")
    assert sum(line.startswith("step ") and "CER" in line and "ms a step" in line for line in lines) == 2
    assert sum(line.startswith("  said: ") for line in lines) >= 3


def test_decode_command(finished, folder, capsys):
    wavs = [str(folder / "0.wav"), str(folder / "1.wav")]
    assert decode.main([str(finished / "best.pt"), *wavs]) == 0
    assert [line.split(": ")[0] for line in capsys.readouterr().out.splitlines()] == wavs


def test_resume_command(finished, folder, tmp_path, capsys):
    resume = ["--data", str(folder), "--resume", str(finished / "last.pt"), "--out", str(tmp_path)]
    assert train.main([*resume, "--epochs", "3"]) == 0
    before = json.loads((finished / "log.json").read_text())["losses"]
    after = json.loads((tmp_path / "log.json").read_text())["losses"]
    assert after[: len(before)] == before
    assert len(after) > len(before)
    capsys.readouterr()
    assert train.main([*resume, "--seed", "5"]) == 1
    assert "--seed: expected 0" in capsys.readouterr().err


def test_resumed_run_goes_on_in_its_folder(finished, folder, tmp_path):
    for name in ("last.pt", "log.json"):
        (tmp_path / name).write_bytes((finished / name).read_bytes())
    assert train.main(["--data", str(folder), "--resume", str(tmp_path / "last.pt"), "--epochs", "3"]) == 0
    before, after = (json.loads((x / "log.json").read_text())["losses"] for x in (finished, tmp_path))
    assert len(after) > len(before)


def test_another_run_gets_another_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = Settings(corpus="folder", backend="reference", epochs=1)
    names = ["folder-reference-fp32-0", "folder-reference-fp32-0-2", "folder-reference-fp32-0-3"]
    for name in names:
        path = train._new_folder(settings)
        assert path == Path("runs") / name
        path.mkdir(parents=True)


def test_resume_with_other_data(finished, folder, tmp_path, capsys):
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "0.wav").write_bytes(wav_bytes([0] * RATE))
    assert train.main(["--data", str(tmp_path), "--resume", str(finished / "last.pt")]) == 1
    assert "different data" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "nowhere"], "no such file or folder"),
        (["--resume", "nowhere.pt"], "--resume nowhere.pt: expected a run's last.pt, got no file"),
        (["--resume", "."], "--resume .: expected a run's last.pt, got a folder"),
        (["--resume", __file__], "expected a checkpoint"),
        (["--epochs", "0"], "--epochs: expected a number above 0, got 0.0"),
        (["--minutes", "-1"], "--minutes: expected a number above 0"),
        (["--threads", "-1"], "--threads: expected a number from 0, got -1"),
        (["--device", "abacus"], "--device: expected a device that torch can use here, got 'abacus'"),
    ],
)
def test_messages(arguments, message, capsys):
    assert train.main(arguments) == 1
    assert message in capsys.readouterr().err


def test_decode_messages(finished, tmp_path, capsys):
    wav = tmp_path / "low.wav"
    wav.write_bytes(wav_bytes([0] * 4000, rate=4000))
    assert decode.main([str(finished / "best.pt"), str(wav)]) == 1
    assert "expected at least 7600 Hz" in capsys.readouterr().err
    assert decode.main([str(finished / "best.pt"), str(tmp_path / "nowhere.wav")]) == 1
    assert decode.main([str(Path(__file__)), str(wav)]) == 1
    assert "expected a checkpoint" in capsys.readouterr().err
