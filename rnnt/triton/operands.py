"""What the kernels of one call share: inputs, the output layer in the compute dtype, where the rows lie.

Kernels read the output layer [V, H] in whole blocks; the copy engine fills what lies past its ends with zeros, and a
padded class's bias counts as -inf.
"""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from rnnt.backends import interpreting
from rnnt.dropout import drop_threshold
from rnnt.problem import Alignment
from rnnt.triton.config import ceil_to, configs, precision


@dataclass
class Operands:
    encoder: Tensor  # [B, T, H]
    predictor: Tensor  # [B, U1, H]
    weight: Tensor  # [V, H], compute dtype, rows aligned to 16 bytes
    bias: Tensor | None  # [V]
    alignment: Alignment
    offsets: Tensor  # [B + 1] int64, first row of each utterance; the last is N
    seed: Tensor | None  # [1] int64
    activation: str
    dropout_p: float
    multiprocessors: int | None = None  # of the chip; None: the device is asked

    def __post_init__(self) -> None:
        self.configs = configs(self.weight.dtype)
        self.precision = precision(self.weight.dtype)
        self.utterances, self.frames, self.features = self.encoder.shape
        self.columns, self.classes = self.predictor.shape[1], self.weight.shape[0]
        self.padded_features = ceil_to(self.features, self.configs.pad_h)
        self.padded_classes = ceil_to(self.classes, self.configs.pad_v)
        self.search_steps = (self.utterances - 1).bit_length()  # halvings that find an utterance among B
        self.drop_threshold = drop_threshold(self.dropout_p)

    @property
    def programs_at_once(self) -> int:
        """Programs of the matrix kernels that run at a time: two on each multiprocessor."""
        return 4 if interpreting() else 2 * (self.multiprocessors or multiprocessors_of(self.encoder.device))


@functools.cache
def multiprocessors_of(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def blocks_of(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """x [M, N] to be read or written in blocks [rows, columns]: by the copy engine where the chip has one (Triton turns
    descriptors into plain pointers elsewhere)."""
    return TensorDescriptor.from_tensor(x, [rows, columns])


def weight_operand(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """weight [V, H] in dtype, as the kernels take it: a view or a copy, each row at a multiple of 16 bytes, which the
    copy engine asks for; rounded where products are TF32's."""
    weight = weight.to(dtype)
    if precision(dtype) == "tf32":
        weight = rounded_to_tf32(weight)
    if weight.stride(1) == 1 and weight.stride(0) % _granule(dtype) == 0 and weight.data_ptr() % 16 == 0:
        return weight
    classes, features = weight.shape
    aligned = weight.new_empty((classes, aligned_features(features, dtype)))[:, :features]
    return aligned.copy_(weight)


def rounded_to_tf32(weight: Tensor) -> Tensor:
    """weight [V, H] float32 by round_to_tf32 of joint.py, once for a call, in place of once for each block read."""
    bits = (weight.contiguous().view(torch.int32) + 0x1000).bitwise_and_(-0x2000)
    return torch.where(weight.isfinite(), bits.view(torch.float32), weight)


def aligned_features(features: int, dtype: torch.dtype) -> int:
    """Elements from one row of such a copy to the next."""
    return ceil_to(features, _granule(dtype))


def _granule(dtype: torch.dtype) -> int:
    """Elements of 16 bytes; the interpreter of Triton 3.4 counts elements for bytes."""
    return 16 if interpreting() else 16 // dtype.itemsize
