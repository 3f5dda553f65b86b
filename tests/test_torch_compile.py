"""torch.compile: whole graphs of the public functions, registered operators, and how often a tile is compiled."""

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import set_checkpoint_debug_enabled

import rnnt
from rnnt.compiled import loss, tiles
from tests.fixtures import P, j_p, s_p
from tests.support import (
    DEVICES,
    assert_budget,
    assert_same_bits,
    budget_of,
    joint_budget,
    joint_loss,
    logits_budget,
    logits_results,
    places,
    ragged,
    results,
    upstream_of,
    with_gradients,
)

# aot_eager traces forward and backward as any compiler behind it would, and then runs the graph in eager mode.
FULL = {"fullgraph": True, "backend": "aot_eager"}


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()


@pytest.fixture(params=[param for param in places() if not param.values[0].interpreted])
def graph_place(request):
    """A place whose functions a graph can hold; Triton's interpreter is no such place."""
    return request.param


@pytest.mark.parametrize("validate", [True, False], ids=["validated", "unvalidated"])
@pytest.mark.parametrize("options", [{}, {"clamp": 0.1, "fastemit_lambda": 0.2}], ids=["plain", "clamp-fastemit"])
def test_joint_loss_as_one_graph(graph_place, options, validate):
    batch = ragged(4, 5, 3, 5, 6).cast(graph_place.finest, graph_place.device)
    upstream = upstream_of(batch)
    expected = joint_budget(batch, upstream, **options)
    leaves = with_gradients(batch)
    call = torch.compile(joint_loss, **FULL)
    loss = call(leaves, reduction="none", backend=graph_place.backend, validate=validate, tile_rows=7, **options)
    loss.backward(upstream.to(loss))
    found = {f"d_{name}": x.grad for name, x in leaves.floats().items()}
    assert_budget({"loss": loss.detach(), **found}, expected)


def test_logits_loss_as_one_graph(graph_place):
    logits = s_p().to(graph_place.device, graph_place.finest)
    args = [x.to(graph_place.device) for x in P]
    leaf = logits.clone().requires_grad_()
    loss = torch.compile(rnnt.rnnt_loss, **FULL)(leaf, *args, 0, reduction="none", backend=graph_place.backend)
    loss.sum().backward()
    assert_budget({"loss": loss.detach(), "d_logits": leaf.grad}, logits_budget(logits, *P, blank=0))


def test_planes_and_their_loss_as_one_graph(graph_place):
    batch = j_p().cast(graph_place.finest, graph_place.device)

    def loss_by_planes(batch, backend):
        encoder, predictor, weight, bias, *integers = batch  # slices of a named tuple fail in Dynamo 2.8
        planes = rnnt.joint_log_probs(encoder, predictor, weight, *integers, linear_bias=bias, blank=0, backend=backend)
        return rnnt.rnnt_loss_from_log_probs(*planes, *integers[1:], reduction="none", backend=backend)

    def run(batch, function=loss_by_planes, backend="reference"):
        leaves = with_gradients(batch)
        loss = function(leaves, backend)
        loss.sum().backward()
        return {"loss": loss.detach(), **{f"d_{name}": x.grad for name, x in leaves.floats().items()}}

    found = run(batch, torch.compile(loss_by_planes, **FULL), graph_place.backend)
    assert_budget(found, budget_of(batch, run))


def test_a_loss_amid_a_compiled_step(graph_place):
    """As users compile: the loss is one term of a larger function."""
    place = graph_place
    batch = j_p().cast(place.finest, place.device)

    def step(batch, backend):
        return 2 * joint_loss(batch, reduction="sum", blank=0, backend=backend, tile_rows=7) + batch.encoder.sum()

    leaves = with_gradients(batch)
    loss = torch.compile(step, backend="aot_eager")(leaves, place.backend)
    loss.backward()

    def run(batch):
        found = results(batch, backend="reference", blank=0)
        return {"sum": 2 * found["loss"].sum() + batch.encoder.sum(), "d_encoder": 2 * found["d_encoder"] + 1}

    assert_budget({"sum": loss.detach(), "d_encoder": leaves.encoder.grad}, budget_of(batch, run))


def test_graphs_check_values(graph_place):
    """The checks of lengths and labels are part of the graph."""
    batch = j_p().cast(graph_place.finest, graph_place.device)
    batch = batch._replace(encoder_lengths=torch.tensor([7, 2])).on(graph_place.device)
    call = torch.compile(joint_loss, **FULL)
    with pytest.raises(ValueError, match=r"encoder_lengths\[0\]: expected a length in \[1, 4\] \(T = 4\), got 7"):
        call(batch, reduction="sum", blank=0, backend=graph_place.backend)
    logits = s_p().to(graph_place.device, graph_place.finest)
    lengths = [batch.encoder_lengths, batch.target_lengths]
    with pytest.raises(ValueError, match=r"^logit_lengths\[0\]: "):
        torch.compile(rnnt.rnnt_loss, **FULL)(logits, batch.targets, *lengths, 0, backend=graph_place.backend)


@pytest.mark.parametrize("option", ["fastemit_lambda", "clamp", "occupancy_threshold"])
def test_a_number_that_changes(graph_place, option):
    """The second value of a float is a symbol of the graph."""
    batch = j_p().cast(graph_place.finest, graph_place.device)
    call = torch.compile(joint_loss, **FULL)
    for value in (0.1, 0.2, 0.3):
        options = {"reduction": "sum", "blank": 0, "backend": graph_place.backend, option: value}
        torch.testing.assert_close(call(batch, **options), joint_loss(batch, **options))


def test_graphs_of_any_size(graph_place):
    logits = s_p().to(graph_place.device, graph_place.finest)
    args = [x.to(graph_place.device) for x in P]
    call = torch.compile(rnnt.rnnt_loss, **{**FULL, "dynamic": True})
    found = call(logits, *args, 0, backend=graph_place.backend)
    torch.testing.assert_close(found, rnnt.rnnt_loss(logits, *args, 0, backend=graph_place.backend))


@pytest.mark.compiled
def test_graphs_with_a_tile_beyond_the_lattice():
    """However large, it is no reason for a graph of its own."""
    call = torch.compile(joint_loss, **FULL)
    before = counters["stats"]["unique_graphs"]
    for i in range(10):
        batch = ragged(2 + i % 3, 4 + i, 2 + i % 5, 5, 6)
        call(batch, blank=0, backend="compiled", tile_rows=2**17 + 1)
    assert 0 < counters["stats"]["unique_graphs"] - before < 8


def test_graphs_refuse_a_second_derivative(graph_place):
    leaves = with_gradients(j_p().cast(graph_place.finest, graph_place.device))
    loss = torch.compile(joint_loss, **FULL)(leaves, reduction="sum", blank=0, backend=graph_place.backend)
    (gradient,) = torch.autograd.grad(loss, leaves.encoder, create_graph=True)
    with pytest.raises(RuntimeError, match=r"double backward|does not require grad"):  # by version of torch
        gradient.pow(2).sum().backward()


@pytest.mark.parametrize("tile_rows", [7, None])
def test_a_retained_graph(graph_place, tile_rows):
    leaves = with_gradients(j_p().cast(graph_place.finest, graph_place.device))
    options = {"reduction": "sum", "blank": 0, "backend": graph_place.backend, "tile_rows": tile_rows}
    loss = torch.compile(joint_loss, **FULL)(leaves, **options)
    first, second = (torch.autograd.grad(loss, list(leaves.floats().values()), retain_graph=True) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


def test_modules_as_one_graph(graph_place):
    torch.manual_seed(0)
    module = rnnt.RNNTJointLoss(6, 5, encoder_features=9, blank=0, backend=graph_place.backend).to(graph_place.device)
    batch = j_p().cast(torch.float32, graph_place.device).on(graph_place.device)
    encoder = torch.randn(2, 4, 9, device=graph_place.device)
    loss = torch.compile(module, **FULL)(encoder, batch.predictor, *batch[4:])
    expected = module(encoder, batch.predictor, *batch[4:])
    assert abs(loss - expected) <= 8 * torch.finfo(torch.float32).eps * expected


class Recorder(TorchDispatchMode):
    """The calls of the package's operators, as they arrive below autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, tuple] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "rnnt":
            self.calls.setdefault(str(function), (function, args, kwargs or {}))
        return function(*args, **(kwargs or {}))


def test_operators(place):
    """Each registered operator that the backend calls: schema, autograd registration, fake, traced forward and back."""
    batch = j_p().cast(torch.float32, place.device)
    logits = s_p().to(place.device, torch.float32)
    args = [x.to(place.device) for x in P]
    with Recorder() as recorder:
        for tile_rows in (7, None):
            results(batch, blank=0, backend=place.backend, tile_rows=tile_rows)
        leaves = with_gradients(batch)
        options = {"linear_bias": leaves.linear_bias, "blank": 0, "backend": place.backend}
        planes = rnnt.joint_log_probs(*leaves[:3], *leaves[4:], **options)
        loss = rnnt.rnnt_loss_from_log_probs(*planes, *leaves[5:], reduction="sum", backend=place.backend)
        loss.backward()
        leaf = logits.requires_grad_()
        rnnt.rnnt_loss(leaf, *args, blank=0, reduction="sum", backend=place.backend).backward()
    expected = {name for name in registered() if name.startswith(f"rnnt.{place.backend}_")}
    assert {name.removesuffix(".default") for name in recorder.calls} == expected
    for function, call_args, kwargs in recorder.calls.values():
        differentiable = not any(name in str(function) for name in ("_bwd", "_backward"))
        call_args = [
            x.detach().clone().requires_grad_(differentiable)
            if isinstance(x, torch.Tensor) and x.is_floating_point()
            else x
            for x in call_args
        ]
        torch.library.opcheck(function, tuple(call_args), kwargs)


def registered() -> list[str]:
    names = torch._C._dispatch_get_all_op_names()
    return [name.replace("::", ".") for name in names if name.startswith("rnnt::")]


def test_check_values_operator():
    args = (P[0], P[1], P[2], 4, 5, 0)
    torch.library.opcheck(torch.ops.rnnt.check_values, args)
    torch.library.opcheck(torch.ops.rnnt.check_values, (*args[:4], None, 0))
    lengths = torch.ops.rnnt.check_values(*args)
    assert lengths.tolist() == [[4, 2], [3, 1]]
    with pytest.raises(ValueError, match="expected a length"):
        torch.ops.rnnt.check_values(P[0], torch.tensor([5, 2]), P[2], 4, 5, 0)


def compilations() -> int:
    return counters["stats"]["unique_graphs"]


@pytest.mark.compiled
@pytest.mark.parametrize("tile_rows", [16, "auto"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_forty_shapes_compile_a_few_times(device, tile_rows):
    """Distinct B, T and U at each call, among them single frames and no labels, and ragged last tiles."""
    counters.clear()
    generator = torch.Generator().manual_seed(0)
    sizes = [(1, 1, 0), (1, 1, 3), (2, 1, 0), (1, 30, 0)]
    while len(set(sizes)) < 40:
        sizes.append(tuple(int(torch.randint(low, 9, (1,), generator=generator)) for low in (1, 1, 0)))
    for B, T, U in sorted(set(sizes)):
        results(ragged(B, T, U, 7, 12).cast(torch.float32, device), backend="compiled", tile_rows=tile_rows)
    assert 1 <= compilations() <= 4
    frames = counters["frames"]
    assert frames["total"] == frames["ok"]
    assert not Counter(counters["recompile_limit"])


@pytest.mark.compiled
@pytest.mark.parametrize("device", DEVICES)
def test_constants_tell_the_graphs_of_tiles_apart(device, monkeypatch):
    """Calls check next to nothing of what a tile was compiled for, so its constants must fix it: with all checks, none
    finds a difference."""
    monkeypatch.setattr(tiles, "OPTIONS", {k: v for k, v in tiles.OPTIONS.items() if k != "guard_filter_fn"})
    monkeypatch.setattr(loss, "IndexSums", loss.GatherSums)  # what a GPU does
    tiles.graph.cache_clear()
    options = {"backend": "compiled", "blank": 0, "tile_rows": 16}
    variants = [
        (torch.float32, {}),
        (torch.bfloat16, {"dropout_p": 0.3}),
        (torch.bfloat16, {"tile_rows": None, "clamp": 0.1}),
    ]
    try:
        with torch._dynamo.config.patch(error_on_recompile=True):
            for dtype, variant in variants:
                for sizes in [(3, 5, 4), (1, 1, 0), (2, 7, 3)]:
                    batch = ragged(*sizes, 7, 12, blank=0).cast(dtype, device)
                    results(batch, **options | variant)
                    strided = batch._replace(encoder=batch.encoder.repeat(1, 1, 2)[:, :, ::2])
                    results(strided, validate=False, **options | variant)
                    frozen = with_gradients(batch)._replace(encoder=batch.encoder)
                    joint_loss(frozen, reduction="sum", **options | variant).backward()
            logits = torch.randn(7, 2, 4, 3, device=device).permute(1, 2, 3, 0)
            for scores in (logits, logits.contiguous()):
                logits_results(
                    scores,
                    torch.ones(2, 2, dtype=torch.int64),
                    *(torch.full((2,), n) for n in (4, 2)),
                    backend="compiled",
                )
    finally:
        tiles.graph.cache_clear()


@pytest.mark.compiled
@pytest.mark.parametrize("device", DEVICES)
def test_compiles_while_a_caller_debugs(device):
    batch = j_p().cast(torch.float32, device)
    right = results(batch, backend="compiled", blank=0)
    torch._dynamo.reset()
    with torch.autograd.set_detect_anomaly(True), set_checkpoint_debug_enabled(True):
        found = results(batch, backend="compiled", blank=0)
    assert_same_bits(found, right)


@pytest.mark.compiled
def test_recompilations_would_be_counted():
    """The check above can fail: a function that is compiled anew for each size passes the bound."""
    counters.clear()
    call = torch.compile(lambda x: x.sin().sum(), backend="eager", dynamic=False)
    for n in range(1, 7):
        call(torch.ones(n))
    assert compilations() == 6


@pytest.mark.compiled
def test_any_number_of_threads():
    """torch.compile compiles anew for another number, up to a limit of a code object's."""
    sizes = torch.tensor([3, 2]), torch.tensor([2, 1])
    planes = torch.zeros(2, 3, 3), torch.zeros(2, 3, 2)
    before = torch.get_num_threads()
    try:
        for threads in range(1, torch._dynamo.config.recompile_limit + 3):
            torch.set_num_threads(threads)
            rnnt.rnnt_loss_from_log_probs(*planes, *sizes, backend="compiled")
    finally:
        torch.set_num_threads(before)


@pytest.mark.compiled
def test_threads_that_begin_together():
    """Each would compile the graph for itself, and their number is limited likewise."""
    tiles.graph.cache_clear()
    batch = ragged(2, 3, 2, 11, 9).cast(torch.float32)
    number = torch._dynamo.config.recompile_limit + 8
    together = threading.Barrier(number)

    def step(_: int) -> dict[str, torch.Tensor]:
        together.wait()
        return results(batch, backend="compiled", tile_rows=5)

    with ThreadPoolExecutor(number) as pool:
        first, *others = pool.map(step, range(number))
    for other in others:
        assert_same_bits(other, first)
