"""Train a small streaming recogniser: `python -m examples.speech.train`.

Without arguments: English telephone prompts (`python -m examples.speech.fetch` gets them), two and a half minutes.
The run's folder receives `last.pt` and `best.pt` (lowest held-out CER) at every evaluation, and `log.json` and
`report.png`.  On several GPUs: `torchrun --nproc-per-node 2 -m examples.speech.train`; --batch is what they share.
Before: fetch.py.  After: `python -m examples.speech.decode FOLDER/best.pt some.wav`.
"""

import argparse
import itertools
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

import rnnt
from examples.speech import checkpoint, ranks
from examples.speech.data import CORPORA, load

try:
    from examples.speech import report
    from examples.speech.trainer import Settings, Trainer
except ImportError as missing:
    raise ImportError(f"{missing}; install what the example needs with: pip install -e '.[example]'") from missing

DEFAULT_MINUTES = 2.5
CHANGEABLE = ("backend", "device", "epochs", "minutes", "tile_rows", "evaluations", "threads")  # when resuming


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        run(options)
    except (OSError, ValueError, ImportError, FloatingPointError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except torch.cuda.OutOfMemoryError as error:
        print(
            f"error: {error}\ntry a smaller --batch, a smaller --tile-rows or a shorter --max-seconds", file=sys.stderr
        )
        return 1
    except KeyboardInterrupt:
        print("\nstopped; --resume FOLDER/last.pt continues from the last evaluation", file=sys.stderr)
        return 130
    return 0


def run(options: argparse.Namespace) -> Trainer:
    """Load the data, train, and write the run's folder (under torchrun, process 0 does)."""
    resumed = checkpoint.read(options.resume) if options.resume else None
    settings = _settings(options, resumed)
    ranks.join(settings.device)
    _check_device(settings.device)
    if settings.threads:
        torch.set_num_threads(settings.threads)
    corpus = load(settings.corpus, options.data, settings.max_seconds, options.skip_bad)
    settings = replace(settings, corpus=corpus.name)
    if ranks.rank() == 0:
        print(corpus.summary())
    trainer = Trainer(settings, corpus, resumed)
    out = options.out or (options.resume.parent if options.resume else _new_folder(settings))
    if ranks.rank() == 0:
        out.mkdir(parents=True, exist_ok=True)
        print(_description(trainer))
    trainer.train(evaluated=lambda: _save(trainer, out))
    if ranks.rank() == 0:
        trainer.write_log(out / "log.json")
        report.draw(trainer, out / "report.png")
        print(report.sentences(trainer))
        print(f"wrote {', '.join(str(out / name) for name in ('last.pt', 'best.pt', 'log.json', 'report.png'))}")
    ranks.leave()
    return trainer


def _new_folder(settings: Settings) -> Path:
    """runs/..., with a number where an earlier run has the name."""
    path = Path("runs") / f"{settings.corpus}-{settings.backend}-{settings.dtype}-{settings.seed}"
    numbered = (path.with_name(f"{path.name}-{number}") for number in itertools.count(2))
    return next(candidate for candidate in itertools.chain([path], numbered) if not candidate.exists())


def _description(trainer: Trainer) -> str:
    settings = trainer.settings
    parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
    processes = f" x {ranks.count()} processes" if ranks.count() > 1 else ""
    return (
        f"{parameters / 1e6:.2f} M parameters, {settings.predictor} predictor, {len(trainer.alphabet)} symbols; "
        f"backend {settings.backend} on {settings.device}{processes}, {settings.dtype}; "
        f"first calls {trainer.first_calls_seconds:.1f} s"
    )


def _save(trainer: Trainer, out: Path) -> None:
    state = trainer.state()
    checkpoint.write(state, out / "last.pt")
    if trainer.evaluations[-1]["cer"] <= min(e["cer"] for e in trainer.evaluations):
        checkpoint.write(state, out / "best.pt")
    trainer.write_log(out / "log.json")


def _settings(options: argparse.Namespace, resumed: dict[str, Any] | None) -> Settings:
    """Defaults, overridden by the resumed checkpoint's settings, overridden by the arguments."""
    names = [field.name for field in fields(Settings)]
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    if options.tile_rows == "none":
        given["tile_rows"] = None
    if resumed is None:
        given.setdefault("device", "cuda" if torch.cuda.is_available() else "cpu")
        if "epochs" not in given:
            given.setdefault("minutes", DEFAULT_MINUTES)
        return Settings(**given)
    saved = resumed["settings"]
    for name, value in given.items():
        if name not in CHANGEABLE and value != saved[name]:
            flag = name.replace("_", "-")
            raise ValueError(
                f"--{flag}: expected {saved[name]}, as the resumed checkpoint was trained with, got {value}"
            )
    if "epochs" in given or "minutes" in given:
        saved = saved | {"epochs": None, "minutes": None}
    return Settings(**saved | given)


def _check_device(name: str) -> None:
    try:
        torch.zeros(1, device=name)
    except (AssertionError, RuntimeError) as error:  # torch without CUDA raises the former
        reason = str(error).splitlines()[0]
        raise ValueError(f"--device: expected a device that torch can use here, got {name!r} ({reason})") from error


def _rows(text: str) -> int | str:
    if text not in ("auto", "none") and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a number of rows, auto or none, got {text!r}")
    return text if text in ("auto", "none") else int(text)


def _parser() -> argparse.ArgumentParser:
    """Options default to None, so that a resumed run can tell what was given."""
    unusable = [f"{name} is not usable here: {reason}" for name, reason in rnnt.backends().items() if reason]
    parser = argparse.ArgumentParser(
        prog="python -m examples.speech.train",
        description="Train a small streaming speech recogniser with the RNN-T loss.",
        epilog="\n".join(unusable),
    )
    add = parser.add_argument
    add("--corpus", choices=CORPORA, help="default: asterisk, or folder where --data is a folder of .wav files")
    add(
        "--data",
        type=Path,
        nargs="+",
        default=[],
        help=".deb files, their folder, or a folder of .wav and transcript.txt",
    )
    add("--skip-bad", action="store_true", help="leave out recordings of your folder that cannot be used")
    add("--max-seconds", type=float, help="longest recording to train on (15)")
    add("--backend", choices=["auto", *rnnt.backends()], help="how the loss is computed (auto)")
    add("--tile-rows", type=_rows, metavar="N|auto|none", help="lattice rows of a tile; none: untiled (auto)")
    add("--device", help="cpu, cuda, cuda:1, ... (cuda where there is one)")
    add("--threads", type=int, help="CPU threads; 0: as many as torch takes (1: this model gains little from more)")
    add("--dtype", choices=("fp32", "bf16"), help="bf16: autocast (fp32)")
    add(
        "--minutes",
        type=float,
        help=f"budget of training time; the schedule adapts ({DEFAULT_MINUTES}, without --epochs)",
    )
    add(
        "--epochs",
        type=float,
        help="budget in passes over the data; with --minutes the first to be reached ends the run",
    )
    add("--batch", type=int, help="utterances, of all processes together (12)")
    add("--lr", type=float, help="peak learning rate (1e-3)")
    add("--warmup", type=int, help="steps to reach it (60)")
    add("--mask", action=argparse.BooleanOptionalAction, help="hide stripes of bands and frames: for long runs (off)")
    add("--predictor", choices=("stateless", "lstm"), help="prediction network (stateless)")
    add("--seed", type=int, help="of weights, order and dropout (0)")
    add("--evaluations", type=int, help="how many times to decode the held-out recordings (10)")
    add(
        "--out",
        type=Path,
        help="folder for checkpoints, log and picture (runs/..., a new one; resuming: the checkpoint's)",
    )
    add("--resume", type=Path, metavar="CHECKPOINT", help="continue a run from its last.pt")
    return parser


if __name__ == "__main__":
    sys.exit(main())
