"""ALiBi's slopes on tensors: every engine, second derivatives, vmap, torch.compile and sampled rows."""

import numpy as np
import pytest
import torch

import sqrtdk
import sqrtdk.torch
from oracle import draw
from sqrtdk import backends
from sqrtdk.errors import InvalidValueError

SLOPES = np.array([0.5, 0.125, -0.25, 0.0])


def draw_tensors(seed, queries=7, keys=11, dtype=torch.float64):
    """Query, key, value and slopes that need gradients."""
    arrays = (*draw(seed, (2, 4, queries, 8), (2, 2, keys, 8), 6), SLOPES + 0.1)
    return [torch.from_numpy(x).to(dtype).requires_grad_() for x in arrays]


@pytest.mark.parametrize("engine", ["kernel", "blocks", "whole", "reference"])
def test_every_engine_gives_the_same(engine, monkeypatch):
    from sqrtdk.torch.engines import choose

    tensors = draw_tensors(13)
    chosen = {"kernel": choose.TENSOR_KERNEL, "blocks": choose.BLOCKS, "whole": choose.WHOLE}
    chosen["reference"] = choose.TENSOR_REFERENCE
    monkeypatch.setattr("sqrtdk.torch.autograd.choose_engine", lambda *_: chosen[engine])
    arrays = [x.detach().numpy() for x in tensors]
    given = {"causal": True, "causal_offset": 4, "softcap": 5.0}
    result = sqrtdk.torch.attention(*tensors[:3], alibi=tensors[3], **given)
    with backends.use("reference"):
        expected = sqrtdk.attention(*arrays[:3], alibi=arrays[3], **given)
        ones = np.ones_like(expected.output)
        gradients = sqrtdk.attention_gradients(*arrays[:3], ones, alibi=arrays[3], **given)
    assert result.engine == engine
    np.testing.assert_allclose(result.output.detach(), expected.output, rtol=1e-9, atol=1e-12)
    # The offset moves all logits of a row alike: only their size shows it.
    for name in ("entropy", "max_logit"):
        one, other = getattr(result.statistics, name), getattr(expected.statistics, name)
        np.testing.assert_allclose(one, other, rtol=1e-8, atol=1e-10, err_msg=name)
    found = torch.autograd.grad(result.output.sum(), tensors)
    for one, other in zip(found, (*gradients[:3], gradients.alibi), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-8, atol=1e-9)


@pytest.mark.slow
def test_gradcheck_twice():
    tensors = draw_tensors(14, 3, 5)

    def attend(q, k, v, alibi):
        return sqrtdk.torch.attention(q, k, v, alibi=alibi, causal_offset=2, sinks=None, softcap=6.0).output

    assert torch.autograd.gradcheck(attend, tensors)
    assert torch.autograd.gradgradcheck(attend, tensors)


@pytest.mark.slow
def test_vmap_compile_and_sampled_rows():
    tensors = [x.detach() for x in draw_tensors(15)]
    given = {"causal": True, "causal_offset": 4}

    def attend(q, k, v, alibi):
        return sqrtdk.torch.attention(q, k, v, alibi=alibi, **given).output

    expected = attend(*tensors)
    mapped = torch.vmap(attend, (0, 0, 0, None))(*tensors)
    torch.testing.assert_close(mapped, expected)
    several = torch.stack([tensors[3], 2 * tensors[3]])
    each = torch.vmap(attend, (0, 0, 0, 0))(*tensors[:3], several)
    torch.testing.assert_close(each[1], attend(*tensors[:3], 2 * tensors[3])[1])
    torch.testing.assert_close(torch.compile(attend, backend="aot_eager")(*tensors), expected)
    whole = sqrtdk.torch.attention(*tensors[:3], alibi=tensors[3], **given).statistics
    some = sqrtdk.torch.attention(*tensors[:3], alibi=tensors[3], sample_rows=3, **given).statistics
    positions = some.sample.positions
    torch.testing.assert_close(some.entropy, whole.entropy[..., positions])
    torch.testing.assert_close(some.max_logit, whole.max_logit[..., positions])


@pytest.mark.parametrize("needs_gradient", [False, True])
def test_slopes_that_are_no_numbers_are_refused(needs_gradient):
    q, k, v, _ = draw_tensors(16)
    for name, number in (("alibi", torch.inf), ("sinks", torch.nan)):
        given = {name: torch.full((4,), number, dtype=torch.float64), "causal": True, "causal_offset": 4}
        with torch.set_grad_enabled(needs_gradient), pytest.raises(InvalidValueError, match=f"{name} must be finite"):
            sqrtdk.torch.attention(q, k, v, **given)
