"""Padding: rows told from the mask of the model or from the keys that it hides."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from sqrtdk.torch import watch
from sqrtdk.torch.internals import storage_address
from torch_watched import BATCH, ROWS, TOKENS, WIDTH, Fused, Stack, build, make_input

pytestmark = pytest.mark.usefixtures("nothing_left")


def test_padding_rows_are_left_out():
    model, x = build(Stack, Fused(), Fused()), make_input()
    present = torch.ones(BATCH, TOKENS, dtype=torch.long)
    present[0, :2] = 0
    present[2, 5:] = 0
    with watch(model) as seen:
        model(x, attention_mask=present)
    assert seen.padding == "attention mask"
    for summary in seen.layers.values():
        np.testing.assert_array_equal(summary.rows_seen, int(present.sum()))


def test_padding_is_read_from_the_keys_without_a_token_mask():
    class Hiding(Fused):
        def forward(self, x, lengths):
            return super().forward(x, torch.arange(TOKENS) < lengths[:, None])

    model = build(Hiding)
    with watch(model) as seen:
        model(make_input(), torch.tensor([7, 3, 5]))
    assert seen.padding == "key padding"
    np.testing.assert_array_equal(seen.layers[""].rows_seen, 15)
    with watch(model) as seen:
        model(make_input(), torch.tensor([7, 7, 7]))
    assert seen.padding == "unknown"


class OfAnother(nn.Module):
    """Attention to other tokens; what the queries are made of lies where that of the keys lay, if it can."""

    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, other, mask):
        gone = other * 1.0
        address = storage_address(gone)
        k = self.k(gone)
        del gone
        copies = []
        while len(copies) < 100 and not (copies and storage_address(copies[-1]) == address):
            copies.append(x * 1.0)
        q = self.q(copies[-1])
        return functional.scaled_dot_product_attention(q[:, None], k[:, None], q[:, None], attn_mask=mask)


def test_tokens_of_another_sequence_are_not_taken_for_its_own():
    model, x = build(OfAnother), make_input()
    mask = torch.ones(BATCH, 1, 1, TOKENS, dtype=torch.bool)
    mask[0, ..., -3:] = False
    for _ in range(3):
        with torch.no_grad(), watch(model) as seen:
            model(x, make_input(seed=1), mask)
        assert seen.layers[""].rows_seen[0] == ROWS  # hidden keys say nothing about queries of another sequence
        assert seen.padding == "unknown"
