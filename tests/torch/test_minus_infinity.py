"""Finite numbers that mean minus infinity hide the same keys whoever looks: watch, replaced attention, transformers."""

import math

import numpy as np
import pytest
import torch
from torch.nn import functional

from sqrtdk.torch import attention, watch
from sqrtdk.torch.huggingface import attend
from sqrtdk.torch.minus_infinity import close_hidden, hides, is_closed, shows
from sqrtdk.torch.watch.replace import FusedWatch
from torch_watched import DIMENSION, TOKENS, ByHand, build, make_input

pytestmark = pytest.mark.usefixtures("nothing_left")


def by_hand(q, k, v, mask):
    return ((q @ k.transpose(-1, -2) * DIMENSION**-0.5) + mask).softmax(-1) @ v


WAYS = {
    "by hand": by_hand,
    "torch": functional.scaled_dot_product_attention,
    "sqrtdk": lambda q, k, v, mask: attention(q, k, v, mask=mask).output,
    "transformers": lambda q, k, v, mask: attend(None, q, k, v, mask)[0].transpose(1, 2),
}


class Masked(ByHand):
    """Attention with a mask that it adds, in one of the ways above."""

    def __init__(self, how):
        super().__init__()
        self.how = WAYS[how]

    def forward(self, x, mask):
        q, k, v = (self.split(f(x)) for f in (self.q_proj, self.k_proj, self.v_proj))
        return self.how(q, k, v, mask)


def visible_pairs():
    """Causal, and two keys hidden from all but themselves: every row sees one key at least."""
    visible = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
    visible[3:, 2] = visible[5:, 4] = False
    return visible


NUMBERS = {
    "-1e4": lambda dtype: -1e4,
    "-3e4": lambda dtype: -3e4,
    "min": lambda dtype: torch.finfo(dtype).min,
    "-inf": lambda dtype: -math.inf,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("number", NUMBERS)
def test_watch_and_models_hide_the_same_keys(number, dtype):
    visible = visible_pairs()
    mask = torch.zeros(visible.shape, dtype=dtype).masked_fill(~visible, NUMBERS[number](dtype))[None, None]
    assert torch.equal(shows(mask), visible[None, None])
    assert torch.equal(close_hidden(mask) == -math.inf, ~visible[None, None])
    assert is_closed(mask) == (number == "-inf")
    x, summaries, outputs = make_input().to(dtype), [], []
    for how in WAYS:
        model = build(Masked, how).to(dtype)
        with torch.no_grad():
            expected = model(x, mask)
            with watch(model) as passive:
                assert torch.equal(model(x, mask), expected)
            with FusedWatch(model) as replaced:
                output = model(x, mask)
        torch.testing.assert_close(output, expected, rtol=1e-2, atol=8 * torch.finfo(dtype).eps)
        outputs.append(expected)
        summaries += [passive.layers[""], replaced.layers[""]]
    for output in outputs[1:]:
        torch.testing.assert_close(output, outputs[0], rtol=1e-2, atol=8 * torch.finfo(dtype).eps)
    for summary in summaries:
        np.testing.assert_array_equal(summary["visible_keys"].mean, visible.sum().item() / TOKENS)
        for name in ("entropy", "entropy_ratio"):
            np.testing.assert_allclose(summary[name].mean, summaries[0][name].mean, rtol=1e-5)


def test_numbers_that_are_merely_small_stay_visible():
    entries = torch.tensor([0.0, -1000.0, -8999.0, math.nan])
    assert not hides(entries).any()
    assert torch.equal(close_hidden(entries)[:3], entries[:3])
    assert is_closed(entries)
