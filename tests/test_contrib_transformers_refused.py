"""rnnt.contrib.transformers: models, joint networks and uses of scores that `use_rnnt` refuses, and why."""

import importlib
import subprocess
import sys
import types

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

import transformers
from transformers import ParakeetForCTC, ParakeetForRNNT, ParakeetForTDT, ParakeetTDTConfig

import rnnt.contrib.transformers as contrib
from rnnt.contrib.transformers import use_rnnt
from tests import parakeet as tiny
from tests.parakeet import batch, parakeet


class Wrapper(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module


def refused():
    tdt = ParakeetForTDT(ParakeetTDTConfig(**{**tiny.config().to_dict(), "model_type": "parakeet_tdt"}))
    yield "tdt", tdt, "ParakeetForTDT.*TDT"
    yield "wrapped", Wrapper(parakeet()), "got Wrapper.*before it is wrapped"
    yield "linear", nn.Linear(2, 2), "got Linear"
    yield "none", None, "got NoneType"
    yield "class", ParakeetForRNNT, "got type"
    model = parakeet()
    model.joint = Wrapper(model.joint)
    yield "joint", model, "model.joint: expected a ParakeetRNNTJointNetwork, got Wrapper"
    model = parakeet()
    model.joint.head = nn.Sequential(model.joint.head)
    yield "head", model, "model.joint.head: expected a torch.nn.Linear, got torch.*Sequential"


@pytest.mark.parametrize(("model", "message"), [pytest.param(*x[1:], id=x[0]) for x in refused()])
def test_unknown_model(model, message):
    with pytest.raises(TypeError, match=message) as caught:
        use_rnnt(model)
    assert f"transformers {transformers.__version__}" in str(caught.value)


@pytest.mark.skipif(not hasattr(transformers, "NemotronAsrStreamingForRNNT"), reason="transformers before 5.13")
def test_model_without_a_loss_of_its_own():
    model = transformers.NemotronAsrStreamingForRNNT.__new__(transformers.NemotronAsrStreamingForRNNT)
    nn.Module.__init__(model)
    model.joint = nn.Identity()
    with pytest.raises(TypeError, match=r"NemotronAsrStreamingForRNNT.*no transducer loss of its own"):
        use_rnnt(model)


def test_ctc_model():
    config = transformers.ParakeetCTCConfig(encoder_config=tiny.config().encoder_config, vocab_size=11, pad_token_id=10)
    with pytest.raises(TypeError, match="got ParakeetForCTC"):
        use_rnnt(ParakeetForCTC(config))


@pytest.mark.parametrize("part", ["activation", "head"])
@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook"])
def test_hooks_on_the_parts(part, register):
    """They would see projected inputs and losses in training, and a temperature would be one of the losses."""
    model = parakeet()
    getattr(getattr(model.joint, part), register)(lambda *_: None)
    with pytest.raises(ValueError, match=rf"model.joint.{part}: expected a module without forward hooks"):
        use_rnnt(model)


@pytest.mark.parametrize("part", ["", ".activation", ".head"])
def test_forward_set_on_the_module(part):
    """As accelerate does with the modules of a model on several devices."""
    model = parakeet()
    module = model.get_submodule(f"joint{part}")
    module.forward = module.forward
    with pytest.raises(ValueError, match=rf"model.joint{part}: expected the forward of .* accelerate"):
        use_rnnt(model)


def test_hook_on_the_joint_added_later():
    model = use_rnnt(parakeet(), "reference")
    model.joint.forward = model.joint.forward
    output = model(**batch())
    assert output.logits is None
    torch.testing.assert_close(output.loss, use_rnnt(parakeet(), "reference")(**batch()).loss, rtol=0, atol=0)


def test_sharded_before():
    model = parakeet()
    model.joint.head.weight.full_tensor = None  # what tells a DTensor
    with pytest.raises(TypeError, match="got DTensors; call use_rnnt before the model is sharded"):
        use_rnnt(model)


def test_unknown_activation():
    with pytest.raises(ValueError, match=r"model.joint.activation: expected one of ReLU, Tanh, Sigmoid, got SiLU"):
        use_rnnt(parakeet(hidden_act="silu"))


def test_unknown_joint(monkeypatch):
    """A version whose joint network computes something else: found by trying it."""
    kind = type(parakeet().joint)
    original = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, *args, **kwargs: 2 * original(self, *args, **kwargs))
    with pytest.raises(ValueError, match=r"expected head\(activation\(encoder \+ decoder\)\).*transformers 5"):
        use_rnnt(parakeet())


@pytest.mark.parametrize(
    ("use", "error"),
    [
        (lambda scores: scores.softmax(-1), AttributeError),
        (lambda scores: scores[0], AttributeError),
        (lambda scores: scores.squeeze(1), AttributeError),
        (lambda scores: torch.nn.functional.dropout(scores), TypeError),
        (lambda scores: torch.add(scores, torch.ones(1)), TypeError),
    ],
    ids=["method", "index", "axis", "function", "add"],
)
def test_unknown_use_of_the_scores(monkeypatch, use, error):
    """A version whose forward does more with the scores: an error that says so, never a wrong loss."""
    forward = contrib.TransducerJoint.forward

    def changed(self, *args, **kwargs):
        found = forward(self, *args, **kwargs)
        return use(found) if isinstance(found, contrib.Unscored) else found

    monkeypatch.setattr(contrib.TransducerJoint, "forward", changed)
    with pytest.raises(error, match=rf"transformers {transformers.__version__}: .* does not know"):
        use_rnnt(parakeet(), "reference")(**batch())


def test_head_replaced_later():
    model = use_rnnt(parakeet(), "reference")
    model.joint.head = nn.Sequential(model.joint.head)
    with pytest.raises(
        TypeError, match=r"model.joint.head: expected the layer that use_rnnt left there, got torch.*Sequential"
    ):
        model(**batch())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "cuda"}, "backend: "),
        ({"tile_rows": 0}, "tile_rows: "),
        ({"fastemit_lambda": -1}, "fastemit_lambda: "),
        ({"occupancy_threshold": -3}, "occupancy_threshold: "),
        ({"occupancy_threshold": "x"}, "occupancy_threshold: "),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(ValueError, match=message):
        use_rnnt(parakeet(), **options)


def run(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_transformers_is_missing():
    code = "import sys\nsys.modules['transformers'] = None\ntry:\n    import rnnt.contrib.transformers\n"
    assert "pip install 'transformers>=5.12'" in run(f"{code}except ImportError as error:\n    print(error)")


def test_transformers_is_old(monkeypatch):
    old = types.ModuleType("transformers")
    old.__version__ = "5.11.0"
    for name in ("models", "models.parakeet", "models.parakeet.modeling_parakeet"):
        monkeypatch.setitem(sys.modules, f"transformers.{name}", types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "transformers", old)
    monkeypatch.delitem(sys.modules, "rnnt.contrib.transformers")
    with pytest.raises(ImportError, match=r"transformers 5.11.0 does not have: pip install 'transformers>=5.12'"):
        importlib.import_module("rnnt.contrib.transformers")


def test_rnnt_does_not_import_transformers():
    assert run("import sys, rnnt\nprint('transformers' in sys.modules)").strip() == "False"
