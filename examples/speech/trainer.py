"""Training: steps, schedule, evaluation, checkpoints.

    progress  share of the budget that is used: passes over the data / epochs, or seconds / (60 x minutes)
    rate      lr x min(1, (step + 1) / warm-up) x (1 in the first half of the budget, then half a cosine to 0)

The clock of `minutes` runs during training steps only: it excludes evaluation and the first two calls, in which a
backend may compile.  All random numbers follow from the seed and the step (dropout's from the process as well); a
checkpoint holds the place in the epoch and the clock, so that a run given in epochs and resumed continues as if it had
never stopped.  It holds nothing of the number of processes (ranks.py): a run may be resumed on any other.
Before: batches.py, model.py, gradients.py.  After: report.py.
"""

import json
import math
import platform
import sys
import time
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

import rnnt
from examples.speech import ranks
from examples.speech.batches import Batch, collate, epoch_order, mask, prepare
from examples.speech.data import Corpus
from examples.speech.decode import decode_batch
from examples.speech.features import LogMel, top_frequency
from examples.speech.gradients import Gradients, seed_of
from examples.speech.metrics import character_error_rate, word_error_rate
from examples.speech.model import Alphabet, Transducer

LEFT_OUT_AT_MOST = 10  # batches in a row that do not fit in memory
DECODE_BATCH = 128  # utterances; greedy search costs about as much for many as for one


@dataclass(frozen=True)
class Settings:
    """What determines a run.  `epochs` and `minutes`: the first to be reached ends it."""

    corpus: str | None = None
    backend: str = "auto"
    device: str = "cpu"
    dtype: str = "fp32"
    epochs: float | None = None
    minutes: float | None = None
    batch: int = 12
    seed: int = 0
    tile_rows: int | str | None = "auto"
    predictor: str = "stateless"
    lr: float = 1e-3
    warmup: int = 60
    evaluations: int = 10
    max_seconds: float = 15.0
    mask: bool = False
    threads: int = 1  # threads of one busy core wait for one another: many times slower than a single one

    def __post_init__(self) -> None:
        for name in ("epochs", "minutes", "batch", "lr", "warmup", "evaluations", "max_seconds"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"--{name.replace('_', '-')}: expected a number above 0, got {value}")
        if self.threads < 0:
            raise ValueError(f"--threads: expected a number from 0, got {self.threads}")
        if self.epochs is None and self.minutes is None:
            raise ValueError("--epochs or --minutes: expected one of them, got neither")


class Trainer:
    """One run on one corpus.  `checkpoint`: what `state` returned, to continue from."""

    def __init__(self, settings: Settings, corpus: Corpus, checkpoint: dict[str, Any] | None = None) -> None:
        self.settings = settings
        self.corpus = corpus
        self.device = torch.device(settings.device)
        self.fingerprint = _fingerprint(corpus)
        if checkpoint and checkpoint["fingerprint"] != self.fingerprint:
            raise ValueError("--resume: expected the data that the checkpoint was trained on, got different data")

        utterances = corpus.train + corpus.heldout
        self.alphabet = Alphabet("".join(sorted(set("".join(u.text for u in utterances)))))
        self.extractor = LogMel(top_hz=top_frequency(u.rate for u in utterances))
        self.train_set = prepare(corpus.train, self.extractor, self.alphabet, self.device, fit=True)
        self.heldout_set = prepare(corpus.heldout, self.extractor, self.alphabet, self.device)

        torch.manual_seed(settings.seed)
        self.model = Transducer(
            len(self.alphabet),
            self.extractor.bands,
            predictor=settings.predictor,
            backend=settings.backend,
            tile_rows=settings.tile_rows,
        ).to(self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), settings.lr, fused=self.device.type == "cuda")
        self.gradients = Gradients(self.model, settings.dtype)
        self.step = self.epoch = self.position = 0  # position: batches of this epoch that are done
        self.seconds = 0.0
        self._order = self._epoch_order()
        self.losses: list[float] = []  # of every step, nats per character
        self.left_out: list[int] = []  # steps before which a batch was left out that did not fit in memory
        self.evaluations: list[dict[str, float]] = []

        started = time.perf_counter()
        for indices in (self._order[0], self._order[-1]):  # shortest and longest: memory must suffice for these
            self.gradients.backward(self._batch(indices))
        self.first_calls_seconds = time.perf_counter() - started
        if checkpoint:
            self._restore(checkpoint)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    @property
    def epochs(self) -> float:
        """Passes over the data so far."""
        return self.epoch + self.position / len(self._order)

    @property
    def progress(self) -> float:
        """Share of the budget that is used, from 0 to 1 and a little more."""
        by_epochs = self.epochs / self.settings.epochs if self.settings.epochs else 0.0
        by_minutes = self.seconds / (60 * self.settings.minutes) if self.settings.minutes else 0.0
        return max(by_epochs, by_minutes)

    def train(self, evaluated: Callable[[], None] = lambda: None, stop_at_step: int | None = None) -> None:
        """Train until the budget is used; process 0 evaluates and then calls `evaluated`, for checkpoints."""
        count = self.settings.evaluations
        done = int(self.progress * count)
        layout = "{percentage:3.0f}%|{bar:20}| {elapsed} {postfix}"
        first = ranks.rank() == 0
        with tqdm(total=100, disable=None if first else True, leave=False, bar_format=layout) as bar:
            while self.progress < 1 and self.step != stop_at_step:
                self._step()
                due = min(count, int(self.progress * count))
                if due > done:
                    done = due
                    if first:
                        self._evaluate()
                        tqdm.write(self.status())
                        evaluated()
                bar.n = min(100.0, 100 * self.progress)
                bar.set_postfix_str(self._bar_text(), refresh=False)
                bar.update(0)

    def decode_heldout(self) -> list[str]:
        """Recognised text of the held-out utterances."""
        self.model.eval()
        texts = []
        for start in range(0, len(self.heldout_set), DECODE_BATCH):
            batch = collate(self.heldout_set[start : start + DECODE_BATCH])
            labels = decode_batch(self.model, batch.features, batch.feature_lengths)
            texts += [self.alphabet.decode(found) for found in labels]
        self.model.train()
        return texts

    def status(self) -> str:
        """One line on the last evaluation."""
        e = self.evaluations[-1]
        memory = "" if math.isnan(e["peak_mib"]) else f" | peak {e['peak_mib']:.0f} MiB"
        minutes, seconds = divmod(round(e["seconds"]), 60)
        return (
            f"step {self.step:5d}  epoch {self.epochs:5.1f}  "
            f"{minutes:2d}:{seconds:02d} | loss {e['loss']:.3f} a character | held out: CER {e['cer']:6.1%} "
            f"WER {e['wer']:6.1%} | {e['step_ms']:.0f} ms a step{memory}"
        )

    def state(self) -> dict[str, Any]:
        """Everything needed to continue, or to recognise speech, as tensors and plain values."""
        return {
            "settings": asdict(self.settings),
            "corpus": self.corpus.name,
            "fingerprint": self.fingerprint,
            "alphabet": self.alphabet.characters,
            "features": {
                "settings": {"bands": self.extractor.bands, "top_hz": self.extractor.top_hz},
                "state": self.extractor.state_dict(),
            },
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "clock": {"step": self.step, "epoch": self.epoch, "position": self.position, "seconds": self.seconds},
            "losses": self.losses,
            "left_out": self.left_out,
            "evaluations": self.evaluations,
        }

    def write_log(self, path: Path) -> None:
        """The curve and what produced it, as JSON."""
        log = {
            "settings": asdict(self.settings) | {"corpus": self.corpus.name},
            "environment": {
                "rnnt": rnnt.__version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
                "device": torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else platform.machine(),
                "threads": torch.get_num_threads(),
                "processes": ranks.count(),
            },
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "first_calls_seconds": self.first_calls_seconds,
            "evaluations": self.evaluations,
            "losses": self.losses,
            "left_out": self.left_out,
        }
        path.write_text(json.dumps(log, indent=1))

    def _restore(self, checkpoint: dict[str, Any]) -> None:
        self.model.load_state_dict(checkpoint["model"])
        self.optimizer.load_state_dict(checkpoint["optimizer"])
        clock = checkpoint["clock"]
        self.step, self.epoch, self.position = clock["step"], clock["epoch"], clock["position"]
        self.seconds = clock["seconds"]
        self._order = self._epoch_order()
        self.losses = list(checkpoint["losses"])
        self.left_out = list(checkpoint.get("left_out", ()))
        self.evaluations = list(checkpoint["evaluations"])

    def _epoch_order(self) -> list[list[int]]:
        return epoch_order(self.train_set, self.settings.batch, self.settings.seed, self.epoch)

    def _batch(self, indices: list[int]) -> Batch:
        return collate([self.train_set[index] for index in indices])

    def _step(self) -> None:
        """One update of the parameters; or none, when the batch does not fit in memory."""
        started = time.perf_counter()
        torch.manual_seed(seed_of(self.settings.seed, self.step))
        batch = self._batch(self._order[self.position])
        if self.settings.mask:
            batch = mask(batch)
        loss = self.gradients.compute(batch, self.settings.seed, self.step)
        if loss is None:
            self.left_out.append(self.step)
            if self.left_out.count(self.step) == LEFT_OUT_AT_MOST:
                raise torch.OutOfMemoryError(f"{LEFT_OUT_AT_MOST} batches in a row did not fit in memory")
        else:
            self._update(loss)
        self.position += 1
        if self.position == len(self._order):
            self.epoch, self.position = self.epoch + 1, 0
            self._order = self._epoch_order()
        seconds = time.perf_counter() - started
        self.seconds += ranks.of_first(seconds, self.device) if self.settings.minutes else seconds

    def _update(self, loss: float) -> None:
        if not math.isfinite(loss):
            raise FloatingPointError(f"the loss became {loss} at step {self.step}; try a lower --lr")
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.lr * self._rate()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.losses.append(loss)
        self.step += 1

    def _rate(self) -> float:
        decay = 1.0 if self.progress < 0.5 else 0.5 + 0.5 * math.cos(math.pi * (2 * self.progress - 1))
        return decay * min(1.0, (self.step + 1) / self.settings.warmup)

    def _evaluate(self) -> None:
        texts = [example.text for example in self.heldout_set]
        decoded = self.decode_heldout()
        before = self.evaluations[-1] if self.evaluations else {"step": 0, "seconds": 0.0}
        losses = self.losses[int(before["step"]) :]
        self.evaluations.append(
            {
                "step": self.step,
                "seconds": self.seconds,
                "loss": sum(losses) / len(losses) if losses else math.nan,  # mean since the last evaluation
                "cer": character_error_rate(texts, decoded),
                "wer": word_error_rate(texts, decoded),
                "step_ms": 1000 * (self.seconds - before["seconds"]) / max(1, len(losses)),
                "peak_mib": self._peak_mib(),
            }
        )

    def _peak_mib(self) -> float:
        """Peak memory in MiB: torch's on the GPU, the process's on the CPU, NaN where the system does not tell."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) / 2**20
        try:
            import resource
        except ImportError:  # Windows
            return math.nan
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak / 2**20 if sys.platform == "darwin" else peak / 2**10

    def _bar_text(self) -> str:
        recent = self.losses[-20:] or [math.nan]
        cer = f"CER {self.evaluations[-1]['cer']:.1%}, " if self.evaluations else ""
        step_ms = 1000 * self.seconds / max(1, self.step)
        return f"loss {sum(recent) / len(recent):.3f}, {cer}{step_ms:.0f} ms a step, peak {self._peak_mib():.0f} MiB"


def _fingerprint(corpus: Corpus) -> int:
    """A number that changes when the training data does."""
    lines = (f"{u.name}\t{u.text}\t{len(u.samples)}" for u in corpus.train)
    return zlib.crc32("\n".join(lines).encode())
