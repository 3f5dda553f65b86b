"""Every promised error: its type, and a message with argument, expected and got."""

import re

import pytest
import torch

import rnnt
from rnnt.validation import Check
from tests.fixtures import LOSSES_S_P, P, j_p, s_p, sines
from tests.support import check_printed, joint_loss


def logits_loss(**changes):
    call = {"logits": s_p(), "targets": P[0], "logit_lengths": P[1], "target_lengths": P[2], "blank": 0}
    return rnnt.rnnt_loss(**{**call, "backend": "reference", **changes})


def planes_loss(**changes):
    planes = {"logp_blank": torch.zeros(2, 4, 4), "logp_label": torch.zeros(2, 4, 3)}
    lengths = {"encoder_lengths": P[1], "target_lengths": P[2]}
    return rnnt.rnnt_loss_from_log_probs(**{**planes, **lengths, "backend": "reference", **changes})


def joint_call(function, **changes):
    batch = j_p()
    call = {**batch._asdict(), "blank": 0, "backend": "reference", **changes}
    return function(**call)


def joint(**changes):
    return joint_call(rnnt.joint_rnnt_loss, **changes)


def planes(**changes):
    return joint_call(rnnt.joint_log_probs, **changes)


SHAPES = [
    # function, changed arguments, (argument, expected, got) as the message has them
    (logits_loss, {"logits": torch.zeros(4, 4, 5)}, "logits: expected shape [B, T, U1, V], got (4, 4, 5)"),
    (logits_loss, {"logits": sines(2, 4, 2, 5)}, "logits: expected U1 = 4 columns (targets has U = 3), got 3"),
    (logits_loss, {"logits": torch.zeros(2, 4, 4, 0)}, "logits: expected no empty dimension but the batch, got (2, 4,"),
    (logits_loss, {"logits": torch.zeros(2, 0, 4, 5)}, "logits: expected no empty dimension but the batch, got (2, 0,"),
    (logits_loss, {"targets": torch.tensor([1, 2])}, "targets: expected shape [B, U], got (2,)"),
    (logits_loss, {"targets": torch.ones(3, 3, dtype=torch.int64)}, "targets: expected B = 2, got 3"),
    (logits_loss, {"logit_lengths": torch.tensor([4])}, "logit_lengths: expected B = 2, got 1"),
    (logits_loss, {"logit_lengths": torch.tensor(4)}, "logit_lengths: expected shape [B], got ()"),
    (logits_loss, {"target_lengths": torch.tensor([3, 1, 1])}, "target_lengths: expected B = 2, got 3"),
    (joint, {"encoder": torch.zeros(2, 6)}, "encoder: expected shape [B, T, H], got (2, 6)"),
    (joint, {"encoder": torch.zeros(2, 0, 6)}, "encoder: expected no empty dimension but the batch, got (2, 0, 6)"),
    (joint, {"predictor": torch.zeros(2, 3, 6)}, "predictor: expected U1 = 4 columns (targets has U = 3), got 3"),
    (joint, {"predictor": torch.zeros(3, 4, 6)}, "predictor: expected B = 2, got 3"),
    (joint, {"predictor": torch.zeros(2, 4, 7)}, "predictor: expected H = 6, got 7"),
    (joint, {"linear_weight": torch.zeros(5, 7)}, "linear_weight: expected H = 6, got 7"),
    (joint, {"linear_weight": torch.zeros(5)}, "linear_weight: expected shape [V, H], got (5,)"),
    (joint, {"linear_weight": torch.zeros(0, 6)}, "linear_weight: expected V >= 1, got (0, 6)"),
    (joint, {"linear_bias": torch.zeros(6)}, "linear_bias: expected V = 5, got 6"),
    (joint, {"linear_bias": torch.zeros(5, 1)}, "linear_bias: expected shape [V], got (5, 1)"),
    (planes, {"predictor": torch.zeros(2, 3, 6)}, "predictor: expected U1 = 4 columns (targets has U = 3), got 3"),
    (planes_loss, {"logp_blank": torch.zeros(2, 4)}, "logp_blank: expected shape [B, T, U1], got (2, 4)"),
    (planes_loss, {"logp_label": torch.zeros(2, 4, 4)}, "logp_label: expected U = U1 - 1 = 3, got 4"),
    (planes_loss, {"logp_label": torch.zeros(2, 3, 3)}, "logp_label: expected T = 4, got 3"),
    (planes_loss, {"logp_label": torch.zeros(1, 4, 3)}, "logp_label: expected B = 2, got 1"),
]

VALUES = [
    (
        logits_loss,
        {"logit_lengths": torch.tensor([4, 0])},
        "logit_lengths[1]: expected a length in [1, 4] (T = 4), got 0",
    ),
    (
        logits_loss,
        {"logit_lengths": torch.tensor([5, 2])},
        "logit_lengths[0]: expected a length in [1, 4] (T = 4), got 5",
    ),
    (
        logits_loss,
        {"target_lengths": torch.tensor([4, 1])},
        "target_lengths[0]: expected a length in [0, 3] (U = 3), got 4",
    ),
    (
        logits_loss,
        {"target_lengths": torch.tensor([3, -1])},
        "target_lengths[1]: expected a length in [0, 3] (U = 3), got -1",
    ),
    (
        logits_loss,
        {"targets": torch.tensor([[1, 2, 5], [4, 1, 0]])},
        "targets[0, 2]: expected a label in [0, 5) other than blank = 0",
    ),
    (logits_loss, {"targets": torch.tensor([[1, 2, 5], [4, 1, 0]])}, "(target_lengths[0] = 3), got 5"),
    (logits_loss, {"targets": torch.tensor([[1, -1, 3], [4, 1, 0]])}, "targets[0, 1]: expected a label in [0, 5)"),
    (
        logits_loss,
        {"blank": 2},
        "targets[0, 1]: expected a label in [0, 5) other than blank = 2 (target_lengths[0] = 3), got 2",
    ),
    (logits_loss, {"blank": -2}, "targets[0, 2]: expected a label in [0, 5) other than blank = 3 ("),
    (logits_loss, {"blank": 5}, "blank: expected an index in [-5, 5), got 5"),
    (logits_loss, {"blank": -6}, "blank: expected an index in [-5, 5), got -6"),
    (logits_loss, {"fastemit_lambda": -0.1}, "fastemit_lambda: expected a number >= 0, got -0.1"),
    (logits_loss, {"fastemit_lambda": float("nan")}, "fastemit_lambda: expected a finite number, got nan"),
    (logits_loss, {"clamp": float("inf")}, "clamp: expected a finite number, got inf"),
    (
        joint,
        {"encoder_lengths": torch.tensor([7, 2])},
        "encoder_lengths[0]: expected a length in [1, 4] (T = 4), got 7",
    ),
    (joint, {"dropout_p": 1.0}, "dropout_p: expected a number in [0, 1), got 1.0"),
    (joint, {"dropout_p": -0.1}, "dropout_p: expected a number in [0, 1), got -0.1"),
    (joint, {"tile_rows": 0}, "tile_rows: expected an int >= 1, None or 'auto', got 0"),
    (joint, {"tile_rows": "all"}, "tile_rows: expected an int >= 1, None or 'auto', got 'all'"),
    (joint, {"tile_rows": 7.0}, "tile_rows: expected an int >= 1, None or 'auto', got 7.0"),
    (joint, {"occupancy_threshold": 1.0}, "occupancy_threshold: expected a number in [0, 1) or 'auto', got 1.0"),
    (joint, {"occupancy_threshold": -1e-3}, "occupancy_threshold: expected a number in [0, 1) or 'auto', got -0.001"),
    (joint, {"occupancy_threshold": "none"}, "occupancy_threshold: expected a number in [0, 1) or 'auto', got 'none'"),
    (planes, {"dropout_p": 1.5}, "dropout_p: expected a number in [0, 1), got 1.5"),
    (planes, {"tile_rows": -1}, "tile_rows: expected an int >= 1, None or 'auto', got -1"),
    (
        planes_loss,
        {"encoder_lengths": torch.tensor([5, 2])},
        "encoder_lengths[0]: expected a length in [1, 4] (T = 4), got 5",
    ),
]

REDUCTION = "reduction: expected one of 'none', 'sum', 'mean', 'mean_target', 'mean_volume', got 'avg'"
NAMES = [
    (logits_loss, {"reduction": "avg"}, REDUCTION),
    (joint, {"reduction": "avg"}, REDUCTION),
    (planes_loss, {"reduction": "avg"}, REDUCTION),
    (joint, {"activation": "gelu"}, "activation: expected one of 'tanh', 'relu', 'sigmoid', got 'gelu'"),
    (joint, {"backend": "fast"}, "backend: expected one of 'triton', 'compiled', 'reference', 'auto', got 'fast'"),
    (logits_loss, {"backend": None}, "backend: expected one of 'triton', 'compiled', 'reference', 'auto', got None"),
]

INTEGERS = "expected int32 or int64, got"
TYPES = [
    (logits_loss, {"logits": [[0.0]]}, "logits: expected a tensor [B, T, U1, V], got list"),
    (logits_loss, {"logits": s_p().long()}, "logits: expected float16, bfloat16, float32 or float64, got torch.int64"),
    (logits_loss, {"logits": s_p().to(torch.complex64)}, "logits: expected float16, bfloat16, float32 or float64"),
    (logits_loss, {"targets": P[0].float()}, f"targets: {INTEGERS} torch.float32"),
    (logits_loss, {"targets": [[1, 2, 3], [4, 1, 0]]}, "targets: expected an int32 or int64 tensor [B, U], got list"),
    (logits_loss, {"targets": P[0].bool()}, f"targets: {INTEGERS} torch.bool"),
    (logits_loss, {"logit_lengths": torch.ones(2, dtype=torch.bool)}, f"logit_lengths: {INTEGERS} torch.bool"),
    (logits_loss, {"target_lengths": torch.ones(2, dtype=torch.bool)}, f"target_lengths: {INTEGERS} torch.bool"),
    (logits_loss, {"logit_lengths": P[1].to(torch.int16)}, f"logit_lengths: {INTEGERS} torch.int16"),
    (logits_loss, {"blank": 0.0}, "blank: expected an int, got float"),
    (logits_loss, {"fused_log_softmax": None}, "fused_log_softmax: expected True or False, got None"),
    (logits_loss, {"validate": "no"}, "validate: expected True or False, got 'no'"),
    (planes_loss, {"validate": 1}, "validate: expected True or False, got 1"),
    (logits_loss, {"blank": True}, "blank: expected an int, got bool"),
    (logits_loss, {"clamp": "1"}, "clamp: expected a number, got str"),
    (logits_loss, {"fastemit_lambda": None}, "fastemit_lambda: expected a number, got NoneType"),
    (joint, {"encoder": None}, "encoder: expected a tensor [B, T, H], got NoneType"),
    (joint, {"encoder": torch.zeros(2, 4, 6, dtype=torch.int8)}, "encoder: expected float16, bfloat16, float32 or"),
    (joint, {"linear_bias": 0.5}, "linear_bias: expected a tensor [V], got float"),
    (joint, {"linear_weight": torch.zeros(5, 6).to_sparse()}, "linear_weight: expected a dense tensor, got"),
    (joint, {"encoder_lengths": [4, 2]}, "encoder_lengths: expected an int32 or int64 tensor [B], got list"),
    (joint, {"encoder_lengths": torch.ones(2, dtype=torch.bool)}, f"encoder_lengths: {INTEGERS} torch.bool"),
    (joint, {"dropout_p": "0.1"}, "dropout_p: expected a number, got str"),
    (joint, {"dropout_p": True}, "dropout_p: expected a number, got bool"),
    (joint, {"occupancy_threshold": None}, "occupancy_threshold: expected a number, got NoneType"),
    (planes_loss, {"logp_label": None}, "logp_label: expected a tensor [B, T, U], got NoneType"),
]


def cases(table):
    return [pytest.param(*row, id=f"{row[0].__name__}-{next(iter(row[1]))}-{i}") for i, row in enumerate(table)]


@pytest.mark.parametrize(("function", "changes", "message"), cases(SHAPES + VALUES + NAMES))
def test_value_errors(function, changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        function(**changes)


@pytest.mark.parametrize(("function", "changes", "message"), cases(TYPES))
def test_type_errors(function, changes, message):
    with pytest.raises(TypeError, match=re.escape(message)):
        function(**changes)


@pytest.mark.parametrize("function", [logits_loss, joint, planes, planes_loss])
def test_the_unchanged_calls_are_right(function):
    """What the tables above change is otherwise a call that works."""
    function()


@pytest.mark.parametrize(
    ("logits", "targets", "blank"),
    [(torch.zeros(1, 2, 3, 5), [[1, 2]], 1), (sines(1, 3, 2, 5), [[0, 2]], 0)],
)
def test_blank_inside_the_targets(place, logits, targets, blank):
    """An ambiguous lattice is refused by every backend."""
    lengths = torch.tensor([logits.shape[1]]), torch.tensor([2])
    with pytest.raises(ValueError, match=rf"targets\[0, 0\]: expected .* other than blank = {blank}.*got {blank}"):
        rnnt.rnnt_loss(logits.float().to(place.device), torch.tensor(targets), *lengths, blank, backend=place.backend)


def test_blank_beyond_the_targets_is_padding(place):
    """Batch P itself ends its second row with the blank, outside the length."""
    rnnt.rnnt_loss(s_p().float().to(place.device), *P, blank=0, backend=place.backend)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"encoder_lengths": [7, 2]}, "encoder_lengths[0]: expected a length in [1, 4] (T = 4), got 7"),
        ({"encoder_lengths": [4, -9]}, "encoder_lengths[1]: expected a length in [1, 4] (T = 4), got -9"),
        ({"target_lengths": [3, 10**12]}, "target_lengths[1]: expected a length in [0, 3] (U = 3), got 1000000000000"),
        (
            {"target_lengths": [-(10**12), 1]},
            "target_lengths[0]: expected a length in [0, 3] (U = 3), got -1000000000000",
        ),
        ({"targets": [[1, 2, 10**9], [4, 0, 0]]}, "targets[0, 2]: expected a label in [0, 5) other than blank = 0"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
@pytest.mark.parametrize("reader", ["host", "device"])
def test_values_are_checked_everywhere(place, changes, message, reader, monkeypatch):
    """And nothing is read or written out of bounds by what is started before they are known: the next call is right."""
    if reader == "device":  # as on a GPU, where `triton` has a kernel look at them
        monkeypatch.setattr(Check, "on_host", False)
    batch = j_p().on(place.device).cast(torch.float32, place.device)
    right = joint_loss(batch, blank=0, backend=place.backend)
    wrong = {name: torch.tensor(values, device=place.device) for name, values in changes.items()}
    with pytest.raises(ValueError, match=re.escape(message)):
        joint_loss(batch._replace(**wrong), blank=0, backend=place.backend)
    assert torch.equal(joint_loss(batch, blank=0, backend=place.backend), right)


@pytest.mark.gpu
def test_tensors_on_two_devices():
    batch = j_p()
    batch = batch._replace(encoder=batch.encoder.cuda())
    with pytest.raises(ValueError, match="predictor: expected device cuda:0, got cpu"):
        joint_loss(batch, blank=0, backend="reference")


def test_unvalidated_call_gives_the_same_loss(place):
    def compute(backend, cast):
        args = [x.to(place.device) for x in P]
        return {"loss": rnnt.rnnt_loss(cast(s_p()), *args, blank=0, reduction="none", backend=backend, validate=False)}

    check_printed(place, compute, {"loss": LOSSES_S_P})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: rnnt.RNNTLoss(reduction="avg"), REDUCTION),
        (lambda: rnnt.RNNTJointLoss(6, 5, reduction="avg"), REDUCTION),
        (lambda: rnnt.RNNTJointLoss(6, 5, activation="gelu"), "activation: expected one of"),
        (lambda: rnnt.RNNTJointLoss(6, 5, blank=5), "blank: expected an index in [-5, 5), got 5"),
        (lambda: rnnt.RNNTJointLoss(6, 5, dropout_p=1.0), "dropout_p: expected a number in [0, 1), got 1.0"),
        (lambda: rnnt.RNNTJointLoss(6, 5, occupancy_threshold="x"), "occupancy_threshold: expected a number in [0, 1)"),
        (lambda: rnnt.RNNTJointLoss(6, 5, tile_rows=0), "tile_rows: expected an int >= 1"),
        (lambda: rnnt.RNNTJointLoss(-1, 5), "joint_features: expected an int >= 1, got -1"),
        (lambda: rnnt.RNNTJointLoss(6, 5, encoder_features=0), "encoder_features: expected an int >= 1, got 0"),
        (lambda: rnnt.RNNTJointLoss(6, 5.0), "vocab_size: expected an int >= 1, got 5.0"),
    ],
    ids=[
        "RNNTLoss-reduction",
        "reduction",
        "activation",
        "blank",
        "dropout_p",
        "occupancy_threshold",
        "tile_rows",
        "joint_features",
        "encoder_features",
        "vocab_size",
    ],
)
def test_modules_check_at_construction(make, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: rnnt.RNNTLoss(blank="x"), "blank: expected an int, got str"),
        (lambda: rnnt.RNNTLoss(clamp="x"), "clamp: expected a number, got str"),
        (lambda: rnnt.RNNTLoss(fused_log_softmax="no"), "fused_log_softmax: expected True or False, got 'no'"),
        (lambda: rnnt.RNNTJointLoss(6, 5, validate=0), "validate: expected True or False, got 0"),
        (lambda: rnnt.RNNTJointLoss(6.0, 5), "joint_features: expected an int, got float"),
    ],
    ids=["blank", "clamp", "fused_log_softmax", "validate", "joint_features"],
)
def test_modules_check_types_at_construction(make, message):
    with pytest.raises(TypeError, match=re.escape(message)):
        make()
