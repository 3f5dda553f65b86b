"""Hugging Face `transformers`: a loaded ParakeetForRNNT trains with this package's loss after one call.

    model = use_rnnt(ParakeetForRNNT.from_pretrained(...))

The model's own forward stays in charge.  It projects and adds, activates and scores every lattice node, [B, T, U1, V],
and hands the scores to `model.loss_function`.  Four things about this one model object change:

    forward pre-hook    before a training forward with labels, tells the joint network to hold its scores back
    joint               returns `Unscored`, the two projected inputs, in place of the scores while it holds them back
    loss_function       calls the joint again, now with labels and lengths: it gives the losses [B]
    forward hook        leaves `logits`, which do not exist, out of the output

Labels, lengths and blank are those that the model's forward hands to its loss function, so they follow its conventions
whatever they are.  The losses are computed inside the forward of `joint` and `joint.head`, which own the parameters:
DistributedDataParallel and fully_shard (of the model, of `joint` or of `joint.head`) see the use as they see any other.
The two modules get subclasses of their classes, names and parameters stay, and everything here can be pickled and
copied with the model.

Without labels (generation, say) nothing changes.  In evaluation mode with labels the scores are there as before, and
the loss is computed on them; eval_logits=False trains and evaluates alike, without them.

Before: the user's model.  After: `rnnt.joint_rnnt_loss`, and `rnnt.rnnt_loss` in evaluation mode.
"""

import inspect
from dataclasses import dataclass, replace
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn

from rnnt.api import joint_rnnt_loss, rnnt_loss
from rnnt.backends import NAMES
from rnnt.problem import (
    check_clamp,
    check_fastemit,
    check_flag,
    check_name,
    check_occupancy_threshold,
    check_tile_rows,
)

INSTALL = "pip install 'transformers>=5.12'"
VERIFIED = "5.12 to 5.24"

try:
    import transformers
except ImportError as missing:
    raise ImportError(f"rnnt.contrib.transformers needs the package transformers: {INSTALL}") from missing
try:
    from transformers.models.parakeet.modeling_parakeet import (
        ParakeetForRNNT,
        ParakeetForTDT,
        ParakeetRNNTJointNetwork,
    )
except ImportError as missing:
    raise ImportError(
        f"rnnt.contrib.transformers needs ParakeetForRNNT, which transformers {transformers.__version__} does not "
        f"have: {INSTALL}"
    ) from missing

ACTIVATIONS: dict[type[nn.Module], str] = {nn.ReLU: "relu", nn.Tanh: "tanh", nn.Sigmoid: "sigmoid"}
REDUCTIONS = ("mean_volume", "mean_batch", "mean", "sum", "none")  # names and meanings of transformers


Model = TypeVar("Model", bound=nn.Module)


def use_rnnt(
    model: Model,
    backend: str = "auto",
    tile_rows: int | str | None = "auto",
    *,
    occupancy_threshold: float | str = "auto",
    fastemit_lambda: float = 0.0,
    clamp: float = -1,
    eval_logits: bool = True,
    validate: bool = True,
) -> Model:
    """Make a ParakeetForRNNT compute its training loss without the [B, T, U1, V] tensor; changes and returns `model`.

    Call it once the model is loaded, before it is compiled or wrapped (DDP, fully_shard, PEFT).  Loss and gradients
    are those of the model's own loss, reductions included; torchaudio, which that one needs, is not needed.  A second
    call replaces the options.  `from_pretrained` gives an unchanged model, so call it after each loading.

    Args:
        model: transformers.ParakeetForRNNT, on any device and of any float dtype.
        backend, tile_rows, occupancy_threshold, fastemit_lambda, clamp, validate: as in `rnnt.joint_rnnt_loss`.
        eval_logits: in evaluation mode with labels, output.logits [B, T, U1, V] exist as they did before.  False: they
            do not, and evaluation takes as little memory as training.

    Raises:
        TypeError: the model is none that is known: of another class, wrapped, or with a replaced joint network.
        ValueError: the joint network computes something else than head(activation(encoder + decoder)), or has hooks on
            its parts, which would see something else, or an option is out of range.
    """
    check_name("backend", backend, (*NAMES, "auto"))
    check_occupancy_threshold(occupancy_threshold, torch.float32, check_clamp(clamp))  # "auto" depends on the dtype
    loss = TransducerLoss(
        backend=backend,
        tile_rows=check_tile_rows(tile_rows),
        occupancy_threshold=occupancy_threshold,
        fastemit_lambda=check_fastemit(fastemit_lambda),
        clamp=check_clamp(clamp),
        eval_logits=check_flag("eval_logits", eval_logits),
        validate=check_flag("validate", validate),
    )
    _check_class(model)
    _install(model, loss)
    return model


def _install(model: Any, loss: "TransducerLoss") -> None:
    if not isinstance(model.joint, TransducerJoint):
        _check_joint(model)
        model.joint.__class__ = TransducerJoint
        model.joint.head.__class__ = TransducerHead
        model.joint.holds_back = False
        model.register_forward_pre_hook(_before_forward, with_kwargs=True)
        model.register_forward_hook(_after_forward, always_call=True)
    model.loss_function = loss


class TransducerHead(nn.Linear):
    """The output layer: scores of hidden states, or, given both projected inputs of the joint, their losses [B]."""

    def forward(self, input: Tensor, predictor: Tensor | None = None, *alignment: Tensor, **options: Any) -> Tensor:
        if predictor is None:
            return super().forward(input)
        return joint_rnnt_loss(input, predictor, self.weight, *alignment, linear_bias=self.bias, **options)


class TransducerJoint(ParakeetRNNTJointNetwork):
    """The joint network: its scores [B, T, U1, V]; or, while it holds them back, `Unscored`; or losses [B].

    forward(decoder_hidden_states [B, 1, U1, H], encoder_hidden_states [B, T, 1, H]) is the original's; with the
    projected inputs [B, U1, H], [B, T, H] and labels, lengths and options of `rnnt.joint_rnnt_loss` it is the losses.
    """

    holds_back: bool

    def forward(
        self, decoder_hidden_states: Tensor, encoder_hidden_states: Tensor, *alignment: Tensor, **options: Any
    ) -> Any:
        if alignment:
            if not isinstance(self.head, TransducerHead):
                raise TypeError(
                    f"model.joint.head: expected the layer that use_rnnt left there, got {_full_name(self.head)}; "
                    "leave it out of what replaces layers (of an adapter's target modules, say)"
                )
            activation = ACTIVATIONS[type(self.activation)]
            return self.head(encoder_hidden_states, decoder_hidden_states, *alignment, activation=activation, **options)
        if self.holds_back:
            return Unscored(encoder_hidden_states.squeeze(2), decoder_hidden_states.squeeze(1), self)
        return super().forward(decoder_hidden_states, encoder_hidden_states)


@dataclass(frozen=True)
class Unscored:
    """What stands for the joint network's scores [B, T, U1, V] between the joint and the loss function.

    encoder [B, T, H], predictor [B, U1, H].  It can do what the known models do with scores: drop an axis that they do
    not have, and take the first frames.  Anything else is an error that says so.
    """

    encoder: Tensor
    predictor: Tensor
    joint: TransducerJoint

    def squeeze(self, dim: int) -> "Unscored":
        if dim != 2:
            raise AttributeError(_use_message(f".squeeze({dim})"))
        return self

    def __getitem__(self, index: Any) -> "Unscored":
        match index:
            case (slice(start=None, stop=None, step=None), slice(start=None, step=None) as frames):
                return replace(self, encoder=self.encoder[:, frames])
        raise AttributeError(_use_message(f"[{index}]"))

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(_use_message(f".{name}"))

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        raise TypeError(_use_message(getattr(function, "__name__", str(function))))


@dataclass(frozen=True)
class TransducerLoss:
    """`model.loss_function`: called by the model's forward with the arguments of transformers' own loss.

    Args:
        logits: `Unscored`, or scores [B, T, U1, V].
        labels: [B, U] int.  logit_lengths, label_lengths: [B] int.
        reduction: "mean_volume" (sum of losses / sum of labels), "mean_batch" (mean of losses), "mean" (mean of loss /
            labels), "sum" or "none".  These are transformers' meanings: labels that are none count as 0, not as 1.

    Everything else that comes with the call is left aside, num_items_in_batch among it, as by the model's own loss.
    """

    backend: str
    tile_rows: int | str | None
    occupancy_threshold: float | str
    fastemit_lambda: float
    clamp: float
    eval_logits: bool
    validate: bool

    def __call__(
        self,
        logits: Any,
        labels: Tensor,
        logit_lengths: Tensor,
        label_lengths: Tensor,
        blank_token_id: int,
        reduction: str = "mean_volume",
        **_: Any,
    ) -> Tensor:
        check_name("reduction", reduction, REDUCTIONS)
        options: dict[str, Any] = {
            "blank": blank_token_id,
            "fastemit_lambda": self.fastemit_lambda,
            "clamp": self.clamp,
            "reduction": "none",
            "backend": self.backend,
            "validate": self.validate,
        }
        if isinstance(logits, Unscored):
            losses = logits.joint(
                logits.predictor,
                logits.encoder,
                labels.to(logits.encoder.device),
                logit_lengths,
                label_lengths,
                tile_rows=self.tile_rows,
                occupancy_threshold=self.occupancy_threshold,
                **options,
            )
        else:
            losses = rnnt_loss(logits, labels.to(logits.device), logit_lengths, label_lengths, **options)
        return _reduce(losses, label_lengths.to(losses), reduction)


def _reduce(losses: Tensor, label_lengths: Tensor, reduction: str) -> Tensor:
    if reduction == "mean_volume":
        return losses.sum() / label_lengths.sum()
    if reduction == "mean_batch":
        return losses.mean()
    if reduction == "mean":
        return (losses / label_lengths).mean()
    return losses.sum() if reduction == "sum" else losses


def _before_forward(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    loss = model.loss_function
    if not isinstance(loss, TransducerLoss):  # set to another one since
        return
    if not isinstance(model.joint, TransducerJoint):
        raise TypeError(f"model.joint: expected the module that use_rnnt left there, got {_name(model.joint)}")
    labels = kwargs.get("labels")
    if args and labels is None:
        names = list(inspect.signature(type(model).forward).parameters)[1:]
        labels = dict(zip(names, args, strict=False)).get("labels")
    model.joint.holds_back = labels is not None and (model.training or not loss.eval_logits)


def _after_forward(model: Any, args: tuple[Any, ...], output: Any) -> Any:
    """The output without `logits` where the joint held them back."""
    held_back, model.joint.holds_back = getattr(model.joint, "holds_back", False), False
    if not held_back or output is None:  # None: forward raised
        return output
    if isinstance(output, tuple):
        return tuple(x for x in output if not isinstance(x, Unscored))
    return type(output)(**{name: x for name, x in output.items() if not isinstance(x, Unscored)})


def _name(model: object) -> str:
    return f"{type(model).__name__} (transformers {transformers.__version__})"


def _full_name(layer: object) -> str:
    return f"{type(layer).__module__}.{_name(layer)}"


def _use_message(use: str) -> str:
    return (
        f"transformers {transformers.__version__}: the model uses its joint network's scores in a way that "
        f"rnnt.contrib.transformers (verified with {VERIFIED}) does not know: {use}"
    )


def _check_class(model: Any) -> None:
    if isinstance(model, ParakeetForTDT):
        raise TypeError(
            f"model: expected a ParakeetForRNNT, got {_name(model)}: a token-and-duration transducer (TDT) has another "
            "lattice and another loss, which this package does not compute"
        )
    if isinstance(model, ParakeetForRNNT):
        return
    if isinstance(getattr(model, "joint", None), nn.Module) and type(model).__name__.endswith("ForRNNT"):
        reason = ": transformers gives that class no transducer loss of its own that could be replaced"
    elif isinstance(model, nn.Module) and any(isinstance(x, ParakeetForRNNT) for x in model.modules()):
        reason = ": hand over the ParakeetForRNNT inside it, before it is wrapped"
    else:
        reason = ""
    raise TypeError(f"model: expected a ParakeetForRNNT, got {_name(model)}{reason}")


def _check_joint(model: Any) -> None:
    """The joint is head(activation(encoder + decoder)) with a plain linear head: by its parts and by a trial."""
    joint, head = model.joint, getattr(model.joint, "head", None)
    if type(joint) is not ParakeetRNNTJointNetwork:
        raise TypeError(
            f"model.joint: expected a ParakeetRNNTJointNetwork, got {_name(joint)}; call use_rnnt before the model is "
            "sharded, compiled or wrapped"
        )
    if type(head) is not nn.Linear:
        raise TypeError(
            f"model.joint.head: expected a torch.nn.Linear, got {_full_name(head)}; quantised and adapted output "
            "layers are not supported"
        )
    if type(joint.activation) not in ACTIVATIONS:
        known = ", ".join(x.__name__ for x in ACTIVATIONS)
        raise ValueError(f"model.joint.activation: expected one of {known}, got {_name(joint.activation)}")
    for name, module in (("joint", joint), ("joint.activation", joint.activation), ("joint.head", head)):
        if "forward" in vars(module):
            raise ValueError(
                f"model.{name}: expected the forward of {_name(module)}, got one that was set on the module, as "
                "accelerate's hooks are (of a device_map over several devices, say): the scores would exist"
            )
        if name != "joint" and (module._forward_hooks or module._forward_pre_hooks):
            raise ValueError(
                f"model.{name}: expected a module without forward hooks, got {_name(module)} with one: in training it "
                "would not see hidden states and scores"
            )
    if any(hasattr(x, "full_tensor") for x in joint.parameters()):  # DTensors
        raise TypeError(
            "model.joint: expected plain parameters, got DTensors; call use_rnnt before the model is sharded"
        )
    states = [
        torch.linspace(low, high, head.in_features).to(head.weight)[None, None, None]
        for low, high in ((-1.0, 1.5), (0.5, -1.0))
    ]
    with torch.no_grad():
        found = joint(decoder_hidden_states=states[0], encoder_hidden_states=states[1])
        expected = head(joint.activation(states[1] + states[0]))
    if not found.is_meta and not torch.equal(found, expected):
        raise ValueError(
            f"model.joint: expected head(activation(encoder + decoder)), got a {_name(joint)} that computes something "
            f"else; rnnt.contrib.transformers is verified with {VERIFIED}"
        )
