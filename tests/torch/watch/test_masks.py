"""Readings of additive masks: shared by the steps of one observation, made anew for the next."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional

from sqrtdk.torch import watch
from sqrtdk.torch.watch.recognise.masks import close_masked, forget_mask, read_mask


@pytest.fixture(autouse=True)
def _forgotten():
    yield
    forget_mask()


def test_steps_share_a_reading():
    mask = torch.zeros(2, 1, 3, 4)
    assert read_mask(mask) is read_mask(mask.detach()) is read_mask(mask[:, :, :, :])
    assert read_mask(mask[..., 1:]) is not read_mask(mask)
    before = read_mask(mask)
    forget_mask()
    assert read_mask(mask) is not before


def test_the_address_of_a_freed_mask_tells_nothing():
    mask = torch.zeros(1, 1, 2, 2)
    read_mask(mask)
    del mask
    for _ in range(50):
        assert not bool(read_mask(torch.full((1, 1, 2, 2), -math.inf)).shown.any())


def test_numbers_that_mean_minus_infinity_hide_and_others_are_added():
    nothing, hiding, adding = (torch.tensor([[[[0.0, entry]]]]) for entry in (0.0, -1e9, -1.5))
    assert [read_mask(mask).adds for mask in (nothing, hiding, adding)] == [False, False, True]
    assert close_masked(hiding, torch.float32).tolist() == [[[[True, False]]]]
    assert torch.equal(close_masked(adding, torch.float64), adding.double())
    assert read_mask(torch.tensor([[[[0.0, math.nan]]]])).adds


class Changing(nn.Module):
    """Two layers that share a mask, which is opened between them."""

    def __init__(self, change, is_fused):
        super().__init__()
        self.change, self.is_fused = change, is_fused
        self.first, self.second = (nn.Linear(8, 24) for _ in range(2))

    def forward(self, x):
        mask = torch.full((5, 5), -1e9).triu(1)
        y = self.attend(self.first(x), mask)
        self.change(mask)
        return self.attend(self.second(y), mask)

    def attend(self, projected, mask):
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in projected.chunk(3, dim=-1))
        if self.is_fused:
            return functional.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2)
        return ((q @ k.transpose(-1, -2) * 0.5 + mask).softmax(-1) @ v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("is_fused", [True, False])
@pytest.mark.parametrize("change", [lambda mask: mask.zero_(), lambda mask: mask.numpy().fill(0.0)])
def test_a_mask_that_changes_between_layers_is_read_again(change, is_fused):
    model = Changing(change, is_fused)
    with torch.no_grad(), watch(model) as seen:
        for _ in range(3):  # later calls are followed for fused operations alone
            model(torch.randn(2, 5, 8))
    assert not seen.unattributed
    # The module's two calls are one layer: its queries see three of five keys on average, then all five.
    assert seen.layers[""]["visible_keys"].mean.tolist() == [4.0, 4.0]
