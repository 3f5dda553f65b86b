"""What importing and choosing a backend needs: no Triton, no compiler; and the imports among the backends."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import rnnt
from rnnt.backends import NAMES, unavailable
from tests.fixtures import j_p
from tests.support import joint_loss

ROOT = Path(rnnt.__file__).parent

J_P = """
from tests.fixtures import j_p
batch = j_p()
call = dict(batch._asdict(), blank=0, reduction="none")
"""


def run(code: str, **environment: str) -> dict:
    """Run code in a new interpreter; what it leaves in `found` comes back."""
    code = f"import json, sys\nfound = {{}}\n{code}\nprint(json.dumps(found))"
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("RNNT_", "TRITON_"))}
    environment = {**inherited, "PYTHONPATH": str(ROOT.parent), **environment}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


LOADED = """
import torch
loaded = lambda: sorted(x for x in sys.modules if x.split(".")[0] == "triton" or x == "rnnt.triton")
before = loaded()
{statement}
found["new"] = sorted(set(loaded()) - set(before))
"""


def test_import_does_not_import_triton():
    assert run(LOADED.format(statement="import rnnt")) == {"new": []}


def test_import_of_triton_would_be_seen():
    """The check above can fail: the backend brings Triton in, under both names."""
    found = run(LOADED.format(statement="from rnnt import triton"))["new"]
    assert "triton" in found
    assert "rnnt.triton" in found


def test_package_does_not_shadow_triton():
    """rnnt.triton is the backend; the name `triton` inside it is the compiler."""
    found = run("import rnnt\nfrom rnnt.triton import lattice\nfound['name'] = lattice.triton.__name__")
    assert found == {"name": "triton"}


def test_bare_machine():
    """Neither Triton nor a C++ compiler: import and the default backend work, with one warning, of one backend."""
    code = f"""
sys.modules["triton"] = None  # what import finds is then: not installed
import warnings
import rnnt
{J_P}
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    found["loss"] = [rnnt.joint_rnnt_loss(**call).tolist() for _ in range(2)][1]
    found["warnings"] = [str(x.message) for x in caught]
    found["where"] = [x.filename for x in caught]
found["backends"] = rnnt.backends()
for name in ("triton", "compiled"):
    try:
        rnnt.joint_rnnt_loss(**call, backend=name)
    except Exception as error:
        found[name] = [type(error).__name__, str(error)]
"""
    found = run(code, PATH="", CXX="", CUDA_VISIBLE_DEVICES="")
    assert found["loss"] == pytest.approx([11.23853980, 8.04707650], rel=0, abs=5.1e-9)
    assert len(found["warnings"]) == 1
    assert "backend='auto' takes the slow reference backend" in found["warnings"][0]
    assert "C++ compiler" in found["warnings"][0]
    assert found["where"] == ["<string>"]  # the caller's line
    assert found["backends"]["reference"] is None
    assert "C++ compiler" in found["backends"]["compiled"]
    assert "pip install triton" in found["backends"]["triton"]
    assert found["triton"][0] == "ImportError"
    assert "pip install triton" in found["triton"][1]
    assert found["compiled"][0] == "ValueError"
    assert "C++ compiler" in found["compiled"][1]


def test_triton_on_the_cpu():
    """Named for CPU tensors, Triton is refused, not replaced."""
    code = f"""
import rnnt
{J_P}
try:
    rnnt.joint_rnnt_loss(**call, backend="triton")
except ValueError as error:
    found["error"] = str(error)
"""
    found = run(code)
    assert found["error"].startswith(
        "backend: expected one that can take this call, got 'triton': it needs CUDA tensors"
    )


def test_auto_takes_the_best_usable(recwarn):
    """On a CPU the compiled backend where there is a compiler; it gives what it gives when named."""
    if unavailable("compiled", "cpu") is not None:
        pytest.skip("no C++ compiler: test_bare_machine covers this")
    batch = j_p()
    named = joint_loss(batch, blank=0, reduction="none", backend="compiled")
    assert torch.equal(joint_loss(batch, blank=0, reduction="none"), named)
    assert not [x for x in recwarn if "rnnt" in str(x.message)]


def test_backends_lists_all_with_reasons():
    found = rnnt.backends()
    assert list(found) == ["reference", "compiled", "triton"]
    assert found["reference"] is None
    for reason in found.values():
        assert reason is None or (reason.strip() and "\n" not in reason)


def imports_of(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


@pytest.mark.parametrize("backend", NAMES)
def test_backends_do_not_import_one_another(backend):
    others = [f"rnnt.{name}" for name in NAMES if name != backend]
    paths = list((ROOT / backend).glob("*.py"))
    assert paths
    for path in paths:
        for name in imports_of(path):
            assert not any(name == other or name.startswith(f"{other}.") for other in others), f"{path}: {name}"


def test_only_one_folder_imports_triton():
    importers = {path for path in ROOT.rglob("*.py") if {"triton"} & {x.split(".")[0] for x in imports_of(path)}}
    assert importers
    assert all(path.parent == ROOT / "triton" for path in importers)
