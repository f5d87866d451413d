"""Temperature pressure against the gradient of the scale, whatever computes the attention."""

import copy
import math
import pickle

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from oracle import draw  # noqa: E402
from sqrtdk import SqrtdkError, attention_gradients  # noqa: E402
from sqrtdk.torch import attention  # noqa: E402
from sqrtdk.torch import pressure as module  # noqa: E402
from sqrtdk.torch.pressure import TemperaturePressure  # noqa: E402

functional = torch.nn.functional


def tensors(seed, heads=4, groups=4, queries=5, keys=7, batch=2, dtype=torch.float64):
    """q, k, v with gradients and a gradient for the output."""
    arrays = draw(seed, (batch, heads, queries, 8), (batch, groups, keys, 8), 6)
    grad = np.random.default_rng(seed + 100).standard_normal((batch, heads, queries, 6))
    return tuple(torch.tensor(x, dtype=dtype, requires_grad=i < 3) for i, x in enumerate((*arrays, grad)))


def eager(q, k, v, scale, softcap=None):
    k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], dim=-3) for x in (k, v))
    scores = scale * (q @ k.mT)
    return torch.softmax(scores if softcap is None else softcap * torch.tanh(scores / softcap), dim=-1) @ v


def expected_pressure(q, k, v, grad, scale=None, **options):
    """Σ scale·∂loss/∂scale over batch and rows, from the gradients of the NumPy operation."""
    arrays = [x.detach().double().numpy() for x in (q, k, v, grad)]
    per_row = attention_gradients(*arrays, scale=scale, **options).scale
    return (1 / math.sqrt(q.shape[-1]) if scale is None else scale) * per_row.sum(axis=(0, 2))


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("scale", [0.1, 1 / math.sqrt(8), 1.5])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_pressure_is_the_gradient_of_the_logarithm_of_the_scale(groups, scale, softcap):
    q, k, v, grad = tensors(0, groups=groups)
    pressure = TemperaturePressure()
    eager(pressure.follow(q), k, v, scale, softcap).backward(grad)
    expected = expected_pressure(q, k, v, grad, scale, softcap=softcap)
    assert np.abs(expected).min() > 1e-4
    np.testing.assert_allclose(pressure.per_head.numpy(), expected, rtol=1e-12, atol=1e-13)
    assert pressure.per_head.dtype == torch.float64
    assert (pressure.passes, pressure.overflows) == (1, 0)


def test_torchs_own_attention_feels_the_same_pressure():
    q, k, v, grad = tensors(1, groups=2)
    pressure = TemperaturePressure()
    functional.scaled_dot_product_attention(pressure.follow(q), k, v, enable_gqa=True).backward(grad)
    np.testing.assert_allclose(pressure.per_head.numpy(), expected_pressure(q, k, v, grad), rtol=1e-12)


OPTIONS = {
    "plain": {},
    "scale": {"scale": 0.9},
    "causal": {"causal": True, "causal_offset": 2},
    "window": {"window": (2, 1), "causal_offset": 2},
    "softcap": {"softcap": 2.0, "scale": 0.9},
    "sinks": {"sinks": np.array([0.0, 1.0, -1.0, 3.0])},
    "blind rows": {"mask": np.arange(7) < np.array([[0], [3], [7], [0], [1]])},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_attention_tells_the_pressure_of_every_call(options):
    q, k, v, grad = tensors(14, groups=2)
    pressure = TemperaturePressure()
    given = {name: torch.tensor(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}
    attention(q, k, v, pressure=pressure, **given).output.backward(grad)
    np.testing.assert_allclose(pressure.per_head.numpy(), expected_pressure(q, k, v, grad, **options), rtol=1e-11)


def test_the_q_is_the_one_that_enters_the_product():
    """With unit q and k the given q may have any length: neither loss nor pressure depends on it."""
    q, k, v, grad = tensors(15)
    result = []
    for length in (1.0, 5.0):
        pressure = TemperaturePressure()
        attention(length * q, k, v, scale="cosine", pressure=pressure).output.backward(grad)
        result.append(pressure.per_head.numpy())
    assert np.abs(result[0]).max() > 1e-2
    np.testing.assert_allclose(result[0], result[1], rtol=1e-10)


def test_a_row_that_sees_nothing_adds_nothing_even_if_q_is_nan():
    q, k, v, grad = tensors(16)
    mask = torch.ones(5, 7, dtype=torch.bool)
    mask[2] = False
    result = []
    for value in (0.0, math.nan):
        pressure = TemperaturePressure()
        filled = q.detach().clone()
        filled[:, :, 2] = value
        attention(filled.requires_grad_(), k, v, mask=mask, pressure=pressure).output.backward(grad)
        result.append(pressure.per_head)
        assert pressure.passes == 1
    assert torch.equal(*result)


def test_gradients_are_what_they_are_without_following():
    q, k, v, grad = tensors(2)
    plain = torch.autograd.grad(functional.scaled_dot_product_attention(q, k, v), (q, k, v), grad)
    followed = functional.scaled_dot_product_attention(TemperaturePressure().follow(q), k, v)
    for one, other in zip(plain, torch.autograd.grad(followed, (q, k, v), grad), strict=True):
        assert torch.equal(one, other)


def test_a_loss_that_wants_a_sharp_head_presses_down():
    """One head whose target is the value of its largest logit; one that shall return the mean of all values."""
    q, k, v, _ = tensors(3, heads=2, groups=2, queries=1, batch=1)
    k, v = k.detach(), v.detach()
    scores = q @ k.mT
    target = torch.stack([v[0, 0, scores[0, 0].argmax()], v[0, 1].mean(dim=0)])
    pressure = TemperaturePressure()
    out = eager(pressure.follow(q), k, v, 0.4)
    (out[0, :, 0] - target.detach()).square().sum().backward()
    sharper, softer = pressure.per_head.tolist()
    assert sharper < 0 < softer


def test_only_the_product_counts_when_q_serves_twice():
    """A temperature computed from q itself: its path to the loss is not pressure on the scale."""
    q, k, v, grad = tensors(4)
    pressure = TemperaturePressure()
    per_query = torch.exp(0.3 * q.mean(dim=-1, keepdim=True))
    eager(pressure.follow(q) * per_query, k, v, 0.4).backward(grad)
    scale = (0.4 * per_query.detach()[..., 0]).numpy()
    arrays = [x.detach().numpy() for x in (q, k, v, grad)]
    per_row = attention_gradients(*arrays, scale=scale).scale * scale
    np.testing.assert_allclose(pressure.per_head.numpy(), per_row.sum(axis=(0, 2)), rtol=1e-12)
    everything = (q * q.grad).sum(dim=(0, 2, 3)).detach().numpy()
    assert (np.abs(everything - pressure.per_head.numpy()) > 1e-2).any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision_adds_up_in_float64(dtype):
    q, k, v, grad = tensors(5, queries=64, dtype=dtype)
    pressure = TemperaturePressure()
    eager(pressure.follow(q), k, v, 0.4).backward(grad)
    exact = (q.detach().double() * q.grad.double()).sum(dim=(0, 2, 3))
    torch.testing.assert_close(pressure.per_head, exact, rtol=1e-13, atol=1e-13)
    wanted = expected_pressure(q, k, v, grad, 0.4)
    size = (q.detach().double() * q.grad.double()).abs().sum(dim=(0, 2, 3)).numpy()
    assert (np.abs(pressure.per_head.numpy() - wanted) <= 2 * torch.finfo(dtype).eps * size).all()


def test_blocks_of_rows_add_up_to_the_whole(monkeypatch):
    q, k, v, grad = tensors(6, queries=13)
    result = []
    for block in (1, 100, 1 << 22):
        monkeypatch.setattr(module, "_BLOCK", block)
        pressure = TemperaturePressure()
        eager(pressure.follow(q), k, v, 0.4).backward(grad)
        result.append(pressure.per_head.numpy())
    np.testing.assert_allclose(result[0], result[2], rtol=1e-12)
    np.testing.assert_allclose(result[1], result[2], rtol=1e-12)


def test_it_adds_up_over_passes_until_reset():
    pressure, expected = TemperaturePressure(), 0.0
    assert pressure.per_head is None
    for seed in range(3):
        q, k, v, grad = tensors(seed)
        eager(pressure.follow(q), k, v, 0.4).backward(grad)
        expected = expected + expected_pressure(q, k, v, grad, 0.4)
    np.testing.assert_allclose(pressure.per_head.numpy(), expected, rtol=1e-12)
    assert pressure.passes == 3
    for other in (copy.deepcopy(pressure), pickle.loads(pickle.dumps(pressure))):
        assert torch.equal(other.per_head, pressure.per_head)
    pressure.reset()
    assert (pressure.per_head, pressure.passes, pressure.overflows) == (None, 0, 0)
    pressure.follow(tensors(0, heads=8)[0])


def test_the_factor_of_a_grad_scaler_is_undone():
    q, k, v, grad = tensors(7)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    pressure = TemperaturePressure(scaler)
    scaler.scale((eager(pressure.follow(q), k, v, 0.4) * grad).sum()).backward()
    scaler.update(2.0**5)  # the factor that counts is the one of its backward pass
    scaler.scale((eager(pressure.follow(q), k, v, 0.4) * grad).sum()).backward()
    np.testing.assert_allclose(pressure.per_head.numpy(), 2 * expected_pressure(q, k, v, grad, 0.4), rtol=1e-12)
    off = TemperaturePressure(torch.amp.GradScaler("cpu", enabled=False))
    eager(off.follow(q), k, v, 0.4).backward(grad)
    np.testing.assert_allclose(off.per_head.numpy(), expected_pressure(q, k, v, grad, 0.4), rtol=1e-12)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_an_overflowed_pass_is_counted_and_left_out(bad):
    q, k, v, grad = tensors(8)
    pressure = TemperaturePressure(torch.amp.GradScaler("cpu", init_scale=1.0))
    broken = grad.clone()
    broken[0, 1, 2, 3] = bad
    eager(pressure.follow(q), k, v, 0.4).backward(broken)
    assert pressure.per_head.tolist() == [0.0] * 4
    assert (pressure.passes, pressure.overflows) == (0, 1)
    eager(pressure.follow(q), k, v, 0.4).backward(grad)
    np.testing.assert_allclose(pressure.per_head.numpy(), expected_pressure(q, k, v, grad, 0.4), rtol=1e-12)
    assert (pressure.passes, pressure.overflows) == (1, 1)


def test_nothing_is_recorded_without_a_gradient_to_come():
    q, k, v, _ = tensors(9)
    pressure = TemperaturePressure()
    plain = q.detach()
    assert pressure.follow(plain) is plain
    with torch.no_grad():
        assert pressure.follow(q) is q
    assert pressure.follow(q).data_ptr() == q.data_ptr()
    eager(q, k, v, 0.4).sum().backward()  # q itself is not followed
    assert pressure.per_head is None


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_records_once(reentrant):
    q, k, v, grad = tensors(10)
    pressure = TemperaturePressure()
    run = lambda q, k, v: eager(pressure.follow(q * 1.0), k, v, 0.4)  # noqa: E731
    torch.utils.checkpoint.checkpoint(run, q, k, v, use_reentrant=reentrant).backward(grad)
    np.testing.assert_allclose(pressure.per_head.numpy(), expected_pressure(q, k, v, grad, 0.4), rtol=1e-12)
    assert pressure.passes == 1


def test_a_single_head_has_two_axes():
    q, k, v, grad = (x[0, 0].detach().requires_grad_(i < 3) for i, x in enumerate(tensors(11)))
    pressure = TemperaturePressure()
    eager(pressure.follow(q[None]), k[None], v[None], 0.4)[0].backward(grad)
    flat = TemperaturePressure()
    (torch.softmax(0.4 * flat.follow(q) @ k.mT, dim=-1) @ v).backward(grad)
    assert flat.per_head.shape == (1,)
    torch.testing.assert_close(flat.per_head, pressure.per_head, rtol=1e-12, atol=0.0)


def test_a_second_derivative_passes_through():
    q, k, v, _ = tensors(12, queries=2, keys=3, batch=1, heads=1, groups=1)
    pressure = TemperaturePressure()
    assert torch.autograd.gradgradcheck(lambda q: eager(pressure.follow(q), k, v, 0.4), (q,))
    assert not pressure.per_head.requires_grad


def test_wrong_calls_say_what_came():
    pressure = TemperaturePressure()
    with pytest.raises(SqrtdkError, match=r"scaler must be a torch.amp.GradScaler or None, got float"):
        TemperaturePressure(1024.0)
    with pytest.raises(SqrtdkError, match=r"q must be a tensor, got ndarray"):
        pressure.follow(np.zeros((2, 3, 4)))
    with pytest.raises(SqrtdkError, match=r"q must have shape \[..., H, L, D\] or \[L, D\], got \(3,\)"):
        pressure.follow(torch.zeros(3))
    pressure.follow(tensors(0, heads=4)[0])
    with pytest.raises(SqrtdkError, match=r"q must have 4 heads, as the q followed before, got 8"):
        pressure.follow(tensors(0, heads=8)[0])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch asks for it itself, silencing the warning
def test_a_fully_compiled_graph_is_refused_and_a_broken_one_records():
    q, k, v, grad = tensors(13)
    pressure = TemperaturePressure()
    run = lambda q: eager(pressure.follow(q), k, v, 0.4)  # noqa: E731
    with pytest.raises(Exception, match=r"cannot be traced by torch.compile; call it outside the compiled region"):
        torch.compile(run, fullgraph=True, backend="eager")(q)
    assert pressure.per_head is None
    torch.compile(run, backend="eager")(q).backward(grad)
    np.testing.assert_allclose(pressure.per_head.numpy(), expected_pressure(q, k, v, grad, 0.4), rtol=1e-12)


def test_pressure_is_shown_per_head():
    q, k, v, grad = tensors(3, heads=3, groups=3)
    pressure = TemperaturePressure()
    assert repr(pressure) == "TemperaturePressure before any backward pass"
    functional.scaled_dot_product_attention(pressure.follow(q), k, v).backward(grad)
    title, _, *lines = repr(pressure).splitlines()
    assert title == "TemperaturePressure of 3 heads after 1 backward pass"
    wants = ["softer" if p > 0 else "sharper" for p in pressure.per_head.tolist()]
    assert [line.split() for line in lines] == [
        [str(head), f"{p:.3g}".replace("-", "−"), want]
        for head, (p, want) in enumerate(zip(pressure.per_head, wants, strict=True))
    ]
    assert len(set(wants)) == 2
    assert all(want in pressure._repr_html_() for want in wants)
    (pressure.follow(q) * math.inf).sum().backward()
    assert repr(pressure).splitlines()[0].endswith("1 backward pass, 1 more left out: gradients not finite")


def test_pressure_of_many_heads_is_a_few_lines():
    q = torch.zeros(500, 2, 4, requires_grad=True)
    pressure = TemperaturePressure()
    pressure.follow(q).sum().backward()
    assert len(repr(pressure).splitlines()) == 19
    assert repr(pressure).splitlines()[2].split() == ["0", "0", "neither"]
    meta = torch.zeros(3, 2, 4, device="meta", requires_grad=True)
    pressure = TemperaturePressure()
    pressure.follow(meta).sum().backward()
    assert repr(pressure) == "TemperaturePressure of 3 heads after a backward pass on meta, without numbers"
