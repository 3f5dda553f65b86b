"""The three backends, which of them work on this machine, and the choice among them.

A backend is a package with the same five functions:

    unsupported(problem) -> str | None      why it cannot take this problem, in one sentence
    joint_loss(JointProblem)           -> losses [B]
    joint_log_probs(JointProblem)      -> logp_blank [B, T, U1], logp_label [B, T, U]
    logits_loss(LogitsProblem)         -> losses [B]
    log_probs_loss(LogProbsProblem)    -> losses [B]

Lengths and labels have been checked, and a second derivative raises; a package with GUARDS_ITSELF sees to both in its
joint_loss.
Backends never import one another.  A backend that was named is used or refused, never replaced; only "auto" chooses.
Before: problem.py.  After: reference/, compiled/, triton/.
"""

import functools
import importlib.util
import os
import shutil
import warnings
from types import ModuleType

import torch

from rnnt.problem import Problem, check_name

NAMES = ("triton", "compiled", "reference")


@functools.cache
def interpreting() -> bool:
    """Whether Triton kernels run in Triton's interpreter, on the CPU (which Triton, too, looks up once)."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def _cpu_compiler() -> str | None:
    named = os.environ.get("CXX")
    return next(
        (found for name in (named, "g++", "clang++", "c++", "cl") if name and (found := shutil.which(name))), None
    )


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@functools.cache
def _gpu_refusal() -> str | None:
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return "it needs an NVIDIA GPU"
    if torch.cuda.get_device_capability() < (8, 0):
        return "it needs a GPU of compute capability 8.0 or newer"
    return None


def unavailable(name: str, device: str) -> str | None:
    """Why the backend does not work on this machine for tensors on "cpu" or "cuda"; None when it does."""
    if name == "reference":
        return None
    if name == "compiled":
        if device == "cpu":
            return None if _cpu_compiler() else "torch.compile needs a C++ compiler for CPU tensors and found none"
        if not _has_triton():
            return "torch.compile needs the package triton for GPU tensors: pip install triton"
        return None
    if not _has_triton():
        return "the package triton is not installed: pip install triton"
    if device == "cpu":
        return (
            None
            if interpreting()
            else "it needs CUDA tensors (on the CPU, only Triton's interpreter: TRITON_INTERPRET=1)"
        )
    return _gpu_refusal()


# What torch.compiler.assume_constant_result does, without its import of the compiler, and so of Triton.
unavailable._dynamo_marked_constant = True  # type: ignore[attr-defined]


def backends() -> dict[str, str | None]:
    """Each backend's name -> None when it is usable on this machine, else the reason in one sentence."""
    devices = ("cuda", "cpu") if torch.cuda.is_available() else ("cpu",)
    reasons = {}
    for name in reversed(NAMES):
        found = [unavailable(name, device) for device in devices]
        reasons[name] = None if None in found else found[0]
    return reasons


def _load(name: str) -> ModuleType:
    # Plain imports: torch.compile(fullgraph=True) can follow them, importlib.import_module it cannot.
    if name == "reference":
        from rnnt import reference

        return reference
    if name == "compiled":
        from rnnt import compiled

        return compiled
    from rnnt import triton

    return triton


@functools.cache
def _warn_reference(reason: str) -> None:
    warnings.warn(f"rnnt: backend='auto' takes the slow reference backend: {reason}", stacklevel=4)


def _refusal(name: str, problem: Problem) -> str | None:
    """Why the backend does not take the problem, here or at all."""
    reason = unavailable(name, problem.device.type)
    return _load(name).unsupported(problem) if reason is None else reason


def choose(name: str, problem: Problem) -> ModuleType:
    """The backend that computes this problem."""
    check_name("backend", name, (*NAMES, "auto"))
    if name != "auto":
        reason = _refusal(name, problem)
        if reason is not None and "pip install" in reason:
            raise ImportError(f"backend {name!r}: {reason}")
        if reason is not None:
            raise ValueError(f"backend: expected one that can take this call, got {name!r}: {reason}")
        return _load(name)
    for candidate in ("triton", "compiled") if problem.device.type == "cuda" else ("compiled",):
        reason = _refusal(candidate, problem)
        if reason is None:
            return _load(candidate)
    if not torch.compiler.is_compiling():
        _warn_reference(str(reason))
    return _load("reference")


def reason_of_refusal(error: Exception, name: str) -> str | None:
    """Why the backend that was named does not take a call, when that is what the error says."""
    refused = isinstance(error, ValueError) and str(error).startswith("backend: ")
    return str(error).partition(f"got {name!r}: ")[2] or None if refused else None
