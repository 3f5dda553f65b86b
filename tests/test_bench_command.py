"""`python -m rnnt bench`: the right lines, a complete file, a true picture, and clear words about wrong options.

The name "compiled" stands for the reference's functions here, so that nothing needs a compiler.
"""

import gc
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rnnt import reference
from rnnt.__main__ import main
from rnnt.bench import choices, steps
from rnnt.bench.cells import LINE_HEAD, caption, line_cells
from rnnt.bench.machine import is_out_of_memory
from rnnt.bench.measure import measure, pass_peak, pass_times, summary
from rnnt.bench.shapes import parse
from rnnt.bench.steps import PASSES, Settings, Step
from rnnt.problem import JointProblem, Problem
from tests.benchmarks import table

ROOT = Path(__file__).parent.parent
TINY = ["bench", "--device", "cpu", "--shape", "2,6,3,11,8", "--dtype", "float32", "--rounds", "2"]
NAME = "B2-T6-U3-V11-H8-float32"


@pytest.fixture(scope="module", autouse=True)
def quick_collections() -> Iterator[None]:
    """Each pass ends with a garbage collection, which need not look through all of PyTorch every time."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What the name "compiled" stands for."""
    module = SimpleNamespace(unsupported=reference.unsupported, joint_loss=reference.joint_loss)
    backends = sys.modules["rnnt.backends"]  # the attribute rnnt.backends is the function
    load = backends._load
    monkeypatch.setattr(backends, "_load", lambda name: module if name == "compiled" else load(name))
    reasons = {"reference": None, "compiled": None, "triton": "it is out today"}
    for place in (backends, choices):
        monkeypatch.setattr(place, "unavailable", lambda name, device: reasons[name])
    return module


def lines_of(output: str) -> list[list[str]]:
    """Backend, tiles and the remaining words of every line of the tables."""
    return [line.split() for line in output.splitlines() if line.startswith(("reference ", "compiled "))]


def untiled_raises(error: BaseException) -> Callable[[JointProblem], torch.Tensor]:
    def joint_loss(problem: JointProblem) -> torch.Tensor:
        if problem.tile_rows is None:
            raise error
        return reference.joint_loss(problem)

    return joint_loss


def test_lines_and_saved_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.json"
    assert main([*TINY, "--tile-rows", "4", "--tile-rows", "none", "--frames", "9,6", "--json", str(path)]) == 0
    output = capsys.readouterr().out
    lines = lines_of(output)
    assert [line[:2] for line in lines] == 2 * [["reference", "-"], ["compiled", "4"], ["compiled", "untiled"]]
    for line in lines:
        assert len(line) == 2 + 2 * len(PASSES) + 2 + 1  # times with spreads, a size with its unit, a share
        assert line[9] == "MiB"
    assert f"{NAME}: 2, 6, 3, 11, 8; float32; relu\n48 valid rows, dense tensor 0.00201 MiB, GEMM floor" in output
    assert f"{NAME.replace('T6', 'T9')}: 2, 9, 3, 11, 8" in output

    saved = json.loads(path.read_text())
    assert output.startswith(caption(saved))
    assert saved["machine_info"]["torch"] == torch.__version__
    assert saved["machine_info"].keys() >= {"machine", "python_version", "cpu", "threads", "triton", "rnnt"}
    assert len(saved["datetime"]) == len("2026-01-01T00:00:00+00:00")
    assert saved["shapes"] == [NAME]
    assert saved["frames"] == [NAME.replace("T6", f"T{T}") for T in (6, 9)]
    assert saved["out_of_memory"] == saved["refused"] == saved["failed"] == []
    infos = [record["extra_info"] for record in saved["benchmarks"]]
    assert [info["pass"] for info in infos] == 6 * list(PASSES)
    assert [info["sizes"]["T"] for info in infos] == 9 * [6] + 9 * [9]
    for record in saved["benchmarks"]:
        info, stats = record["extra_info"], record["stats"]
        assert info["outcome"] == "measured"
        assert info["checked"] is False
        assert info["peak_bytes"] > 0
        assert info["of_floor"] == stats["median"] / info["floor_seconds"]
        assert len(stats["data"]) == stats["rounds"] == 2
        assert 0 < stats["min"] <= stats["median"] <= stats["max"]


def test_columns_are_aligned(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, "--tile-rows", "4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("backend"))
    assert len({len(line) for line in lines[first : first + 3]}) == 1
    for name in LINE_HEAD[2:]:
        end = lines[first].index(f" {name}") + 1 + len(name)
        assert all(line[end - 1] != " " and line[end : end + 1] in ("", " ") for line in lines[first + 1 : first + 3])


def test_saved_file_as_markdown(tmp_path: Path) -> None:
    """The tool that makes the README's table reads the file, and says that nothing was checked."""
    path = tmp_path / "run.json"
    assert main([*TINY, "--backend", "reference", "--json", str(path)]) == 0
    text = table.render([json.loads(path.read_text())])
    assert text.count("| reference (not checked) | - |") == 1
    assert f"| {NAME}: 2, 6, 3, 11, 8; float32; relu | 48 |" in text


def test_figures_of_a_pass() -> None:
    """Every round is a step of its own: gradients do not add up, and held ones do not count as memory."""
    step = Step(parse("2,6,3,11,8").in_dtype("float32"), Settings("reference", None), "cpu")
    step.both()
    exact = step.output.weight.grad.clone()
    assert len(pass_times(step, "both", 3)) == 3
    assert torch.equal(step.output.weight.grad, exact)
    assert pass_peak(step, "both") > step.shape.dense_bytes
    assert summary([4.0, 1.0, 3.0, 2.0])["median"] == 2.5
    assert summary([4.0, 1.0, 3.0, 2.0])["iqr"] == 1.5
    assert summary([4.0])["iqr"] == 0


def test_scores_and_threshold(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.json"
    chosen = ["--backend", "reference", "--scores", "8", "--occupancy-threshold", "1e-3", "--json", str(path)]
    assert main([*TINY, *chosen]) == 0
    cell = f"{NAME}: 2, 6, 3, 11, 8; float32; relu; scores x8; threshold 0.001"
    assert f"\n{cell}\n" in capsys.readouterr().out
    saved = json.loads(path.read_text())
    for record in saved["benchmarks"]:
        assert record["extra_info"]["scores"] == 8
        assert record["extra_info"]["occupancy_threshold"] == 1e-3
        assert record["extra_info"]["graph"] is False
    assert f"| {cell} |" in table.render([saved])


def test_sharp_scores() -> None:
    """Of two steps that differ in their scores alone, the output layer's weights do."""
    shape = parse("2,6,3,11,8").in_dtype("float32")
    plain, sharp = (Step(replace(shape, scores=N), Settings("reference", None), "cpu") for N in (1.0, 8.0))
    assert torch.equal(sharp.output.weight, 8 * plain.output.weight)
    assert torch.equal(sharp.output.bias, plain.output.bias)
    assert torch.equal(sharp.projected[0], plain.projected[0])


def test_a_captured_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured once to be timed and once for its memory; the other passes have no figures."""
    captures, replays = [], []

    def captured(work: Callable[[], object]) -> SimpleNamespace:
        captures.append(work())
        return SimpleNamespace(replay=lambda: replays.append(work()))

    monkeypatch.setattr(steps, "captured", captured)
    shape, settings = parse("2,6,3,11,8").in_dtype("float32"), Settings("compiled", "auto", graph=True, validate=False)
    (found,) = measure(shape, settings, "cpu", 2)
    assert (len(captures), len(replays)) == (2, 3)
    info = found["extra_info"]
    assert (info["pass"], info["graph"], info["validate"]) == ("both", True, False)
    assert info["peak_bytes"] > shape.dense_bytes
    backend, tiles, forward, backward, both, _, _ = line_cells({"both": found})
    assert (backend, tiles, forward, backward) == ("compiled", "tiled, graph", "", "")
    assert both != ""
    (line,) = table.rows([found])
    assert line[3].startswith("- / ")

    eager = Step(shape, settings._replace(graph=False), "cpu")
    eager.both()
    for x, replayed in zip(eager.leaves("both"), replays[-1], strict=True):
        assert torch.equal(x.grad, replayed)


def test_what_can_be_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(*backends: str) -> list[Settings]:
        return choices.chosen_settings(list(backends), None, "cuda", "relu", graph=True)

    with pytest.raises(ValueError, match="backend triton: not usable on cuda: it is out today"):
        chosen()
    with pytest.raises(ValueError, match="graph: the step of backend compiled cannot be captured, only that of triton"):
        chosen("compiled")
    monkeypatch.setattr(choices, "unavailable", lambda name, device: None)
    assert [(x.backend, x.tiles, x.validate) for x in chosen()] == [
        ("triton", "tiled, graph", False),
        ("triton", "untiled, graph", False),
    ]


def test_out_of_memory_is_a_result(
    compiled: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compiled.joint_loss = untiled_raises(torch.OutOfMemoryError("none left"))
    path = tmp_path / "run.json"
    assert main([*TINY, "--backend", "compiled", "--json", str(path)]) == 0
    tiled, untiled = (" ".join(line) for line in lines_of(capsys.readouterr().out))
    assert "out of memory" not in tiled
    assert untiled == "compiled untiled" + len(PASSES) * " out of memory"
    saved = json.loads(path.read_text())
    assert [record["extra_info"]["pass"] for record in saved["out_of_memory"]] == list(PASSES)
    assert all("stats" not in record for record in saved["out_of_memory"])
    assert len(saved["benchmarks"]) == len(PASSES)


def test_the_cpu_runs_out_of_memory_too() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
    assert not is_out_of_memory(RuntimeError("CUDA error: an illegal memory access was encountered"))


def test_a_failure_is_a_line(compiled: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compiled.joint_loss = untiled_raises(RuntimeError("no such kernel\nsecond line"))
    path = tmp_path / "run.json"
    assert main([*TINY, "--json", str(path)]) == 1
    output, errors = capsys.readouterr()
    assert [line[:2] for line in lines_of(output)][-1] == ["compiled", "untiled"]
    assert output.count("  failed: RuntimeError: no such kernel\n") == 1
    assert errors.count("\nsecond line") == 1
    saved = json.loads(path.read_text())
    assert [record["extra_info"]["pass"] for record in saved["failed"]] == ["forward"]
    assert len(saved["benchmarks"]) == 2 * len(PASSES)


def test_a_call_that_is_not_taken(compiled: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    def unsupported(problem: Problem) -> str:
        return "it takes nothing today"

    compiled.unsupported = unsupported
    assert main([*TINY, "--tile-rows", "auto"]) == 0
    assert "compiled    tiled           not taken: it takes nothing today\n" in capsys.readouterr().out
    assert main([*TINY, "--backend", "compiled"]) == 2


def test_interrupted(compiled: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    compiled.joint_loss = untiled_raises(KeyboardInterrupt())
    path = tmp_path / "run.json"
    assert main([*TINY, "--json", str(path), "--picture", str(tmp_path / "run.png")]) == 130
    assert "interrupted; what was measured is kept" in capsys.readouterr().err
    assert len(json.loads(path.read_text())["benchmarks"]) == 2 * len(PASSES)
    assert (tmp_path / "run.png").exists()


WRONG = [
    (["--shape", "2,3"], "--shape: expected B,T,U,V,H or one of target"),
    (["--tile-rows", "many"], "--tile-rows: expected a number of at least 1, auto or none, got 'many'"),
    (["--tile-rows", "0"], "--tile-rows: expected a number of at least 1, auto or none, got '0'"),
    (["--frames", "10,,20"], "--frames: expected numbers of frames like 100,200,400, got '10,,20'"),
    (["--frames", "0"], "--frames: expected numbers of frames"),
    (["--scores", "0"], "--scores: expected a number above 0, got 0"),
    (["--scores", "nan"], "--scores: expected a number above 0, got nan"),
    (["--occupancy-threshold", "1"], "--occupancy-threshold: expected a number in [0, 1) or auto, got '1'"),
    (["--occupancy-threshold", "low"], "--occupancy-threshold: expected a number in [0, 1) or auto, got 'low'"),
    (["--graph"], "--graph: a step can only be captured on a CUDA GPU, not on cpu"),
    (["--rounds", "0"], "--rounds: expected a number of at least 1, got 0"),
    (["--backend", "triton"], "--backend triton: not usable on cpu: it is out today"),
    (["--json", "/no/such/folder/run.json"], "--json: expected a file in a folder that exists"),
    (["--picture", "run.pdf"], "--picture: expected a file name that ends in .png, got 'run.pdf'"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG, ids=[" ".join(arguments) for arguments, _ in WRONG])
def test_options_that_are_wrong(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Said at once, in one line, before anything is measured."""
    assert main(["bench", "--device", "cpu", *arguments]) == 2
    output, errors = capsys.readouterr()
    assert output == ""
    assert errors.count("\n") == 1
    assert errors.startswith(f"bench: {message}")


@pytest.mark.parametrize(
    "wrong", [["--dtype", "float8"], ["--backend", "auto"], ["--device", "tpu"], ["--rounds", "few"]]
)
def test_unknown_names(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["bench", *wrong])
    assert stop.value.code == 2
    assert f"argument {wrong[0]}: invalid" in capsys.readouterr().err


def test_no_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["bench", "--device", "cuda"]) == 2
    assert capsys.readouterr().err == "bench: --device cuda: PyTorch finds no CUDA GPU on this machine\n"


def test_no_matplotlib(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # what import finds is then: not installed
    assert main([*TINY, "--picture", "run.png"]) == 2
    output, errors = capsys.readouterr()
    assert output == ""
    assert errors == "bench: --picture: the package matplotlib is not installed: pip install matplotlib\n"


def test_no_tqdm(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "tqdm", None)
    assert main([*TINY, "--tile-rows", "4"]) == 0
    output, errors = capsys.readouterr()
    assert len(lines_of(output)) == 2
    assert errors == f"0/6  {NAME}: GEMM floor\n0/6  {NAME}: reference\n3/6  {NAME}: compiled 4\n"


def test_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tqdm")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main([*TINY, "--tile-rows", "4"]) == 0
    output, errors = capsys.readouterr()
    assert len(lines_of(output)) == 2
    assert "\r" not in output
    assert f"{NAME}: compiled 4: " in errors
    assert "/6 [" in errors


def record(backend: str, tiles: str, T: int, figures: tuple[float, float] | None) -> dict[str, Any]:
    """A measurement of "both": peak in MiB and median in ms, or None where memory ran out."""
    info = {
        "shape": f"s-T{T}", "sizes": dict(zip("BTUVH", (1, T, 2, 3, 4), strict=True)), "dtype": "float32",
        "autocast": False, "activation": "relu", "dropout_p": 0.0, "backend": backend, "tiles": tiles, "pass": "both",
        "dense_bytes": T << 20, "floor_seconds": T / 1000, "outcome": "measured" if figures else "out of memory",
    }  # fmt: skip
    if figures is None:
        return {"extra_info": info}
    return {"extra_info": info | {"peak_bytes": figures[0] * 2**20}, "stats": {"median": figures[1] / 1000}}


def test_picture_of_a_trade() -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    from rnnt.bench.picture import draw_trade

    axes = Figure().subplots()
    records = [
        record("triton", "untiled", 8, (50, 20)),
        record("triton", "4096", 8, (5, 30)),
        record("compiled", "tiled", 8, (10, 60)),
        record("reference", "-", 8, None),
    ]
    draw_trade(axes, "s-T8", records)
    drawn = {line.get_label(): line.get_xydata().tolist() for line in axes.lines}
    assert drawn["triton"] == [[5, 30], [50, 20]]
    assert drawn["compiled"] == [[10, 60]]
    assert axes.lines[-2].get_ydata()[0] == 8  # the floor, in ms
    assert axes.lines[-1].get_xdata()[0] == 8  # the dense tensor, in MiB
    assert [text.get_text() for text in axes.texts] == ["4096", "untiled", "tiled"]
    assert "out of memory: reference" in axes.get_title()


def test_picture_of_frames() -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    from rnnt.bench.picture import draw_sweep

    time_axes, memory_axes = Figure().subplots(2)
    records = [record("triton", "tiled", T, (3, 10 * T)) for T in (40, 10, 20)]
    records += [record("reference", "-", T, None if T >= 20 else (T, 7)) for T in (40, 10, 20)]
    draw_sweep(time_axes, memory_axes, records)
    times, memories = (
        {line.get_label(): line.get_xydata().tolist() for line in x.lines} for x in (time_axes, memory_axes)
    )
    assert times["triton tiled"] == [[10, 100], [20, 200], [40, 400]]
    assert memories["triton tiled"] == [[10, 3], [20, 3], [40, 3]]
    assert memories["reference (out of memory at 20)"] == [[10, 10]]
    assert times["GEMM floor"][0] == [10, 10]


def test_picture_is_saved(compiled: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    compiled.joint_loss = untiled_raises(torch.OutOfMemoryError("none left"))
    path = tmp_path / "run.png"
    assert main([*TINY, "--frames", "4", "--tile-rows", "none", "--picture", str(path)]) == 0
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert capsys.readouterr().out.endswith(f"drew {path}\n")


def test_as_a_command(tmp_path: Path) -> None:
    """In a process of its own, where nothing needs the tests or an extra, and only the plain lines go to stderr."""
    code = (
        "import sys; sys.modules |= dict.fromkeys(('tests', 'matplotlib', 'pytest')); from rnnt.__main__ import main; "
    )
    command = [sys.executable, "-c", code + f"sys.exit(main({[*TINY, '--backend', 'reference']}))"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(lines_of(done.stdout)) == 1
