"""Fine-tune a small Parakeet-RNNT with Trainer, with its own loss and this one: `python -m examples.huggingface`.

A ParakeetForRNNT with random weights learns to spell synthetic utterances (or given ones, --data) for 50 steps.  With
--loss both it does so twice from the same weights on the same batches, and the two curves are printed side by side; the
folder --out receives curves.json and curves.png.  Needs `pip install '.[transformers]' matplotlib`.

transformers computes the model's own loss with torchaudio.  Where that is not installed, the same dense scores go
through `rnnt.rnnt_loss`, which is named in the output.
"""

import argparse
import importlib.util
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import rnnt
from rnnt.backends import NAMES

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is downloaded

try:
    import matplotlib
    from transformers import (
        ParakeetEncoderConfig,
        ParakeetForRNNT,
        ParakeetRNNTConfig,
        PrinterCallback,
        Trainer,
        TrainingArguments,
    )

    from rnnt.contrib.transformers import use_rnnt
except ImportError as missing:
    raise ImportError(f"{missing}; install: pip install '.[transformers]' matplotlib") from missing

matplotlib.use("Agg")
from matplotlib import pyplot

MELS, LETTERS = 32, 30
BLANK = LETTERS
Utterance = dict[str, Tensor]  # input_features [frames, mel bins], labels [U]


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        for name in ("steps", "batch", "accumulation", "utterances"):
            if getattr(options, name) < 1:
                raise ValueError(f"--{name}: expected a number >= 1, got {getattr(options, name)}")
        if options.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("--device: expected a device that torch can use here, got 'cuda'")
        utterances = _load(options.data) if options.data else synthetic(options.utterances, options.seed)
        names = ("own", "rnnt") if options.loss == "both" else (options.loss,)
        runs = {name: train(name, utterances, options) for name in names}
    except (OSError, ValueError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    report(runs, options)
    return 0


def synthetic(count: int, seed: int) -> list[Utterance]:
    """Utterances of 4 to 10 letters; a letter is 12 to 24 frames of its own spectrum, in noise."""
    generator = torch.Generator().manual_seed(seed)
    spectra = 2 * torch.randn(LETTERS, MELS, generator=generator)
    found = []
    for _ in range(count):
        labels = torch.randint(LETTERS, (int(torch.randint(4, 11, (), generator=generator)),), generator=generator)
        frames = torch.randint(12, 25, (len(labels),), generator=generator)
        features = spectra[labels].repeat_interleave(frames, dim=0)
        noise = torch.randn(features.shape, generator=generator)
        found.append({"input_features": features + noise, "labels": labels})
    return found


def _load(path: Path) -> list[Utterance]:
    """A list of utterances, saved with torch.save: input_features [frames, 32] and labels [U] in [0, 30)."""
    utterances: list[Utterance] = torch.load(path)
    for index, one in enumerate(utterances):
        if one["input_features"].shape[1:] != (MELS,):
            shape = tuple(one["input_features"].shape)
            raise ValueError(f"{path}[{index}] input_features: expected [frames, {MELS}], got {shape}")
        if len(one["labels"]) and not 0 <= int(one["labels"].min()) <= int(one["labels"].max()) < LETTERS:
            raise ValueError(
                f"{path}[{index}] labels: expected indices in [0, {LETTERS}), got {one['labels'].tolist()}"
            )
    return utterances


def collate(utterances: list[Utterance]) -> dict[str, Tensor]:
    """A padded batch; the model takes every label other than the blank for one, so the blank is the padding."""
    pad = torch.nn.utils.rnn.pad_sequence
    labels = pad([x["labels"] for x in utterances], batch_first=True, padding_value=BLANK)
    features = pad([x["input_features"] for x in utterances], batch_first=True)
    frames = torch.tensor([len(x["input_features"]) for x in utterances])
    return {
        "input_features": features,
        "attention_mask": (torch.arange(features.shape[1]) < frames[:, None]).long(),
        "decoder_input_ids": torch.nn.functional.pad(labels, (1, 0), value=BLANK),
        "labels": labels,
    }


def parakeet(seed: int) -> ParakeetForRNNT:
    """Random weights; without dropout, so that two runs differ in their loss function alone."""
    names = ("dropout", "dropout_positions", "layerdrop", "activation_dropout", "attention_dropout")
    encoder = ParakeetEncoderConfig(
        hidden_size=96, num_hidden_layers=2, num_attention_heads=4, intermediate_size=256, subsampling_factor=4,
        subsampling_conv_channels=32, num_mel_bins=MELS, **dict.fromkeys(names, 0.0),
    )  # fmt: skip
    config = ParakeetRNNTConfig(
        vocab_size=LETTERS + 1, blank_token_id=BLANK, decoder_hidden_size=96, num_decoder_layers=1,
        encoder_config=encoder,
    )  # fmt: skip
    torch.manual_seed(seed)
    return ParakeetForRNNT(config)


def train(name: str, utterances: list[Utterance], options: argparse.Namespace) -> dict[str, Any]:
    """Losses of the steps and seconds, of the model with the loss of that name."""
    model = parakeet(options.seed)
    computed_by = "transformers, torchaudio"
    if name == "rnnt":
        use_rnnt(model, options.backend)
        computed_by = f"rnnt {rnnt.__version__}, backend {options.backend}"
    elif importlib.util.find_spec("torchaudio") is None:
        model.loss_function = _dense_loss
        computed_by = "dense scores and rnnt.rnnt_loss: torchaudio is not installed"
    arguments = TrainingArguments(
        output_dir=str(options.out / name), max_steps=options.steps, per_device_train_batch_size=options.batch,
        gradient_accumulation_steps=options.accumulation, learning_rate=2e-3, lr_scheduler_type="constant",
        bf16=options.bf16, logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True, seed=options.seed,
        use_cpu=options.device == "cpu",
    )  # fmt: skip
    # On several GPUs Trainer would take torch.nn.DataParallel, under which the model's own loss fails.
    arguments._n_gpu = min(arguments.n_gpu, 1)
    trainer = Trainer(model=model, args=arguments, data_collator=collate, train_dataset=utterances)
    trainer.remove_callback(PrinterCallback)
    start = time.perf_counter()
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {"computed_by": computed_by, "losses": losses, "seconds": time.perf_counter() - start}


def _dense_loss(
    logits: Tensor, labels: Tensor, logit_lengths: Tensor, label_lengths: Tensor, blank_token_id: int, **_: Any
) -> Tensor:
    lengths = (logit_lengths, label_lengths)
    return rnnt.rnnt_loss(logits, labels, *lengths, blank_token_id, reduction="sum") / label_lengths.sum()


def report(runs: dict[str, dict[str, Any]], options: argparse.Namespace) -> None:
    """The curves as a table, as curves.json and as curves.png."""
    for name, run in runs.items():
        print(f"{name}: {run['computed_by']}; {run['seconds']:.1f} s with start-up")
    print("\nstep" + "".join(f"{name:>12}" for name in runs))
    for step in range(options.steps):
        if step % 5 == 0 or step == options.steps - 1:
            print(f"{step + 1:4}" + "".join(f"{run['losses'][step]:12.5f}" for run in runs.values()))
    if len(runs) == 2:
        first, second = (torch.tensor(run["losses"]) for run in runs.values())
        print(f"\nlargest distance, relative: {((first - second).abs() / first).max():.1e}")
    options.out.mkdir(parents=True, exist_ok=True)
    settings = {name: str(value) for name, value in vars(options).items()} | {"torch": torch.__version__}
    (options.out / "curves.json").write_text(json.dumps({"settings": settings, "runs": runs}, indent=1))
    figure, axes = pyplot.subplots(figsize=(7, 4))
    for (name, run), style in zip(runs.items(), ("-", "--"), strict=False):
        axes.plot(range(1, options.steps + 1), run["losses"], style, label=f"{name}: {run['computed_by']}")
    axes.set(xlabel="step", ylabel="loss per label")
    axes.legend(loc="upper right", fontsize="small")
    figure.savefig(options.out / "curves.png", dpi=120, bbox_inches="tight")
    pyplot.close(figure)
    print(f"{options.out / 'curves.json'}, {options.out / 'curves.png'}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m examples.huggingface", description=str(__doc__).splitlines()[0])
    parser.add_argument("--loss", choices=("own", "rnnt", "both"), default="both")
    parser.add_argument("--backend", choices=("auto", *NAMES), default="auto")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--accumulation", type=int, default=1, help="batches in a step")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--utterances", type=int, default=400, help="synthetic ones")
    parser.add_argument("--data", type=Path, help="utterances of your own instead: a file written by torch.save")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/huggingface"))
    return parser


if __name__ == "__main__":
    sys.exit(main())
