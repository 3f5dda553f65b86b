"""What only a GPU can show: more than 2^31 elements, and steps that never wait for the device."""

import contextlib
import math
import warnings

import pytest
import torch

import rnnt
from tests.fixtures import uniform_loss
from tests.support import assert_same_bits, joint_loss, on_gpu, ragged, results, with_gradients

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("backend", on_gpu("reference", "compiled", "triton"))
def test_logits_past_32_bits(backend):
    """33 x 256 x 64 x 4096 = 2.2e9 scores: the last utterance lies past the reach of a 32-bit index."""
    B, T, U, V = 33, 256, 63, 4096
    logits = torch.zeros(B, T, U + 1, V, dtype=torch.float16, device="cuda").requires_grad_()
    args = torch.ones(B, U, dtype=torch.int64), torch.full((B,), T), torch.full((B,), U)
    loss = rnnt.rnnt_loss(logits, *(x.cuda() for x in args), blank=-1, reduction="none", backend=backend)
    loss.sum().backward()
    assert uniform_loss(T, U, V) == pytest.approx(2497.95625870, rel=0, abs=5.1e-9)
    torch.testing.assert_close(loss.tolist(), [2497.95625870] * B, rtol=1e-6, atol=0)
    first = torch.full((V,), 1 / V, dtype=torch.float64)
    first[-1] -= (T - 1) / (T + U - 1)
    first[1] -= U / (T + U - 1)
    last = torch.full((V,), 1 / V, dtype=torch.float64)
    last[-1] -= 1
    for b in (0, 31, 32):
        torch.testing.assert_close(logits.grad[b, 0, 0].double().cpu(), first, rtol=2**-10, atol=0)
        torch.testing.assert_close(logits.grad[b, -1, -1].double().cpu(), last, rtol=2**-10, atol=0)


@pytest.mark.parametrize("padded", [False, True], ids=["packed", "padded"])
@pytest.mark.parametrize("backend", on_gpu("compiled", "triton"))
def test_joint_past_32_bits(backend, padded):
    """4.1e6 rows, 2.6e9 hidden and 4.2e9 scores; with weight 0 all scores are equal, and of the weight's gradient
    the last utterance alone is asked: its hidden states are tanh(1), all others' tanh(2)."""
    B, T, U, V, H = 32, 1000, 128, 1024, 640
    extra = 3 if padded else 0
    encoder = torch.full((B, T + extra, H), 2.0, dtype=torch.bfloat16, device="cuda")
    encoder[-1] = 1
    predictor = torch.zeros(B, U + 1 + extra, H, dtype=torch.bfloat16, device="cuda")
    if padded:
        encoder[:, T:], predictor[:, U + 1 :] = torch.nan, torch.nan
    weight, bias = (
        torch.zeros(shape, dtype=torch.bfloat16, device="cuda").requires_grad_() for shape in ((V, H), (V,))
    )
    args = torch.ones(B, U + extra, dtype=torch.int64), torch.full((B,), T), torch.full((B,), U)
    loss = rnnt.joint_rnnt_loss(
        encoder, predictor, weight, *(x.cuda() for x in args), linear_bias=bias, blank=0, reduction="none",
        backend=backend, occupancy_threshold=0,
    )  # fmt: skip
    assert uniform_loss(T, U, V) == pytest.approx(7423.10997136, rel=0, abs=5.1e-9)
    torch.testing.assert_close(loss.tolist(), [7423.10997136] * B, rtol=1e-6, atol=0)
    loss[-1].backward()
    expected = torch.full((V,), (T + U) / V, dtype=torch.float64)
    expected[0] -= T
    expected[1] -= U
    torch.testing.assert_close(bias.grad.double().cpu(), expected, rtol=2**-7, atol=0)
    columns = weight.grad.double().cpu() / math.tanh(1)
    torch.testing.assert_close(columns, expected[:, None].expand(V, H), rtol=2**-6, atol=0)


@contextlib.contextmanager
def waits_counted(monkeypatch):
    """A list of what waited for the device: operations that PyTorch knows to, and waits for an event or a stream."""
    found = []
    with monkeypatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        for waiter in (torch.cuda.Event, torch.cuda.Stream):

            def wait(self, call=waiter.synchronize, name=waiter.__name__):
                found.append(name)
                return call(self)

            patch.setattr(waiter, "synchronize", wait)
        warnings.simplefilter("always")
        try:
            torch.cuda.set_sync_debug_mode("warn")
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")
    operations = [x for x in caught if "called a synchronizing CUDA operation" in str(x.message)]
    found += [f"{x.filename}:{x.lineno}" for x in operations]


@pytest.mark.parametrize("backend", on_gpu("reference", "compiled", "triton"))
@pytest.mark.parametrize("tile_rows", [256, None])
def test_no_step_waits_for_the_device(backend, tile_rows, monkeypatch):
    """validate=False and lengths on the device: forward and backward read nothing back."""
    batch = ragged(3, 40, 10, 37, 24).cast(torch.float32, "cuda").on("cuda")
    logits = torch.randn(3, 40, 11, 37, device="cuda").requires_grad_()
    options = {"validate": False, "backend": backend, "reduction": "mean_volume"}

    def steps():
        leaves = with_gradients(batch)
        joint_loss(leaves, tile_rows=tile_rows, dropout_p=0.1, **options).backward()
        rnnt.rnnt_loss(logits, *batch[4:], **options).backward()
        planes = rnnt.joint_log_probs(*leaves[:3], *batch[4:], validate=False, backend=backend, tile_rows=tile_rows)
        rnnt.rnnt_loss_from_log_probs(*planes, *batch[5:], **options).backward()

    steps()
    torch.cuda.synchronize()
    with waits_counted(monkeypatch) as found:
        steps()
    assert found == []


def test_waiting_would_be_seen(monkeypatch):
    """The check above can fail: a value that is read, and a wait for an event."""
    x = torch.ones(3, device="cuda")
    with waits_counted(monkeypatch) as found:
        float(x.sum())
        event = torch.cuda.Event()
        event.record()
        event.synchronize()
    assert len(found) == 2


@pytest.mark.parametrize(("integers", "waits"), [("cuda", 1), ("cpu", 0)])
def test_validated_step_waits_once(integers, waits, monkeypatch):
    """Lengths and labels are read together, and nothing else is; from the CPU they are read without waiting."""
    batch = ragged(3, 40, 10, 37, 24).cast(torch.float32, "cuda")
    names = "targets", "encoder_lengths", "target_lengths"
    batch = batch._replace(**{name: getattr(batch, name).to(integers) for name in names})

    def step():
        joint_loss(with_gradients(batch), backend="triton").backward()

    step()
    torch.cuda.synchronize()
    with waits_counted(monkeypatch) as found:
        step()
    assert len(found) == waits, found


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
@pytest.mark.parametrize("backend", on_gpu("reference", "compiled", "triton"))
def test_another_gpu_than_the_current_one(backend):
    batch = ragged(3, 40, 10, 37, 24).cast(torch.float32)
    first, second = (
        results(batch.cast(torch.float32, f"cuda:{number}"), backend=backend, tile_rows=64) for number in (0, 1)
    )
    assert_same_bits(*({name: x.cpu() for name, x in found.items()} for found in (second, first)))


@pytest.mark.parametrize("backend", on_gpu("reference", "compiled", "triton"))
def test_second_stream(backend):
    """Work goes to the current stream: inputs made there by a long computation are waited for."""
    batch = ragged(3, 40, 10, 37, 24).cast(torch.float32, "cuda").on("cuda")
    expected = joint_loss(batch, reduction="none", backend=backend)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        slow = torch.randn(4096, 4096, device="cuda")
        for _ in range(20):
            slow = (slow @ slow).clamp(-1, 1)
        late = batch._replace(encoder=batch.encoder + 0 * slow.sum())
        loss = joint_loss(late, reduction="none", backend=backend)
    stream.synchronize()
    assert torch.equal(loss, expected)
