"""Tests marked `gpu` are deselected where there is no CUDA GPU, so that no test needs to skip.

`place` is where a test runs (see support.py); each of its values carries its backend's name as a marker, so that
`pytest -m compiled` runs one backend.  `TRITON_INTERPRET=1 pytest -m triton` runs the Triton kernels on the CPU.
"""

import pytest
import torch

from rnnt.backends import NAMES
from tests import support


def pytest_configure(config: pytest.Config) -> None:
    for name in NAMES:
        config.addinivalue_line("markers", f"{name}: runs the backend of that name")
    # PyTorch and numpy warn of their own doings.
    for harmless in (
        "ignore:All-NaN slice encountered:RuntimeWarning",  # numpy, under Triton's interpreter
        "ignore:Synchronization debug mode is a prototype:UserWarning",
        "ignore:TensorFloat32 tensor cores for float32 matrix multiplication:UserWarning",
        "ignore:.torch.jit.script_method. is deprecated:DeprecationWarning",
        "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",
    ):
        config.addinivalue_line("filterwarnings", harmless)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("gpu")])
    items[:] = [item for item in items if not item.get_closest_marker("gpu")]


@pytest.fixture(params=support.places())
def place(request: pytest.FixtureRequest) -> support.Place:
    return request.param
