"""Options of the benchmarks, what they run on, and what is saved beside their figures.

They run only when a path below this folder is on the command line: an ordinary `pytest` leaves them alone.
"""

import importlib.metadata
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from rnnt.backends import NAMES, unavailable
from tests.benchmarks import shapes
from tests.benchmarks.steps import Settings

HERE = Path(__file__).parent


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    start = config.invocation_params.dir
    asked = [(start / argument.partition("::")[0]).resolve() for argument in config.args]
    return None if any(path == HERE or HERE in path.parents for path in asked) else True


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("rnnt benchmarks")
    add = group.addoption
    add("--rnnt-backend", action="append", choices=NAMES, help="repeatable; default: all that are usable")
    add("--rnnt-shape", action="append", metavar="SHAPE",
        help=f"repeatable: {', '.join(shapes.SHAPES)}, or B,T,U,V,H; default: target on a GPU, else cpu")  # fmt: skip
    add("--rnnt-device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    add("--rnnt-dtype", choices=shapes.DTYPES, help="instead of the shape's own")
    add("--rnnt-tile-rows", action="append", metavar="ROWS",
        help="repeatable: a number, auto, or none (untiled); default: auto and none")  # fmt: skip
    add("--rnnt-activation", default="relu", choices=("relu", "tanh", "sigmoid"))
    add("--rnnt-dropout", type=float, default=0.0, metavar="P")
    add("--rnnt-no-validate", action="store_true", help="call the loss with validate=False")
    add("--rnnt-rounds", type=int, metavar="N", help="timed rounds of each test; default: 20 on a GPU, else 5")


def device_of(config: pytest.Config) -> str:
    return config.getoption("rnnt_device") or ("cuda" if torch.cuda.is_available() else "cpu")


def chosen_shapes(config: pytest.Config) -> list[shapes.Shape]:
    names = config.getoption("rnnt_shape") or ["target" if device_of(config) == "cuda" else "cpu"]
    dtype = config.getoption("rnnt_dtype")
    try:
        found = [shapes.parse(name) for name in names]
    except ValueError as error:
        raise pytest.UsageError(f"--rnnt-shape: {error}") from None
    return [shape.in_dtype(dtype) if dtype else shape for shape in found]


def chosen_settings(config: pytest.Config) -> list[Settings]:
    device = device_of(config)
    reasons = {name: unavailable(name, device) for name in reversed(NAMES)}
    asked = config.getoption("rnnt_backend")
    for name in asked or []:
        if reasons[name] is not None:
            raise pytest.UsageError(f"--rnnt-backend {name}: not usable on {device}: {reasons[name]}")
    tilings: list[int | str | None] = []
    for text in config.getoption("rnnt_tile_rows") or ["auto", "none"]:
        if text not in ("auto", "none") and not text.isdecimal():
            raise pytest.UsageError(f"--rnnt-tile-rows: expected a number, auto or none, got {text!r}")
        tilings.append(None if text == "none" else text if text == "auto" else int(text))
    options = (
        config.getoption("rnnt_activation"),
        config.getoption("rnnt_dropout"),
        not config.getoption("rnnt_no_validate"),
    )
    return [
        Settings(name, tile_rows, *options)
        for name in asked or [name for name, reason in reasons.items() if reason is None]
        for tile_rows in ([None] if name == "reference" else tilings)
    ]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "step" in metafunc.fixturenames:
        metafunc.parametrize("shape", chosen_shapes(metafunc.config), ids=lambda shape: shape.name)
        metafunc.parametrize(
            "settings", chosen_settings(metafunc.config), ids=lambda x: f"{x.backend}-{x.tiles}".rstrip("-")
        )


@pytest.fixture
def device(request: pytest.FixtureRequest) -> str:
    return device_of(request.config)


@pytest.fixture
def rounds(request: pytest.FixtureRequest, device: str) -> int:
    return request.config.getoption("rnnt_rounds") or {"cuda": 20, "cpu": 5}[device]


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, Any]) -> None:
    """What the figures depend on; not whose machine it was."""
    for name in ("node", "release"):
        machine_info.pop(name, None)
    cpu = machine_info.get("cpu", {})
    machine_info["cpu"] = {name: cpu[name] for name in ("brand_raw", "count") if name in cpu}
    machine_info["torch"] = torch.__version__
    machine_info["triton"] = version_of("triton")
    machine_info["rnnt"] = version_of("rnnt")
    machine_info["threads"] = torch.get_num_threads()
    if device_of(config) == "cuda":
        properties = torch.cuda.get_device_properties(0)
        machine_info["gpu"] = properties.name
        machine_info["gpu_bytes"] = properties.total_memory
        machine_info["cuda"] = torch.version.cuda


def version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_commit_info(config: pytest.Config, commit_info: dict[str, Any]) -> None:
    """RNNT_COMMIT names the commit where the files are not a git checkout."""
    commit_info.pop("project", None)
    if "RNNT_COMMIT" in os.environ:
        commit_info["id"] = os.environ["RNNT_COMMIT"]


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_json(config: pytest.Config, benchmarks: list[Any], output_json: dict[str, Any]) -> None:
    """Out of memory: entries without "stats", in a list of their own, so that pytest-benchmark can compare the rest."""
    rows = [x for x in benchmarks if x.extra_info.get("outcome") == "out of memory"]
    output_json["out_of_memory"] = [x.as_dict(include_data=False, stats=False) for x in rows]
