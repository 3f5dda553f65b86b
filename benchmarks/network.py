"""The transducer: FastConformer encoder of `transformers`, LSTM prediction network, joint network and loss.

    features [B, F, mels] ─> ParakeetEncoder, 8x subsampling ─> [B, T, hidden] ─┐
    previous [B, U1] ─> embedding ─> LSTM ──────────────────────> [B, U1, 640] ─┴> RNNTJointLoss, or another loss

No dropout and no layer drop, so that every step does the same work.  Before: data.py, losses.py.  After: training.py.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

import rnnt
from benchmarks.data import Batch
from benchmarks.losses import Loss

INSTALL = "pip install 'rnnt[transformers]'"

try:
    from transformers import ParakeetEncoder, ParakeetEncoderConfig
except ImportError as missing:
    raise ImportError(f"benchmarks.model needs ParakeetEncoder of the package transformers: {INSTALL}") from missing

DROPOUTS = ("dropout", "dropout_positions", "layerdrop", "activation_dropout", "attention_dropout")


@dataclass(frozen=True)
class Sizes:
    """Of the network; share: of the data's lengths."""

    hidden: int = 512
    layers: int = 17
    heads: int = 8
    intermediate: int = 2048
    channels: int = 256  # of the subsampling
    mels: int = 80
    predictor: int = 640
    joint: int = 640
    V: int = 1025
    share: float = 1.0


FULL = Sizes()
TINY = Sizes(
    hidden=16, layers=1, heads=2, intermediate=32, channels=4, mels=16, predictor=12, joint=16, V=11, share=0.1
)


class InParts(nn.Module):
    """A module on at most `size` utterances at a time.

    The subsampling's convolutions take 128 utterances of 20 s, whose first states have 1.3e9 elements; PyTorch's
    depthwise convolution refuses 2**31.
    """

    def __init__(self, module: nn.Module, size: int = 128) -> None:
        super().__init__()
        self.module, self.size = module, size

    def forward(self, features: Tensor, mask: Tensor) -> Tensor:
        if len(features) <= self.size:
            states: Tensor = self.module(features, mask)
            return states
        parts = zip(features.split(self.size), mask.split(self.size), strict=True)
        return torch.cat([self.module(*part) for part in parts])


class Transducer(nn.Module):
    """forward(batch) -> loss; the blank is V - 1."""

    def __init__(self, sizes: Sizes, loss: Loss, validate: bool = True) -> None:
        super().__init__()
        self.loss_function = loss.function
        self.encoder = ParakeetEncoder(
            ParakeetEncoderConfig(
                hidden_size=sizes.hidden,
                num_hidden_layers=sizes.layers,
                num_attention_heads=sizes.heads,
                intermediate_size=sizes.intermediate,
                subsampling_factor=8,
                subsampling_conv_channels=sizes.channels,
                num_mel_bins=sizes.mels,
                attn_implementation="sdpa",
                **dict.fromkeys(DROPOUTS, 0.0),
            )
        )
        self.encoder.subsampling = InParts(self.encoder.subsampling)
        self.embedding = nn.Embedding(sizes.V, sizes.predictor)
        self.lstm = nn.LSTM(sizes.predictor, sizes.predictor, batch_first=True)
        self.joint = rnnt.RNNTJointLoss(
            sizes.joint,
            sizes.V,
            encoder_features=sizes.hidden,
            predictor_features=sizes.predictor,
            activation="relu",
            backend=loss.backend,
            tile_rows=loss.tile_rows,
            validate=validate,
        )

    def encoder_lengths(self, mel_frames: Tensor) -> Tensor:
        """Frames of the encoder for those of its input."""
        lengths: Tensor = self.encoder._get_subsampling_output_length(mel_frames)
        return lengths

    def forward(self, batch: Batch) -> Tensor:
        encoder = self.encoder(batch.features, attention_mask=batch.mask).last_hidden_state
        predictor, _ = self.lstm(self.embedding(batch.previous))
        return self.loss_function(self.joint, encoder, predictor, batch)
