"""Training a ParakeetForRNNT after `use_rnnt`: with Trainer, on two processes, in the guide and in the example.

Expected curves and gradients are those of the same model with its own loss (see parakeet.py).
"""

import json
import re
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import Trainer, TrainingArguments

import rnnt
import rnnt.contrib.transformers as contrib
from rnnt.contrib.transformers import use_rnnt
from tests import parakeet as tiny
from tests.parakeet import batch, dense_loss, exact_convolutions, own_loss, parakeet
from tests.support import DEVICES, places

__all__ = ["exact_convolutions", "own_loss"]  # fixtures

ROOT = Path(rnnt.__file__).parent.parent
STEPS = 4


def utterances(count):
    """Of other sizes each, without padding."""
    found = []
    for index in range(count):
        one = batch(seed=index, B=1, frames=24 + 4 * index, U=1 + index % 3)
        found.append({name: x[0] for name, x in one.items()})
    return found


def collate(examples):
    values = {"labels": tiny.BLANK, "decoder_input_ids": tiny.BLANK, "attention_mask": 0, "input_features": 0}
    pad = torch.nn.utils.rnn.pad_sequence
    return {name: pad([x[name] for x in examples], batch_first=True, padding_value=v) for name, v in values.items()}


def train(model, folder, place, **options):
    """Losses of the steps, the evaluation's loss, and the parameters afterwards."""
    if options.pop("checkpointing", False):
        named_newly = hasattr(model, "activation_checkpointing_enable")  # 5.24; the older name warns there
        (model.activation_checkpointing_enable if named_newly else model.gradient_checkpointing_enable)()
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=STEPS, per_device_train_batch_size=2, learning_rate=0.05, optim="sgd",
        lr_scheduler_type="constant", logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True,
        dataloader_pin_memory=False, use_cpu=place.device == "cpu", seed=1, **options,
    )  # fmt: skip
    arguments._n_gpu = min(arguments.n_gpu, 1)  # see examples/huggingface.py
    trainer = Trainer(
        model=model, args=arguments, data_collator=collate, train_dataset=utterances(8), eval_dataset=utterances(3)
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == STEPS
    parameters = {name: x.detach().double().cpu() for name, x in model.named_parameters()}
    return losses, trainer.evaluate()["eval_loss"], parameters


TRAINER = {
    "plain": {},
    "accumulation": {"gradient_accumulation_steps": 3},
    "bf16": {"bf16": True},
    "checkpointing": {"checkpointing": True},
    "loss-only": {"prediction_loss_only": True},
}


@pytest.mark.parametrize("place", [x for x in places() if not x.values[0].interpreted])
@pytest.mark.parametrize("options", TRAINER.values(), ids=TRAINER)
def test_trainer(own_loss, tmp_path, place, options):
    """The same curve, evaluation and parameters as with transformers' own loss, to the rounding of the dtype."""
    found = train(use_rnnt(parakeet(), place.backend), tmp_path / "rnnt", place, **options)
    expected = train(parakeet(), tmp_path / "own", place, **options)
    tolerance = 2e-2 if "bf16" in options else 1e-4
    assert max(expected[0]) - min(expected[0]) > 0.1  # it learns
    assert found[0] == pytest.approx(expected[0], rel=tolerance)
    assert found[1] == pytest.approx(expected[1], rel=tolerance)
    start = {name: x.detach().double() for name, x in parakeet().named_parameters()}
    moved = max(float((x - start[name]).abs().max()) for name, x in expected[2].items())
    for name, x in expected[2].items():
        assert (found[2][name] - x).abs().max() <= 5 * tolerance * moved, name


def test_trainer_resumes(tmp_path):
    """A checkpoint of a patched model goes on where it ended."""

    def trainer(model):
        arguments = TrainingArguments(
            output_dir=str(tmp_path), max_steps=STEPS, save_steps=2, per_device_train_batch_size=2, learning_rate=0.05,
            optim="sgd", lr_scheduler_type="constant", logging_steps=1, report_to=[], disable_tqdm=True, use_cpu=True,
            dataloader_pin_memory=False,
        )  # fmt: skip
        return Trainer(model=model, args=arguments, data_collator=collate, train_dataset=utterances(8))

    through = trainer(use_rnnt(parakeet(), "reference"))
    through.train()
    resumed = trainer(use_rnnt(parakeet(), "reference"))
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    for x, y in zip(resumed.model.parameters(), through.model.parameters(), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)


# Several processes

RANKS = 2
WRAPPERS = ("ddp", "ddp-static", "model", "joint", "head")


def wrapped(kind):
    """The patched model under DDP, or sharded: as one, with its joint network, or with its output layer by itself."""
    model = use_rnnt(parakeet(vocab_size=12), "reference")
    if kind.startswith("ddp"):
        return DistributedDataParallel(model, static_graph=kind == "ddp-static")
    mesh = init_device_mesh("cpu", (RANKS,))
    part = {"model": None, "joint": model.joint, "head": model.joint.head}[kind]
    for module in (*model.encoder.layers, part, model):
        if module is not None:
            fully_shard(module, mesh=mesh)
    return model


def one_process(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS, timeout=timedelta(seconds=120)
    )
    found = {}
    for kind in WRAPPERS:
        model = wrapped(kind)
        output = model(**batch(seed=rank))
        assert output.logits is None
        output.loss.backward()
        gradients = {name.removeprefix("module."): x.grad for name, x in model.named_parameters()}
        found[kind] = {name: x.full_tensor() if hasattr(x, "full_tensor") else x for name, x in gradients.items()}
        found[kind]["loss"] = output.loss.detach()
    torch.save(found, f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


def test_two_processes(tmp_path):
    """Ranks' gradients are the same bits, and the mean of what the model's own loss gives each rank's batch."""
    torch.multiprocessing.spawn(one_process, (str(tmp_path),), RANKS)
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(RANKS)]
    expected, losses = {}, []
    for rank in range(RANKS):
        model = parakeet(vocab_size=12, dtype=torch.float64)
        model.loss_function = dense_loss
        losses.append(model(**batch(dtype=torch.float64, seed=rank)).loss)
        (losses[-1] / RANKS).backward()
        for name, x in model.named_parameters():
            expected[name] = expected.get(name, 0) + x.grad
    scale = max(float(x.abs().max()) for x in expected.values())
    for kind in WRAPPERS:
        for rank in range(RANKS):
            assert float(ranks[rank][kind].pop("loss")) == pytest.approx(losses[rank].item(), rel=1e-5)
        assert ranks[0][kind].keys() == expected.keys()
        for name, x in ranks[0][kind].items():
            assert torch.equal(x, ranks[1][kind][name]), f"{kind} {name}: ranks differ"
            assert (x - expected[name]).abs().max() <= 1e-5 * scale, f"{kind} {name}"


# The guide and the example


def test_guide(tmp_path, monkeypatch):
    """The code of docs/huggingface.md, one block after the other."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    gpus = min(torch.cuda.device_count(), 1)  # Trainer takes all that it sees
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    blocks = re.findall(
        r"^```python\n(.*?)^```", (ROOT / "docs" / "huggingface.md").read_text(), re.MULTILINE | re.DOTALL
    )
    assert len(blocks) > 4
    names: dict = {}
    for block in blocks:
        exec(compile(block, "docs/huggingface.md", "exec"), names)
    assert not isinstance(names["model"].loss_function, contrib.TransducerLoss)


@pytest.mark.parametrize("device", DEVICES)
def test_example(tmp_path, capsys, device):
    """Both curves of a few steps, to the rounding of float32."""
    pytest.importorskip("matplotlib")
    from examples import huggingface

    arguments = ["--steps", "3", "--batch", "2", "--utterances", "6", "--device", device, "--out", str(tmp_path)]
    assert huggingface.main([*arguments, "--backend", "reference"]) == 0
    runs = json.loads((tmp_path / "curves.json").read_text())["runs"]
    assert len(runs["own"]["losses"]) == 3
    assert runs["rnnt"]["losses"] == pytest.approx(runs["own"]["losses"], rel=1e-4)
    assert (tmp_path / "curves.png").stat().st_size > 1000
    assert "largest distance" in capsys.readouterr().out


def test_example_reads_data(tmp_path):
    pytest.importorskip("matplotlib")
    from examples import huggingface

    data = tmp_path / "data.pt"
    torch.save(huggingface.synthetic(2, 0), data)
    assert len(huggingface._load(data)) == 2
    torch.save([{"input_features": torch.zeros(4, 5), "labels": torch.zeros(1, dtype=torch.long)}], data)
    with pytest.raises(ValueError, match=r"\[0\] input_features: expected \[frames, 32\], got \(4, 5\)"):
        huggingface._load(data)
