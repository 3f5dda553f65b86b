"""What the kernels of one call share: inputs, the padded output layer, where the rows lie.

The output layer is copied once a call, in the compute dtype, to [V padded, H padded] with zeros, and its bias to
[V padded] in float32 with -inf past V: a padded class then has probability 0 by itself, every matrix product runs
on whole aligned blocks, and a vocabulary of 1025 is as quick as one of 1024.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from rnnt.dropout import drop_threshold
from rnnt.problem import Alignment
from rnnt.triton.config import Configs, ceil_to, configs


class Operands(NamedTuple):
    encoder: Tensor  # [B, T, H]
    predictor: Tensor  # [B, U1, H]
    weight: Tensor  # [V padded, H padded], compute dtype
    bias: Tensor  # [V padded] float32
    alignment: Alignment
    offsets: Tensor  # [B + 1] int64, first row of each utterance; the last is N
    seed: Tensor | None  # [1] int64
    activation: str
    dropout_p: float

    @property
    def utterances(self) -> int:
        return self.encoder.shape[0]

    @property
    def frames(self) -> int:
        return self.encoder.shape[1]

    @property
    def columns(self) -> int:
        return self.predictor.shape[1]

    @property
    def features(self) -> int:
        return self.encoder.shape[2]

    @property
    def padded_features(self) -> int:
        return self.weight.shape[1]

    @property
    def padded_classes(self) -> int:
        return self.weight.shape[0]

    @property
    def search_steps(self) -> int:
        """Halvings that find an utterance among B."""
        return (self.utterances - 1).bit_length()

    @property
    def drop_threshold(self) -> int:
        return drop_threshold(self.dropout_p)

    @property
    def configs(self) -> Configs:
        return configs(self.weight.dtype)


def blocks_of(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """x [M, N] to be read or written in blocks [rows, columns]: by the copy engine where the chip has one (Triton turns
    descriptors into plain pointers elsewhere)."""
    return TensorDescriptor.from_tensor(x, [rows, columns])


def padded_layer(weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """weight [V, H], bias [V] or None -> [V padded, H padded] in dtype, [V padded] float32."""
    classes, features = weight.shape
    sizes = configs(dtype)
    padded = weight.new_zeros((ceil_to(classes, sizes.pad_v), ceil_to(features, sizes.pad_h)), dtype=dtype)
    padded[:classes, :features] = weight
    padded_bias = weight.new_full((padded.shape[0],), -torch.inf, dtype=torch.float32)
    padded_bias[:classes] = 0 if bias is None else bias
    return padded, padded_bias
