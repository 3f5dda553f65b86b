"""The example on two processes: the same run as on one, resumed on another number, and out of memory on one of them."""

import json
import math

import pytest
import torch

from examples.speech import checkpoint, data, ranks, train
from examples.speech.batches import Batch, share
from tests import example_ranks
from tests.example_ranks import END, STOP
from tests.support import DEVICES
from tests.test_example_train import tones
from tests.torchrun import needs_gpus, torchrun

RANKS = 2
# Relative differences of losses: float32 sums in another order; a GPU's convolutions round to TF32, in any order.
OTHER_ORDER = {"cpu": 1e-5, "cuda": 3e-2}
SAME_ORDER = {"cpu": 0.0, "cuda": 3e-2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tones(tmp_path_factory.mktemp("tones"))


@pytest.fixture(scope="module", params=DEVICES)
def device(request):
    needs_gpus(request.param, RANKS)
    return request.param


@pytest.fixture(scope="module")
def alone(folder, device, tmp_path_factory):
    """A run in one process, and the folder with its checkpoint of step STOP."""
    out = tmp_path_factory.mktemp("ranks")
    run = example_ranks.trainer(data.load("folder", [folder]), device)
    run.train(stop_at_step=STOP)
    checkpoint.write(run.state(), out / "one.pt")
    run.train(stop_at_step=END)
    return example_ranks.outcome(run), out


@pytest.fixture(scope="module")
def together(folder, device, alone):
    """What each process found, and what all of them printed."""
    _, out = alone
    printed = torchrun("tests.example_ranks", folder, out / "one.pt", out, device, ranks=RANKS)
    return [torch.load(out / f"{rank}.pt") for rank in range(RANKS)], printed


def test_processes_agree(together):
    first, *others = together[0]
    assert len(first) == 7
    for other in others:
        for name, found in first.items():
            assert found["losses"] == other[name]["losses"], name
            assert torch.equal(found["parameters"], other[name]["parameters"]), name


def test_two_processes_equal_one(alone, together, device):
    losses = together[0][0]["whole"]["losses"]
    assert len(losses) == END
    assert losses == pytest.approx(alone[0]["losses"], rel=OTHER_ORDER[device])


def test_from_one_process_to_two(alone, together, device):
    resumed = together[0][0]["resumed"]["losses"]
    assert resumed[:STOP] == alone[0]["losses"][:STOP]
    assert resumed[STOP:] == pytest.approx(alone[0]["losses"][STOP:], rel=OTHER_ORDER[device])


def test_from_two_processes_to_one(folder, alone, together, device):
    whole = together[0][0]["whole"]["losses"]
    saved = checkpoint.read(alone[1] / "two.pt")
    assert saved.keys() == checkpoint.read(alone[1] / "one.pt").keys()
    run = example_ranks.trainer(data.load("folder", [folder]), device, saved)
    run.train(stop_at_step=END)
    assert run.losses[:STOP] == whole[:STOP]
    assert run.losses[STOP:] == pytest.approx(whole[STOP:], rel=OTHER_ORDER[device])


def test_same_seed_same_run(together, device):
    found = together[0][0]
    assert found["dropout"]["losses"] == pytest.approx(found["dropout again"]["losses"], rel=SAME_ORDER[device])
    assert found["dropout"]["losses"] != found["whole"]["losses"][:STOP]


def test_out_of_memory_once_is_tried_again(together, device):
    """With smaller tiles, which the reference backend does not have: the same step."""
    found, printed = together
    retried, whole = found[0]["retried"], found[0]["whole"]
    assert retried["losses"] == pytest.approx(whole["losses"], rel=SAME_ORDER[device])
    assert retried["left_out"] == []
    message = f"step {STOP}: out of memory with 7 utterances of up to "
    assert sum(line.startswith(message) for line in printed.splitlines()) == 2  # one in each of two runs, of process 0


def test_out_of_memory_twice_leaves_the_batch_out(together, device):
    found, printed = together
    left_out, whole = found[0]["left out"], found[0]["whole"]
    assert left_out["left_out"] == [STOP]
    assert left_out["losses"][:STOP] == pytest.approx(whole["losses"][:STOP], rel=SAME_ORDER[device])
    assert left_out["losses"][STOP] != whole["losses"][STOP]
    assert len(left_out["losses"]) == END
    assert all(map(math.isfinite, left_out["losses"]))
    assert printed.splitlines().count(f"step {STOP}: out of memory again; leaving out this batch") == 1


def test_batches_that_never_fit_end_the_run(folder):
    run = example_ranks.trainer(data.load("folder", [folder]), "cpu")
    example_ranks.fail(run, 1000)
    with pytest.raises(torch.OutOfMemoryError, match="10 batches in a row"):
        run.train()
    assert run.step == STOP
    assert run.left_out == [STOP] * 10


def test_gradients_stay_views_of_one_vector(folder):
    run = example_ranks.trainer(data.load("folder", [folder]), "cpu")
    run.train(stop_at_step=2)
    assert all(p.grad.untyped_storage().data_ptr() == run.gradients.sums.data_ptr() for p in run.model.parameters())


def test_shares():
    """Every utterance in one share; shares may be empty; padding goes."""
    lengths, labels = torch.tensor([3, 5, 4]), torch.tensor([1, 0, 2])
    batch = Batch(torch.rand(3, 5, 2), lengths, torch.ones(3, 2, dtype=torch.int64), labels)
    for count in (1, 2, 3, 4):
        shares = [share(batch, rank, count) for rank in range(count)]
        assert sum(len(mine.features) for mine in shares) == 3
        assert sum(mine.characters for mine in shares) == batch.characters == 4  # no labels count as one
        assert all(torch.equal(mine.feature_lengths, lengths[rank::count]) for rank, mine in enumerate(shares))
    first, second = share(batch, 0, 2), share(batch, 1, 2)
    assert first.features.shape == (2, 4, 2)
    assert torch.equal(first.features[1], batch.features[2, :4])
    assert second.targets.shape == (1, 0)


def test_command_under_torchrun(folder, tmp_path, capsys):
    """Two processes print and write as one does, and one process goes on."""
    arguments = f"--data {folder} --backend reference --device cpu --batch 6 --evaluations 2"
    out = tmp_path / "two"
    printed = torchrun("examples.speech.train", *arguments.split(), "--epochs", "2", "--out", out, ranks=RANKS)
    lines = printed.splitlines()
    assert sum(line.startswith("folder: train ") for line in lines) == 1
    assert sum("on cpu x 2 processes" in line for line in lines) == 1
    assert sum(line.startswith("step ") and "CER" in line for line in lines) == 2
    assert sum(line.startswith("wrote ") for line in lines) == 1
    assert {path.name for path in out.iterdir()} == {"last.pt", "best.pt", "log.json", "report.png"}
    log = json.loads((out / "log.json").read_text())
    assert log["environment"]["processes"] == 2
    assert len(log["losses"]) == log["evaluations"][-1]["step"]

    resume = ["--data", str(folder), "--resume", str(out / "last.pt"), "--out", str(tmp_path), "--epochs", "3"]
    assert train.main(resume) == 0
    after = json.loads((tmp_path / "log.json").read_text())
    assert after["environment"]["processes"] == 1
    assert after["losses"][: len(log["losses"])] == log["losses"]
    assert len(after["losses"]) > len(log["losses"])


@pytest.mark.parametrize(
    ("device", "message"),
    [("cuda:1", "--device: expected cpu or cuda under torchrun, got 'cuda:1'"), ("cuda", "--nproc-per-node: expected")],
)
def test_devices_that_cannot_be_shared_out(device, message, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(torch.cuda.device_count() + 1))
    with pytest.raises(ValueError, match=message):
        ranks.join(device)
