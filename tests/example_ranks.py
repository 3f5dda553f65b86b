"""What one process of test_example_ranks.py does: `torchrun -m tests.example_ranks DATA CHECKPOINT OUT DEVICE`.

Runs the example's trainer on the recordings in DATA in several ways, each as often as its name says, and saves the
losses and parameters to OUT.  CHECKPOINT is of a single process.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from examples.speech import checkpoint, data, ranks
from examples.speech.trainer import Settings, Trainer

STOP, END = 3, 8  # steps: of the checkpoint, of the whole run


def trainer(corpus: data.Corpus, device: str, saved: dict[str, Any] | None = None, dropout: bool = False) -> Trainer:
    """Without dropout, whose masks depend on the number of processes; batches of 7, so that shares are uneven."""
    chosen = Settings("folder", "reference", device, epochs=4, batch=7, warmup=5, evaluations=1, mask=True)
    made = Trainer(chosen, corpus, saved)
    for module in made.model.modules():
        if isinstance(module, nn.Dropout) and not dropout:
            module.p = 0.0
    return made


def outcome(run: Trainer) -> dict[str, Any]:
    parameters = torch.cat([parameter.detach().flatten() for parameter in run.model.parameters()])
    return {"losses": run.losses, "parameters": parameters.cpu(), "left_out": run.left_out}


def fail(run: Trainer, times: int) -> None:
    """Let the last process run out of memory at step STOP, when its backward pass is nearly through."""
    left = [times if ranks.rank() == ranks.count() - 1 else 0]

    def out_of_memory(_gradient: torch.Tensor) -> None:
        if run.step == STOP and left[0]:
            left[0] -= 1
            raise torch.OutOfMemoryError("planted by the test")

    run.model.encoder.input.weight.register_hook(out_of_memory)


def main(folder: Path, saved: Path, out: Path, device: str) -> None:
    torch.set_num_threads(1)
    ranks.join(device)
    corpus = data.load("folder", [folder])
    found = {}

    run = trainer(corpus, device)
    run.train(stop_at_step=STOP)
    if ranks.rank() == 0:
        checkpoint.write(run.state(), out / "two.pt")
    run.train(stop_at_step=END)
    found["whole"] = outcome(run)

    run = trainer(corpus, device, checkpoint.read(saved))
    run.train(stop_at_step=END)
    found["resumed"] = outcome(run)

    for name, times in (("retried", 1), ("left out", 2)):
        run = trainer(corpus, device)
        fail(run, times)
        run.train(stop_at_step=END)
        found[name] = outcome(run)

    for name in ("dropout", "dropout again"):
        run = trainer(corpus, device, dropout=True)
        run.train(stop_at_step=STOP)
        found[name] = outcome(run)

    run = Trainer(Settings("folder", "reference", device, minutes=0.3 / 60, batch=1, evaluations=1), corpus)
    run.train()
    found["minutes"] = outcome(run)
    torch.save(found, out / f"{ranks.rank()}.pt")
    ranks.leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
