"""Training steps of RNNTJointLoss on two processes, under DDP and FSDP2, against one process with all of the batch.

The processes are started by torchrun, once for each device, and run every backend and wrapper (sharded_steps.py).
"""

import functools
from pathlib import Path

import pytest
import torch
from torch.torch_version import TorchVersion

from tests.sharded_steps import WRAPPERS, alone
from tests.support import Budget, assert_budget, budget_from, places
from tests.torchrun import needs_gpus, torchrun

RANKS = 2
at_places = pytest.mark.parametrize("place", [param for param in places() if not param.values[0].interpreted])


def launch(device: str, out: Path) -> list[dict]:
    """What each rank found, by backend and wrapper."""
    needs_gpus(device, RANKS)
    backends = [place.backend for (place,), _, _ in places() if place.device == device and not place.interpreted]
    torchrun("tests.sharded_steps", out, device, ",".join(backends), ranks=RANKS)
    return [torch.load(out / f"{rank}.pt", map_location="cpu") for rank in range(RANKS)]


@pytest.fixture(scope="module")
def ranks_cpu(tmp_path_factory):
    return launch("cpu", tmp_path_factory.mktemp("cpu"))


@pytest.fixture(scope="module")
def ranks_cuda(tmp_path_factory):
    return launch("cuda", tmp_path_factory.mktemp("cuda"))


@pytest.fixture
def ranks(place, request):
    return request.getfixturevalue(f"ranks_{place.device}")


@functools.cache
def budgets(device: str, dtype: torch.dtype) -> dict[str, Budget]:
    """dtype: of the parameters in use; float64 has no truth above it, see support.budget_of."""
    if dtype == torch.bfloat16:
        truth = alone(RANKS, device, torch.float64, torch.bfloat16)
        eager = alone(RANKS, device, torch.float32, torch.bfloat16)
    else:
        truth = alone(RANKS, device, torch.float64, None)
        eager = alone(RANKS, device, torch.float32, None)
    made = {}
    for step in truth:
        here = [{name: x.cpu() for name, x in found[step].items()} for found in (eager, truth)]
        made[step] = budget_from(*here, dtype)
        if dtype == torch.float64:
            ratio = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
            made[step] = made[step]._replace(eager={name: x * ratio for name, x in made[step].eager.items()})
    return made


@pytest.mark.parametrize("wrapper", WRAPPERS)
@at_places
def test_steps_equal_those_of_one_process(ranks, place, wrapper):
    if place.device == "cpu" and wrapper == "fsdp-bf16" and torch.__version__ < TorchVersion("2.11"):
        pytest.skip("PyTorch issue 162338: gloo adds up gradients that FSDP2 wants averaged (2.8 does, 2.11 does not)")
    ranks = [found[place.backend, wrapper] for found in ranks]
    finest = torch.float32 if place.device == "cuda" else torch.float64
    for step, budget in budgets(place.device, torch.bfloat16 if wrapper == "fsdp-bf16" else finest).items():
        gradients = {name: x for name, x in ranks[0][step].items() if name != "loss"}
        assert len(gradients) == 11
        for name, gradient in gradients.items():
            assert torch.equal(gradient, ranks[1][step][name]), f"{step} {name}: ranks differ"
            with pytest.raises(AssertionError, match=name):  # the check can fail
                assert_budget({name: gradient * (1 + 2**-4)}, budget)
        loss = sum(found[step]["loss"] for found in ranks) / RANKS
        assert_budget({"loss": loss, **gradients}, budget)


@at_places
def test_details_of_sharding(ranks, place):
    """A vocabulary of 1025 is split unevenly; decoding gathers the weights; a layer's own unit would not."""
    ranks = [found[place.backend, "details"] for found in ranks]
    assert [found["bias"] for found in ranks] == [513, 512]
    for found in ranks:
        assert torch.equal(found["scores"], found["expected scores"])
        assert found["error"].startswith("linear_weight: expected a plain tensor, got a distributed one (DTensor)")
