"""What a run shows at its end: a picture, and recognised sentences beside their transcripts.

The alignment posterior of one held-out utterance comes from the loss itself.  With log Z the log-likelihood,

    occupancy_blank[t, u] = d log Z / d logp_blank[t, u],    occupancy_label[t, u] = d log Z / d logp_label[t, u]

that is minus the loss's gradient: the probability that an alignment of audio and text passes that arc.  Every
alignment leaves each frame by one blank and emits each label once, so for every t the blank occupancies sum to 1
over u, and for every u the label occupancies sum to 1 over t.
Before: trainer.py.  After: nothing.
"""

from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor

import rnnt
from examples.speech.batches import Example, collate
from examples.speech.features import HOP_SECONDS
from examples.speech.model import BLANK, STACK, Transducer
from examples.speech.trainer import Trainer


def occupancies(model: Transducer, example: Example) -> tuple[Tensor, Tensor]:
    """Posterior of one utterance's alignments: blank arcs [T, U + 1] and label arcs [T, U], each in [0, 1]."""
    batch = collate([example])
    joint = model.joint
    with torch.no_grad():
        states, lengths = model.encoder(batch.features, batch.feature_lengths)
        planes = rnnt.joint_log_probs(
            joint.encoder_projection(states),
            joint.predictor_projection(model.predictor(batch.targets)),
            joint.output.weight,
            batch.targets,
            lengths,
            batch.target_lengths,
            linear_bias=joint.output.bias,
            activation=joint.activation,
            blank=BLANK,
            backend=joint.backend,
        )
    logp_blank, logp_label = (plane.detach().requires_grad_() for plane in planes)
    loss = rnnt.rnnt_loss_from_log_probs(
        logp_blank, logp_label, lengths, batch.target_lengths, reduction="sum", backend=joint.backend
    )
    d_blank, d_label = torch.autograd.grad(loss, (logp_blank, logp_label))
    return -d_blank[0], -d_label[0]


def draw(trainer: Trainer, path: Path) -> None:
    """Save the picture: loss and error rates over steps, and the alignment of one held-out utterance."""
    example = typical(trainer.heldout_set)
    model = trainer.model.eval()
    blank, label = (plane.float().cpu() for plane in occupancies(model, example))
    figure = Figure(figsize=(11, 9), layout="constrained")  # without pyplot: no display, no state between calls
    axes = figure.subplot_mosaic("LR;FF;AA", height_ratios=(4, 2, 6))
    loss_axes, rate_axes, frames_axes, lattice_axes = (axes[name] for name in "LRFA")

    smooth = max(1, len(trainer.losses) // 100)
    means = torch.tensor(trainer.losses).split(smooth)
    loss_axes.plot([smooth * (i + 0.5) for i in range(len(means))], [float(part.mean()) for part in means])
    loss_axes.set(title="Training loss", xlabel="step", ylabel="nats a character", yscale="log")
    steps = [e["step"] for e in trainer.evaluations]
    for name in ("wer", "cer"):
        rate_axes.plot(steps, [100 * e[name] for e in trainer.evaluations], marker=".", label=name.upper())
    rate_axes.set(title="Held-out error rate", xlabel="step", ylabel="%", ylim=(0, None))
    rate_axes.legend()

    seconds = len(blank) * STACK * HOP_SECONDS
    image = example.features.T.cpu().numpy()
    length = image.shape[1] * HOP_SECONDS
    frames_axes.imshow(image, origin="lower", aspect="auto", extent=(0, length, 0, len(image)), cmap="magma")
    frames_axes.set(title=f'"{example.text}"', ylabel="log-mel band", xlim=(0, seconds))
    # A node's occupancy: its blank arc's plus its label arc's; after the last label there is no label arc.
    node = blank + torch.nn.functional.pad(label, (0, 1))
    shown = lattice_axes.imshow(
        node.T.numpy(),
        origin="lower",
        aspect="auto",
        extent=(0, seconds, -0.5, len(example.text) + 0.5),
        vmin=0,
        vmax=1,
        cmap="Blues",
    )
    lattice_axes.set(
        xlabel="seconds", ylabel="characters so far", title="Alignment posterior: occupancy of the lattice"
    )
    lattice_axes.set_yticks(range(len(example.text) + 1), ["", *example.text], fontsize=7)
    figure.colorbar(shown, ax=lattice_axes, label="probability")
    settings = trainer.settings
    figure.suptitle(
        f"{trainer.corpus.name}, backend {settings.backend}, {settings.device}, {settings.dtype}, seed {settings.seed}",
        fontsize=9,
    )
    figure.savefig(path, dpi=120)


def typical(examples: list[Example], characters: int = 26) -> Example:
    """The example whose text is nearest to that many characters long."""
    return min(examples, key=lambda example: abs(len(example.text) - characters))


def sentences(trainer: Trainer, count: int = 8) -> str:
    """Transcripts and recognised text, pair by pair, spread over the held-out utterances' lengths."""
    pairs = sorted(
        zip([e.text for e in trainer.heldout_set], trainer.decode_heldout(), strict=True), key=lambda p: len(p[0])
    )
    stride = max(1, len(pairs) // count)
    return "\n".join(f"  said:  {text}\n  heard: {heard}" for text, heard in pairs[stride // 2 :: stride][:count])
