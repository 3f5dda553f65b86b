"""A tiny random ParakeetForRNNT, a ragged batch for it, and what its own loss gives.

transformers computes its loss with torchaudio on the dense scores.  `own_loss` is transformers' code, with torchaudio
where that can be imported and otherwise with the reference backend in torchaudio's place (float32: that code casts).
`dense_loss` is the same in the model's dtype, for truths in float64.
"""

import contextlib
import importlib.machinery
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import rnnt

pytest.importorskip("transformers")

from transformers import ParakeetEncoderConfig, ParakeetForRNNT, ParakeetRNNTConfig
from transformers.loss import loss_rnnt
from transformers.utils import import_utils

MELS, VOCABULARY, BLANK = 16, 11, 10
RATES = ("dropout", "dropout_positions", "layerdrop", "activation_dropout", "attention_dropout")
NO_DROPOUT = dict.fromkeys(RATES, 0.0)


def config(**changes: Any) -> ParakeetRNNTConfig:
    encoder = ParakeetEncoderConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, conv_kernel_size=5,
        subsampling_factor=4, subsampling_conv_channels=4, num_mel_bins=MELS, max_position_embeddings=256,
        initializer_range=0.3, **NO_DROPOUT,
    )  # fmt: skip
    tiny = {"vocab_size": VOCABULARY, "decoder_hidden_size": 12, "num_decoder_layers": 1, "blank_token_id": BLANK}
    return ParakeetRNNTConfig(encoder_config=encoder, **{**tiny, **changes})


def parakeet(device: str = "cpu", dtype: torch.dtype = torch.float32, **changes: Any) -> ParakeetForRNNT:
    """Random weights and biases, the same for the same arguments; in training mode."""
    torch.manual_seed(0)
    model = ParakeetForRNNT(config(**changes))
    with torch.no_grad():
        for x in model.parameters():
            x += 0.1 * torch.randn(x.shape)
    return model.to(device=device, dtype=dtype).train()


def batch(device: str = "cpu", dtype: torch.dtype = torch.float32, seed: int = 0, **sizes: int) -> dict[str, Tensor]:
    """Full, short and very short utterances: 40, 24 and 9 frames (10, 6 and 3 in the lattice), 3, 1 and 2 labels."""
    utterances, frames, labels = sizes.get("B", 3), sizes.get("frames", 40), sizes.get("U", 3)
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(utterances, frames, MELS, generator=generator)
    mask = torch.ones(utterances, frames, dtype=torch.long)
    targets = torch.randint(BLANK, (utterances, labels), generator=generator)
    if not sizes:
        mask[1, 24:], mask[2, 9:] = 0, 0
        targets[1, 1:], targets[2, 2:] = BLANK, BLANK
    start = torch.full((utterances, 1), BLANK)
    inputs = {"attention_mask": mask, "decoder_input_ids": torch.cat([start, targets], 1), "labels": targets}
    return {name: x.to(device) for name, x in inputs.items()} | {"input_features": features.to(device, dtype)}


def dense_loss(
    logits: Tensor, labels: Tensor, logit_lengths: Tensor, label_lengths: Tensor, blank_token_id: int, **_: Any
) -> Tensor:
    """ "mean_volume" of dense scores: for `model.loss_function`."""
    lengths = (logit_lengths, label_lengths)
    losses = rnnt.rnnt_loss(logits, labels, *lengths, blank_token_id, reduction="none", backend="reference")
    return losses.sum() / label_lengths.sum()


def results(model: ParakeetForRNNT, inputs: dict[str, Tensor], **options: Any) -> dict[str, Tensor]:
    """The loss, and the gradient of each parameter by name."""
    model.zero_grad()
    loss = model(**inputs, **options).loss
    loss.backward()
    return {"loss": loss.detach()} | {f"d_{name}": x.grad.clone() for name, x in model.named_parameters()}


def torchaudio_loss() -> Any:
    with contextlib.suppress(ImportError, OSError):
        import torchaudio

        return torchaudio.functional.rnnt_loss
    return None


def _in_its_place(
    logits: Tensor, targets: Tensor, logit_lengths: Tensor, target_lengths: Tensor, blank: int, reduction: str
) -> Tensor:
    return rnnt.rnnt_loss(
        logits, targets, logit_lengths, target_lengths, blank, reduction=reduction, backend="reference"
    )


@pytest.fixture(autouse=True)
def exact_convolutions() -> Iterator[None]:
    """No TF32 in cuDNN's convolutions and LSTMs, in the modules that import this."""
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield


@pytest.fixture
def own_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torchaudio cannot be imported, the reference backend computes what transformers asks of it."""
    if torchaudio_loss() is not None:
        return
    module = types.ModuleType("torchaudio")
    module.__spec__ = importlib.machinery.ModuleSpec("torchaudio", None)
    module.functional = types.SimpleNamespace(rnnt_loss=_in_its_place)
    monkeypatch.setitem(sys.modules, "torchaudio", module)
    monkeypatch.setitem(import_utils.BACKENDS_MAPPING, "torchaudio", (lambda: True, ""))
    # transformers before 5.16 looks torchaudio up when it is imported.
    monkeypatch.setattr(loss_rnnt, "torchaudio", module, raising=False)
    monkeypatch.setattr(loss_rnnt, "is_torchaudio_available", lambda: True, raising=False)
