"""The Python of docs/distributed.md runs on two processes, and the benchmark it names prints and saves its figures."""

import importlib.util
import json
import re

import pytest

from tests.support import DEVICES
from tests.torchrun import ROOT, needs_gpus, torchrun

SAMPLER = "## Batches without padding"


@pytest.fixture(scope="module", params=DEVICES)
def printed(request, tmp_path_factory):
    """What the page's script printed; without the section that needs Lhotse where that is not installed."""
    needs_gpus(request.param)
    page = (ROOT / "docs" / "distributed.md").read_text()
    if importlib.util.find_spec("lhotse") is None:
        before, _, after = page.partition(SAMPLER)
        page = before + after[after.index("\n## ") :]
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) in (7, 8)
    end = "from tests.torchrun import leave\nleave()\n"
    script = tmp_path_factory.mktemp("docs") / "train.py"
    script.write_text("\n".join([*blocks, end]).replace('backend="auto"', 'backend="reference"'))
    return torchrun(script, **({"CUDA_VISIBLE_DEVICES": ""} if request.param == "cpu" else {}))


def test_page_runs(printed):
    assert "out of memory" not in printed


def test_sampler_leaves_little_padding(printed):
    pytest.importorskip("lhotse")
    found = re.findall(r"epoch (\d): (\d+) batches, (\d+)% padding", printed)
    assert [epoch for epoch, _, _ in sorted(found)] == ["0", "0", "1", "1"]  # of two processes
    for epoch in "01":
        assert len({count for of, count, _ in found if of == epoch}) == 1, "processes have different numbers of batches"
    assert all(int(padding) < 25 for _, _, padding in found)


def test_scaling_benchmark(tmp_path):
    saved, one = tmp_path / "two.json", tmp_path / "one.json"
    sizes = "--batch 3 --frames 12 --labels 4 --classes 17 --features 16 --layers 1 --joint 8"
    baseline = {"processes": 1, "utterances_per_second": 1.0, "wrap": "ddp", "backend": "reference", "dtype": "fp32"}
    names = ("batch", "frames", "labels", "classes", "features", "layers", "joint")
    one.write_text(json.dumps(baseline | {"sizes": dict(zip(names, (3, 12, 4, 17, 16, 1, 8), strict=True))}))
    options = f"{sizes} --device cpu --backend reference --dtype fp32 --warmup 1 --steps 3".split()
    printed = torchrun("tests.benchmarks.scaling", *options, "--json", saved, "--baseline", one)
    assert printed.count("2 x 3 utterances, ddp, reference, fp32") == 1
    assert re.search(r"utterances/s, [\d.]+ ms a step .*, peak \d+ MiB; [\d.]+ times one process, efficiency", printed)
    found = json.loads(saved.read_text())
    assert found["processes"] == 2
    assert len(found["seconds"]) == 3
    assert found["utterances_per_second"] == pytest.approx(6 / found["median_seconds"])
    assert found["peak_bytes"] > 0
