"""Options of the benchmarks, what they run on, and what is saved beside their figures.

They run only when a path below this folder is on the command line: an ordinary `pytest` leaves them alone.
"""

import os
from pathlib import Path
from typing import Any

import pytest

from rnnt.backends import NAMES
from rnnt.bench import machine
from rnnt.bench.choices import chosen_settings, chosen_shapes
from rnnt.bench.measure import ROUNDS
from rnnt.bench.shapes import SHAPES
from rnnt.check import DTYPES
from rnnt.problem import ACTIVATIONS

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
        help=f"repeatable: {', '.join(SHAPES)}, or B,T,U,V,H; default: target on a GPU, else cpu")  # fmt: skip
    add("--rnnt-device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    add("--rnnt-dtype", choices=DTYPES, help="instead of the shape's own")
    add("--rnnt-tile-rows", action="append", metavar="ROWS",
        help="repeatable: a number, auto, or none (untiled); default: auto and none")  # fmt: skip
    add("--rnnt-activation", default="relu", choices=ACTIVATIONS)
    add("--rnnt-dropout", type=float, default=0.0, metavar="P")
    add("--rnnt-no-validate", action="store_true", help="call the loss with validate=False")
    add("--rnnt-scores", type=float, default=1.0, metavar="N", help="the output layer's weights times N; default: 1")
    add("--rnnt-occupancy-threshold", default="auto", metavar="X", help="of the backward pass; default: auto")
    add("--rnnt-graph", action="store_true",
        help="replay forward and backward from a CUDA graph (triton on a GPU; no other pass is measured)")  # fmt: skip
    add("--rnnt-rounds", type=int, metavar="N", help="timed rounds of each test; default: 20 on a GPU, else 5")


def device_of(config: pytest.Config) -> str:
    return config.getoption("rnnt_device") or machine.default_device()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "step" not in metafunc.fixturenames:
        return
    config, option = metafunc.config, metafunc.config.getoption
    device = device_of(config)
    try:
        chosen = chosen_shapes(option("rnnt_shape"), option("rnnt_dtype"), device, option("rnnt_scores"))
        settings = chosen_settings(
            option("rnnt_backend"),
            option("rnnt_tile_rows"),
            device,
            option("rnnt_activation"),
            option("rnnt_dropout"),
            not option("rnnt_no_validate"),
            option("rnnt_occupancy_threshold"),
            option("rnnt_graph"),
        )
    except ValueError as error:
        raise pytest.UsageError(f"--rnnt-{error}") from None
    metafunc.parametrize("shape", chosen, ids=lambda shape: shape.name)
    metafunc.parametrize("settings", settings, ids=lambda x: f"{x.backend}-{x.tiles}".rstrip("-").replace(", ", "-"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Passes that the settings do not have are left out."""
    left_out = [x for x in items if HERE in x.path.parents and not has_pass(x)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [x for x in items if x not in left_out]


def has_pass(item: pytest.Function) -> bool:
    return item.originalname.removeprefix("test_") in item.callspec.params["settings"].passes


@pytest.fixture
def device(request: pytest.FixtureRequest) -> str:
    return device_of(request.config)


@pytest.fixture
def rounds(request: pytest.FixtureRequest, device: str) -> int:
    return request.config.getoption("rnnt_rounds") or ROUNDS[device]


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, Any]) -> None:
    """What the figures depend on; not whose machine it was."""
    for name in ("node", "release"):
        machine_info.pop(name, None)
    cpu = machine_info.get("cpu", {})
    machine_info["cpu"] = {name: cpu[name] for name in ("brand_raw", "count") if name in cpu}
    machine_info |= machine.versions(device_of(config))


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
