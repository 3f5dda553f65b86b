"""The benchmarks themselves: they run, refuse wrong backends, save what the table needs, and stay out of other runs."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rnnt.bench.shapes import SHAPES, parse
from rnnt.bench.steps import Settings
from rnnt.check import QUANTITIES
from tests.benchmarks import table
from tests.benchmarks.correctness import faults, make_inputs

ROOT = Path(__file__).parent.parent
TINY = ["--rnnt-device", "cpu", "--rnnt-backend", "reference", "--rnnt-shape", "2,6,3,11,8", "--rnnt-rounds", "2"]


def pytest_run(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """A run of its own, also from a worker of pytest-xdist, where pytest-benchmark would refuse to measure."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict:
    path = tmp_path_factory.mktemp("run") / "run.json"
    chosen = ["--rnnt-scores", "8", "--rnnt-occupancy-threshold", "0"]
    done = pytest_run("tests/benchmarks", *TINY, *chosen, "--benchmark-json", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(path.read_text())


def test_saved_run(saved: dict) -> None:
    infos = [bench["extra_info"] for bench in saved["benchmarks"]]
    assert [info["pass"] for info in infos] == ["forward", "backward", "both"]
    assert {bench["group"].rpartition(" ")[0] for bench in saved["benchmarks"]} == {"B2-T6-U3-V11-H8"}
    for info in infos:
        assert info["rows"] == 2 * 6 * 4
        assert info["dense_bytes"] == 2 * 6 * 4 * 11 * 2
        assert info["peak_bytes"] > info["dense_bytes"]
        assert info["floor_seconds"] > 0
        assert info["of_floor"] > 0
        assert (info["scores"], info["occupancy_threshold"], info["graph"]) == (8, 0, False)
        assert info["checked"] is True
    assert saved["machine_info"]["torch"]
    assert "node" not in saved["machine_info"]
    assert saved["out_of_memory"] == []


def test_table(saved: dict, tmp_path: Path) -> None:
    lines = [line for line in table.render([saved]).splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in lines}) == 1
    assert "| reference | - |" in lines[2]
    assert "B2-T6-U3-V11-H8: 2, 6, 3, 11, 8; bfloat16; relu; scores x8; threshold 0 |" in lines[2]

    run, readme = tmp_path / "run.json", tmp_path / "README.md"
    run.write_text(json.dumps(saved))
    readme.write_text(f"before\n{table.BEGIN}\nold\n{table.END}\nafter\n")
    assert table.main([str(run), "--readme", str(readme)]) == 0
    assert readme.read_text() == f"before\n{table.BEGIN}\n{table.render([saved])}{table.END}\nafter\n"
    readme.write_text("no markers")
    assert table.main([str(run), "--readme", str(readme)]) == 1


# Makes the name "compiled" stand for the reference with a fault.
PLUGIN = """
import dataclasses, types, torch
from rnnt import reference
import sys
backends = sys.modules["rnnt.backends"]
def joint_loss(problem):
    {fault}
    return reference.joint_loss(problem)
fake = types.SimpleNamespace(unsupported=reference.unsupported, joint_loss=joint_loss)
load = backends._load
backends._load = lambda name: fake if name == "compiled" else load(name)
backends.unavailable = lambda name, device: None
"""


def write_plugin(fault: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "faulty_backend.py").write_text(PLUGIN.format(fault=fault))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), str(ROOT)]))


def run_with_fault(fault: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, dict | None]:
    """Output and saved file of a run on a backend with the given statement in its loss."""
    write_plugin(fault, folder, monkeypatch)
    arguments = [argument.replace("reference", "compiled") for argument in TINY]
    done = pytest_run(
        "-p", "faulty_backend", "tests/benchmarks", *arguments, "--rnnt-tile-rows", "auto",
        "--benchmark-json", str(folder / "run.json"),
    )  # fmt: skip
    saved = folder / "run.json"
    return done.stdout, json.loads(saved.read_text()) if saved.exists() else None


def test_a_wrong_backend_has_no_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = "problem = dataclasses.replace(problem, predictor=problem.predictor.roll(1, 1))"
    output, saved = run_with_fault(fault, tmp_path, monkeypatch)
    assert "3 errors" in output
    assert "wrong, so not measured" in output
    assert "loss (whole batch): error" in output
    assert saved is None


def test_out_of_memory_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output, saved = run_with_fault('raise torch.OutOfMemoryError("none left")', tmp_path, monkeypatch)
    assert "3 passed" in output
    assert saved["benchmarks"] == []
    assert {row["extra_info"]["outcome"] for row in saved["out_of_memory"]} == {"out of memory"}
    line = table.render([saved]).splitlines()[4]
    assert line.count("| out of memory ") == 3


def test_the_check_is_of_what_is_measured() -> None:
    """The scores are those of the shape, the threshold is the backend's alone, and each quantity has its budget."""
    shape = parse("2,6,3,11,8").in_dtype("float32")
    sharp, settings = replace(shape, scores=8.0), Settings("reference", None, occupancy_threshold=0.0)
    assert faults(sharp, settings, "cpu") == []
    weights = [make_inputs(x, settings, "cpu")["linear_weight"] for x in (shape, sharp)]
    assert torch.equal(weights[1], 8 * weights[0])
    over = faults(sharp, settings._replace(occupancy_threshold=0.5), "cpu")
    assert [line.split()[0] for line in over] == [name for name in QUANTITIES if name != "loss"]


def test_a_graph_has_one_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a backend that the plugin declares usable; nothing runs."""
    write_plugin("pass", tmp_path, monkeypatch)
    chosen = ["--rnnt-device", "cuda", "--rnnt-graph", "--rnnt-shape", "small"]
    done = pytest_run("-p", "faulty_backend", "tests/benchmarks", "--collect-only", "-q", *chosen)
    names = [line.rpartition("::")[2] for line in done.stdout.splitlines() if "::" in line]
    assert sorted(names) == [f"test_both[small-triton-{tiles}-graph]" for tiles in ("tiled", "untiled")]


@pytest.mark.gpu
@pytest.mark.triton
def test_a_captured_step_is_measured(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    chosen = ["--rnnt-shape", "2,30,9,37,24", "--rnnt-rounds", "2", "--rnnt-dropout", "0.1"]
    done = pytest_run("tests/benchmarks", "--rnnt-graph", *chosen, "--benchmark-json", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    infos = [bench["extra_info"] for bench in json.loads(path.read_text())["benchmarks"]]
    assert [(x["pass"], x["tiles"]) for x in infos] == [("both", "tiled, graph"), ("both", "untiled, graph")]
    assert all(info["peak_bytes"] > 0 for info in infos)


def test_options_that_are_wrong() -> None:
    done = pytest_run("tests/benchmarks", "--rnnt-shape", "2,3")
    assert done.returncode != 0
    assert "expected B,T,U,V,H or one of target" in done.stdout + done.stderr
    done = pytest_run("tests/benchmarks/test_loss.py", "--rnnt-device", "cpu", "--rnnt-backend", "triton")
    assert done.returncode != 0
    assert "--rnnt-backend triton: not usable on cpu" in done.stdout + done.stderr
    done = pytest_run("tests/benchmarks", "--rnnt-device", "cpu", "--rnnt-graph")
    assert done.returncode != 0
    assert "--rnnt-graph: a step can only be captured on a CUDA GPU" in done.stdout + done.stderr


def test_ordinary_runs_leave_them_alone() -> None:
    done = pytest_run("--collect-only", "-q", "tests", "-k", "benchmarks")
    assert "tests/test_benchmarks.py" in done.stdout
    assert "tests/benchmarks/" not in done.stdout


@pytest.mark.parametrize("wrong", ["2,3", "a,b,c,d,e", "0,1,1,5,8", "nowhere"])
def test_shapes_that_are_wrong(wrong: str) -> None:
    with pytest.raises(ValueError, match="expected B,T,U,V,H"):
        parse(wrong)


def test_valid_rows_of_named_shapes() -> None:
    millions = {name: round(shape.rows / 1e6, 2) for name, shape in SHAPES.items() if name != "cpu"}
    assert millions == {
        "target": 1.65, "target-1025": 1.65, "ragged": 0.73, "small": 0.16, "long": 3.61, "bigvocab": 0.32,
        "speech": 1.06,
    }  # fmt: skip
