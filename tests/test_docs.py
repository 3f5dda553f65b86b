"""The Python of the README and of the guides runs, their links lead somewhere, and their tables hold the right numbers.

docs/huggingface.md and docs/distributed.md are run by test_contrib_transformers_training.py and by
test_docs_distributed.py.  The numbers are those of two utterances whose losses and gradients come from the enumeration
of all their paths (oracle.py); each toolkit's reduction is a formula of these, in float64.
"""

import re
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import rnnt
from tests import oracle
from tests.fixtures import P, s_p
from tests.torchrun import ROOT

PAGES = {
    "README.md": [],
    "docs/pytorch.md": [],
    "docs/nemo.md": [],
    "docs/lightning.md": [pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")],  # Lightning's own
}
ELSEWHERE = {"docs/huggingface.md", "docs/distributed.md"}


def text(page: str) -> str:
    return (ROOT / page).read_text()


def blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", text(page), re.MULTILINE | re.DOTALL)


def run(page: str) -> dict[str, Any]:
    """The names that the page's blocks leave, run one after the other."""
    torch.manual_seed(0)
    names: dict[str, Any] = {"__name__": "guide"}
    for block in blocks(page):
        if page == "README.md":  # which names no backend, as its readers should not
            block = block.replace("predictor_features=320)", 'predictor_features=320, backend="reference")')
            assert 'backend="reference"' in block
        exec(compile(block, page, "exec"), names)
    return names


@pytest.mark.parametrize("page", [pytest.param(page, marks=marks, id=page) for page, marks in PAGES.items()])
def test_page_runs(page, tmp_path, monkeypatch, capsys):
    if page == "docs/lightning.md":
        pytest.importorskip("lightning")
    monkeypatch.chdir(tmp_path)
    names = run(page)
    if page == "README.md":
        assert names["scores"].shape == (4, 500)
        assert names["joint"].output.weight.grad.abs().sum() > 0
    if page == "docs/lightning.md":
        assert names["trainer"].global_step == 2
        assert names["trainer"].callback_metrics["loss"].dtype == torch.float32
        assert not list(tmp_path.iterdir())
    if page == "docs/pytorch.md":
        assert capsys.readouterr().out.count("tiles of") == 2
        assert list(names["recognise"](names["model"], [names["frames"][0]])), "decoded nothing"


def test_every_page_is_run_and_linked():
    pages = {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")}
    with_code = {page for page in pages if blocks(page)}
    assert with_code == (PAGES.keys() - {"README.md"}) | ELSEWHERE
    for page in pages:
        assert f"]({page})" in text("README.md"), f"README.md does not name {page}"


@pytest.mark.parametrize("page", [*PAGES, *sorted(ELSEWHERE), "docs/kernels.md", "CONTRIBUTING.md"])
def test_links(page):
    prose = re.sub(r"```.*?```|`[^`]*`", "", text(page), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        path = (ROOT / page).parent / name if name else ROOT / page
        assert path.exists(), f"{page}: {target}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
            anchors = {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings}
            assert anchor in anchors, f"{page}: {target}"


# Reductions

LOGITS = s_p().numpy()
TARGETS, FRAMES, LABELS = (x.numpy() for x in P)
B, T, U, V = 2, 4, 3, 5

# What an utterance's loss is multiplied with before the sum, in each toolkit's words.
ONES = np.ones(B)
WEIGHTS = {
    "losses": ONES,
    "sum": ONES,
    "sum / B": ONES / B,
    "mean over utterances of loss / max(U, 1)": 1 / LABELS / B,
    "sum of losses / sum of max(U, 1)": ONES / LABELS.sum(),
}
WEIGHTS |= {  # in other words
    "losses [B]": WEIGHTS["losses"],
    "sum of losses": WEIGHTS["sum"],
    "L": WEIGHTS["losses"],
    "sum of L": WEIGHTS["sum"],
    "sum of L / B": WEIGHTS["sum / B"],
    "sum of (L / U) / B": WEIGHTS["mean over utterances of loss / max(U, 1)"],
    "sum of L / sum of U": WEIGHTS["sum of losses / sum of max(U, 1)"],
}


def rows(page: str, heading: str) -> list[list[str]]:
    """Cells of the first table below a heading, without its first two lines."""
    found = []
    for line in text(page).partition(f"\n## {heading}\n")[2].splitlines():
        if line.startswith("|"):
            found.append([cell.strip().replace("`", "") for cell in line.strip("|").split("|")])
        elif found:
            break
    return found[2:]


def truth() -> tuple[np.ndarray, np.ndarray]:
    return oracle.loss_of_logits(LOGITS, TARGETS, FRAMES, LABELS, blank=0)


def check_reduction(reduction: str, formula: str, printed: str | None = None) -> None:
    """Value, gradient and the number that a page prints, against the formula of the enumeration's losses."""
    losses, gradients = truth()
    weights = WEIGHTS[formula]
    expected = losses if formula in ("losses", "losses [B]", "L") else weights @ losses
    logits = torch.tensor(LOGITS, requires_grad=True)
    found = rnnt.rnnt_loss(logits, *P, blank=0, reduction=reduction.strip('"'), backend="reference")
    found.sum().backward()
    np.testing.assert_allclose(found.detach().numpy(), expected, rtol=1e-12)
    np.testing.assert_allclose(logits.grad.numpy(), weights[:, None, None, None] * gradients, rtol=1e-10, atol=1e-14)
    if printed is not None:
        np.testing.assert_allclose([float(x) for x in printed.split(",")], expected, rtol=0, atol=5.1e-9)


@pytest.mark.parametrize(
    "wrong",
    [("mean", "sum of (L / U) / B"), ("mean_target", "sum / B"), ("sum", "sum of losses", "14.13053685")],
    ids=["mean", "mean_target", "printed"],
)
def test_checks_can_fail(wrong):
    with pytest.raises(AssertionError):
        check_reduction(*wrong)


def test_losses_of_the_example():
    losses, _ = truth()
    for page in ("README.md", "docs/nemo.md"):
        words = " ".join(text(page).split())
        assert "two utterances with losses {:.8f} and {:.8f}".format(*losses) in words


def test_reductions_of_the_readme():
    table = rows("README.md", "Reductions, and moving over")
    assert [row[0] for row in table] == [f'"{name}"' for name in ("none", "sum", "mean", "mean_target", "mean_volume")]
    for reduction, formula, printed, _ in table:
        check_reduction(reduction, formula, printed)


def test_reductions_of_nemo():
    table = rows("docs/nemo.md", "Reductions")
    assert [row[0].split()[0] for row in table] == ["mean_batch", "mean", "mean_volume", "sum", "None"]
    for _, formula, reduction, printed in table:
        check_reduction(reduction, formula, printed)


def test_reductions_of_other_toolkits():
    table = rows("docs/pytorch.md", "Coming from another loss")
    assert len(table) == 8
    for toolkit, default, here, *_ in table:
        formula, reduction = default.partition(": ")[2], here.removeprefix("reduction=")
        assert formula, toolkit
        check_reduction(reduction, formula)


def test_average_over_frames():
    """SpeechBrain's and warp-rnnt's, in the words of docs/pytorch.md."""
    losses, frame_lengths = torch.tensor(truth()[0]), P[1]
    page = " ".join(text("docs/pytorch.md").split())
    formula, printed = re.search(
        r"is `(\(losses / frame_lengths\)\.mean\(\))`, ([\d.]+) for the two utterances", page
    ).groups()
    value = eval(formula, {"losses": losses, "frame_lengths": frame_lengths})
    assert value.item() == pytest.approx(float(printed), abs=5.1e-9)


def test_scores_may_be_normalised_twice():
    """The claim of the tables: the same loss and the same gradient at the logits."""
    losses, gradients = truth()
    logits = torch.tensor(LOGITS, requires_grad=True)
    integers = (x.int() for x in P)
    found = rnnt.rnnt_loss(logits.log_softmax(-1), *integers, blank=0, reduction="none", backend="reference")
    found.sum().backward()
    np.testing.assert_allclose(found.detach().numpy(), losses, rtol=1e-12)
    np.testing.assert_allclose(logits.grad.numpy(), gradients, rtol=1e-10, atol=1e-14)


# The joint of docs/nemo.md


def test_nemo_joint_against_enumeration():
    """Losses of the guide's function with every activation, and a blank that is the last class."""
    names = run("docs/nemo.md")
    for activation in (torch.nn.ReLU(), torch.nn.Tanh(), torch.nn.Sigmoid()):
        joint = names["Joint"](num_classes=V - 1, encoder_hidden=6, pred_hidden=5, joint_hidden=7).double()
        joint.joint_net[0] = activation
        f, g = torch.randn(B, T, 6).double(), torch.randn(B, U + 1, 5).double()
        targets = TARGETS % (V - 1)
        scores = joint.joint(f, g).detach().numpy()
        expected, _ = oracle.loss_of_logits(scores, targets, FRAMES, LABELS, blank=V - 1)
        batch = (f, g, *(torch.tensor(x) for x in (targets, FRAMES, LABELS)))
        for loss in (names["fused_loss"](joint, *batch, reduction="none"), names["sub_batched_loss"](joint, *batch, 1)):
            np.testing.assert_allclose(loss.detach().numpy(), expected, rtol=1e-12)


def test_nemo_joint_without_dropout_layer_and_in_evaluation():
    names = run("docs/nemo.md")
    joint, batch = names["Joint"](num_classes=64, dropout=0.5), names["batch"]
    dropped = names["fused_loss"](joint, *batch)
    plain = names["fused_loss"](joint.eval(), *batch)
    assert dropped != plain
    joint.joint_net = torch.nn.Sequential(joint.joint_net[0], joint.joint_net[2])
    assert names["fused_loss"](joint.train(), *batch) == plain


RANKS = 2


def nemo_batch(rank: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(rank)
    frame_lengths, target_lengths = torch.tensor([9, 6 + rank]), torch.tensor([3 - rank, 2])
    frames = torch.randn(2, 9, 16, generator=generator)
    return frames, frame_lengths, torch.randint(64, (2, 3), generator=generator), target_lengths


def nemo_model() -> torch.nn.Module:
    names = run("docs/nemo.md")
    torch.manual_seed(0)
    return names["Model"]().eval()  # no dropout


def nemo_process(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS, timeout=timedelta(seconds=120)
    )
    model = DistributedDataParallel(nemo_model())
    model(*nemo_batch(rank)).backward()
    torch.save({name: x.grad for name, x in model.module.named_parameters()}, f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


def test_nemo_joint_on_two_processes(tmp_path):
    """Every parameter's gradient is the same bits on both, and the mean of what each batch gives alone."""
    torch.multiprocessing.spawn(nemo_process, (str(tmp_path),), RANKS)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(RANKS))
    model = nemo_model()
    for rank in range(RANKS):
        (model(*nemo_batch(rank)) / RANKS).backward()
    for name, parameter in model.named_parameters():
        assert torch.equal(first[name], second[name]), f"{name}: ranks differ"
        torch.testing.assert_close(first[name], parameter.grad, rtol=1e-5, atol=1e-7)
