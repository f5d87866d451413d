"""Evaluation leaves no trace: modes of modules and random streams, also where the model raises."""

import random

import numpy as np
import pytest
import torch
from torch import nn

from sqrtdk.torch.models.evaluation import evaluating


def draw():
    return random.random(), np.random.rand(), float(torch.rand(()))  # noqa: NPY002 - the stream that a model may use


@pytest.mark.parametrize("fails", [False, True])
def test_modes_and_streams_are_as_before(fails):
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout().eval(), nn.Dropout())
    random.seed(0), np.random.seed(0), torch.manual_seed(0)  # noqa: NPY002
    expected = draw()
    random.seed(0), np.random.seed(0), torch.manual_seed(0)  # noqa: NPY002
    try:
        with evaluating(model):
            assert not any(module.training for module in model.modules())
            draw()
            assert not fails, "the model raises"
    except AssertionError:
        assert fails
    assert draw() == expected
    assert [module.training for module in model.modules()] == [True, True, False, True]
