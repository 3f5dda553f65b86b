"""One call of the public API as checked, normalised data: what every backend receives.

Three kinds of problem, one for each entrance into the pipeline (joint -> log_probs -> lattice -> loss):

    JointProblem      encoder, predictor and the output layer; enters at `joint`
    LogitsProblem     a dense [B, T, U1, V] tensor;            enters at `log_probs`
    LogProbsProblem   the two planes the recursion needs;      enters at `lattice`

Everything that can be known without reading a tensor's values (shapes, dtypes, names, ranges of numbers) is checked
here; values (lengths and labels) are checked in validation.py.  Before: api.py.  After: backends.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rnnt.validation import Check

ACTIVATIONS = ("tanh", "relu", "sigmoid")
REDUCTIONS = ("none", "sum", "mean", "mean_target", "mean_volume")
FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

# The dropped share of a gradient is a small multiple of the threshold (measured: 1 to 5 times), so each is set well
# below the rounding of its dtype: 2^-9, 2^-12, 2^-24; float64 drops nothing.
OCCUPANCY_THRESHOLD = {torch.bfloat16: 1e-4, torch.float16: 1e-5, torch.float32: 1e-8, torch.float64: 0.0}


@dataclass(frozen=True)
class Alignment:
    """The integer side of a problem; all tensors int64 on the problem's device."""

    targets: Tensor  # [B, U]
    encoder_lengths: Tensor  # [B]
    target_lengths: Tensor  # [B]
    blank: int  # in [0, V)
    frames: int  # T
    rows: int  # N, or the capacity B * T * U1 where N is not known without a host sync
    host_sync: bool = True  # whether a backend may wait for the device
    check: Check | None = None  # of lengths and labels, still to be made; until then rows is the capacity

    @property
    def utterances(self) -> int:
        return self.targets.shape[0]

    @property
    def columns(self) -> int:
        """U1 = U + 1."""
        return self.targets.shape[1] + 1

    def checked(self) -> Alignment:
        """The same with a check that is still to be made made: waits for lengths and labels, raises where one is out of
        range, and knows N."""
        return self if self.check is None else replace(self, rows=self.check.rows(), check=None)


@dataclass(frozen=True)
class JointProblem:
    encoder: Tensor  # [B, T, H]
    predictor: Tensor  # [B, U1, H]
    linear_weight: Tensor  # [V, H]
    linear_bias: Tensor | None  # [V]
    alignment: Alignment
    activation: str
    dropout_p: float
    seed: Tensor | None  # [1] int64; None when dropout_p is 0
    fastemit_lambda: float
    clamp: float  # 0: off
    tile_rows: int | str | None  # "auto", or rows of a tile, or None: untiled
    occupancy_threshold: float
    compute_dtype: torch.dtype

    @property
    def device(self) -> torch.device:
        return self.encoder.device

    def checked(self) -> JointProblem:
        return self if self.alignment.check is None else replace(self, alignment=self.alignment.checked())


@dataclass(frozen=True)
class LogitsProblem:
    logits: Tensor  # [B, T, U1, V]; log-probabilities when log_softmax is False
    alignment: Alignment
    log_softmax: bool
    fastemit_lambda: float
    clamp: float  # 0: off

    @property
    def device(self) -> torch.device:
        return self.logits.device


@dataclass(frozen=True)
class LogProbsProblem:
    logp_blank: Tensor  # [B, T, U1]
    logp_label: Tensor  # [B, T, U]
    alignment: Alignment
    fastemit_lambda: float

    @property
    def device(self) -> torch.device:
        return self.logp_blank.device


Problem = JointProblem | LogitsProblem | LogProbsProblem


def loss_dtype(*tensors: Tensor) -> torch.dtype:
    """dtype of losses and planes: float64 when any input is float64, else float32."""
    return torch.float64 if any(x.dtype == torch.float64 for x in tensors) else torch.float32


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """dtype of the logarithm of a row's normaliser, where scores are computed in `dtype`: float32 for 16 bits, else
    float64, as an ulp of float32 may be more than a near-certain class's log-probability."""
    return torch.float32 if dtype.itemsize == 2 else torch.float64


def compute_dtype(*tensors: Tensor) -> torch.dtype:
    """dtype of hidden states and of the output layer's matrix product: PyTorch's promotion, or autocast's dtype."""
    dtype = tensors[0].dtype
    for x in tensors[1:]:
        dtype = torch.promote_types(dtype, x.dtype)
    device = tensors[0].device.type
    if dtype != torch.float64 and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return dtype


def _check_plain(name: str, x: Tensor) -> None:
    if hasattr(x, "full_tensor"):  # importing DTensor to ask for it would take a second
        raise TypeError(
            f"{name}: expected a plain tensor, got a distributed one (DTensor); call fully_shard on RNNTJointLoss or "
            "on a module around it, not on its output layer, and call the loss within that module's forward"
        )
    if x.layout != torch.strided:
        raise TypeError(f"{name}: expected a dense tensor, got {x.layout}")


def check_float(name: str, x: Any, dims: tuple[str, ...], device: torch.device | None = None) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: expected a tensor [{', '.join(dims)}], got {type(x).__name__}")
    _check_plain(name, x)
    if x.dtype not in FLOAT_DTYPES:
        raise TypeError(f"{name}: expected float16, bfloat16, float32 or float64, got {x.dtype}")
    if x.dim() != len(dims):
        raise ValueError(f"{name}: expected shape [{', '.join(dims)}], got {tuple(x.shape)}")
    if device is not None and x.device != device:
        raise ValueError(f"{name}: expected device {device}, got {x.device}")


def check_integers(name: str, x: Any, dims: tuple[str, ...]) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: expected an int32 or int64 tensor [{', '.join(dims)}], got {type(x).__name__}")
    _check_plain(name, x)
    if x.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name}: expected int32 or int64, got {x.dtype}")
    if x.dim() != len(dims):
        raise ValueError(f"{name}: expected shape [{', '.join(dims)}], got {tuple(x.shape)}")


def check_size(name: str, dim: str, expected: int, got: int) -> None:
    if expected != got:
        raise ValueError(f"{name}: expected {dim} = {expected}, got {got}")


def check_name(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}: expected one of {', '.join(map(repr, allowed))}, got {value!r}")


def check_number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}: expected a number, got {type(value).__name__}")
    if not -math.inf < value < math.inf:  # math.isfinite takes no number that torch.compile has made a symbol of
        raise ValueError(f"{name}: expected a finite number, got {value}")
    return float(value)


def check_flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name}: expected True or False, got {value!r}")
    return value


def check_integer(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: expected an int, got {type(value).__name__}")
    return value


def check_count(name: str, value: Any) -> int:
    if check_integer(name, value) < 1:
        raise ValueError(f"{name}: expected an int >= 1, got {value}")
    return int(value)


def check_fastemit(value: Any) -> float:
    number = check_number("fastemit_lambda", value)
    if number < 0:
        raise ValueError(f"fastemit_lambda: expected a number >= 0, got {value}")
    return number


def check_clamp(value: Any) -> float:
    """Bound of the unit-scale logit gradient; 0 when off."""
    return max(check_number("clamp", value), 0.0)


def check_dropout(value: Any) -> float:
    number = check_number("dropout_p", value)
    if not 0 <= number < 1:
        raise ValueError(f"dropout_p: expected a number in [0, 1), got {value}")
    return number


def check_tile_rows(value: Any) -> int | str | None:
    if value is None or (isinstance(value, str) and value == "auto"):
        return value
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"tile_rows: expected an int >= 1, None or 'auto', got {value!r}")
    if value < 1:
        raise ValueError(f"tile_rows: expected an int >= 1, None or 'auto', got {value}")
    return value


def check_occupancy_threshold(value: Any, dtype: torch.dtype, clamp: float) -> float:
    if isinstance(value, str) and value == "auto":
        # A clamped gradient gives rare nodes as much weight as frequent ones, so fewer may be dropped.
        return OCCUPANCY_THRESHOLD[dtype] * (min(clamp, 1.0) if clamp > 0 else 1.0)
    if isinstance(value, str):
        raise ValueError(f"occupancy_threshold: expected a number in [0, 1) or 'auto', got {value!r}")
    number = check_number("occupancy_threshold", value)
    if not 0 <= number < 1:
        raise ValueError(f"occupancy_threshold: expected a number in [0, 1) or 'auto', got {value}")
    return number


def check_blank(blank: Any, classes: int) -> int:
    """Index of the blank in [0, V)."""
    if isinstance(classes, bool) or not isinstance(classes, int) or classes < 1:
        raise ValueError(f"vocab_size: expected an int >= 1, got {classes!r}")
    check_integer("blank", blank)
    if not -classes <= blank < classes:
        raise ValueError(f"blank: expected an index in [{-classes}, {classes}), got {blank}")
    return blank % classes
