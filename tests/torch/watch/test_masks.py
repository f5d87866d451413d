"""Readings of additive masks: once for all layers that share a mask, anew after any change."""

import math

import pytest
import torch

from sqrtdk.torch.watch.recognise import masks
from sqrtdk.torch.watch.recognise.masks import close_masked, forget_mask, read_mask


@pytest.fixture(autouse=True)
def _forgotten():
    yield
    forget_mask()


def test_layers_share_a_reading():
    mask = torch.zeros(2, 1, 3, 4)
    assert read_mask(mask) is read_mask(mask.detach()) is read_mask(mask[:, :, :, :])
    assert read_mask(mask[..., 1:]) is not read_mask(mask)


@pytest.mark.parametrize("change", [lambda mask: mask.fill_(-math.inf), lambda mask: mask[0].add_(-1e9)])
def test_a_mask_that_changes_is_read_again(change):
    mask = torch.zeros(2, 1, 3, 4)
    assert bool(read_mask(mask).shown.all())
    change(mask)
    assert not bool(read_mask(mask).shown.all())
    assert torch.equal(read_mask(mask).seen, read_mask(mask).shown.flatten(1, 2).any(dim=1))


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


def test_masks_of_inference_mode_are_read_each_time():
    with torch.inference_mode():
        mask = torch.zeros(1, 1, 2, 2)
        assert read_mask(mask) is not read_mask(mask)


def test_nothing_is_kept_after_a_call():
    read_mask(torch.zeros(1, 1, 2, 2))
    forget_mask()
    assert masks._last.reading is None
