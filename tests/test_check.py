"""`python -m rnnt check`: the right lines, and an exit status that tells a wrong backend from a right one.

The name "compiled" stands for the reference's functions here, whole or with a fault planted, so that nothing needs a
compiler; what the real backends compute is judged by their own tests.
"""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from rnnt import check, reference
from rnnt.__main__ import main
from rnnt.problem import JointProblem, Problem

CPU = ["check", "--device", "cpu"]


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What the name "compiled" stands for."""
    module = SimpleNamespace(unsupported=reference.unsupported, joint_loss=reference.joint_loss)
    backends = sys.modules["rnnt.backends"]  # the attribute rnnt.backends is the function
    load = backends._load
    monkeypatch.setattr(backends, "_load", lambda name: module if name == "compiled" else load(name))
    reasons = {"reference": None, "compiled": None, "triton": "it is out today"}
    for place in (backends, check):
        monkeypatch.setattr(place, "unavailable", lambda name, device: reasons[name])
    return module


def table(output: str) -> list[list[str]]:
    """The table's lines, split into words."""
    lines = output.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("backend")) + 1
    return [line.split() for line in lines[first : lines.index("", first)]]


def test_every_line(compiled: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(CPU) == 0
    output = capsys.readouterr().out
    assert "reference  usable\ncompiled   usable\ntriton     not usable: it is out today\n" in output
    lines = table(output)
    expected = {
        (backend, dtype, tiles, shape.name)
        for dtype in ("float64", "float32", "bfloat16")
        for shape in check.CPU_SHAPES
        for backend, tiles in (("reference", "-"), ("compiled", str(shape.tile_rows)), ("compiled", "untiled"))
    }
    assert {tuple(line[:4]) for line in lines} == expected
    assert len(lines) == len(expected)
    assert all(len(line) == 4 + len(check.QUANTITIES) + 1 and line[-1] == "ok" for line in lines)
    assert f"{len(lines)} compared, 0 over budget or failed" in output


def test_columns_are_aligned(compiled: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    main([*CPU, "--dtype", "float32"])
    lines = capsys.readouterr().out.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("backend"))
    head, body = lines[first], lines[first + 1 : lines.index("", first)]
    for name in check.QUANTITIES:
        end = head.index(f" {name}") + 1 + len(name)
        assert all(line[end - 1] != " " and line[end] == " " for line in body)


@pytest.mark.parametrize("dtype", check.DTYPES)
def test_narrowing(dtype: str, compiled: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*CPU, "--dtype", dtype, "--backend", "compiled"]) == 0
    lines = table(capsys.readouterr().out)
    assert {tuple(line[:2]) for line in lines} == {("compiled", dtype)}
    assert len(lines) == 2 * len(check.CPU_SHAPES)


def without_bias(problem: JointProblem) -> JointProblem:
    return replace(
        problem, linear_bias=torch.zeros_like(problem.linear_bias).requires_grad_() + 0 * problem.linear_bias
    )


def shifted_predictor(problem: JointProblem) -> JointProblem:
    return replace(problem, predictor=problem.predictor.roll(1, dims=1))


def other_blank(problem: JointProblem) -> JointProblem:
    blank = (problem.alignment.blank + 1) % problem.linear_weight.shape[0]
    return replace(problem, alignment=replace(problem.alignment, blank=blank))


def half_threshold(problem: JointProblem) -> JointProblem:
    return replace(problem, occupancy_threshold=0.5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("fault", [without_bias, shifted_predictor, other_blank, half_threshold])
def test_a_fault_is_found(
    fault: Callable[[JointProblem], JointProblem],
    dtype: str,
    compiled: SimpleNamespace,
    capsys: pytest.CaptureFixture[str],
) -> None:
    compiled.joint_loss = lambda problem: reference.joint_loss(fault(problem))
    assert main([*CPU, "--dtype", dtype]) == 1
    lines = table(capsys.readouterr().out)
    assert all(("OVER:" in line) == (line[0] == "compiled") for line in lines)


def test_a_value_that_is_not_finite_is_found(compiled: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    compiled.joint_loss = lambda problem: reference.joint_loss(problem) * torch.nan
    assert main([*CPU, "--dtype", "float32", "--backend", "compiled"]) == 1
    assert "nan/" in capsys.readouterr().out


def test_a_crash_is_a_line(compiled: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    def crash(problem: JointProblem) -> torch.Tensor:
        raise RuntimeError("no such kernel\nsecond line")

    compiled.joint_loss = crash
    assert main([*CPU, "--dtype", "float32"]) == 1
    output, progress = capsys.readouterr()
    assert output.count("  failed: RuntimeError: no such kernel\n") == 2 * len(check.CPU_SHAPES)
    assert "second line" in progress
    assert output.count("  ok\n") == len(check.CPU_SHAPES)


def test_a_dtype_that_is_not_taken(compiled: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    def unsupported(problem: Problem) -> str | None:
        return "it has no float64 kernels" if problem.compute_dtype == torch.float64 else None

    compiled.unsupported = unsupported
    assert main([*CPU, "--backend", "compiled", "--dtype", "float64", "--dtype", "float32"]) == 0
    output = capsys.readouterr().out
    assert output.count("  not taken: it has no float64 kernels\n") == 2 * len(check.CPU_SHAPES)
    assert output.count("  ok\n") == 2 * len(check.CPU_SHAPES)

    assert main([*CPU, "--backend", "compiled", "--dtype", "float64"]) == 2
    assert "nothing could be compared" in capsys.readouterr().err


def test_a_requested_backend_that_is_not_usable(compiled: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*CPU, "--backend", "triton", "--backend", "reference"]) == 2
    output, message = capsys.readouterr()
    assert message == "check: --backend triton: not usable on cpu: it is out today\n"
    assert "loss" not in output


def test_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["check", "--device", "cuda"]) == 2
    assert "no CUDA GPU" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", [["--dtype", "float8"], ["--backend", "auto"], ["--device", "tpu"]])
def test_unknown_names(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["check", *wrong])
    assert stop.value.code == 2
    assert "invalid choice" in capsys.readouterr().err


def test_as_a_command() -> None:
    command = [sys.executable, "-m", "rnnt", "check", "--device", "cpu", "--backend", "reference", "--dtype", "float32"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert len(table(done.stdout)) == len(check.CPU_SHAPES)
