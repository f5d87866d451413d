"""Evaluation mode that restores the mode of each module and every random stream."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import torch
from torch import nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Switch to evaluation mode in a `with` block; then restore modes and random streams (Python, NumPy, torch).

    >>> layer = nn.Dropout()
    >>> with evaluating(layer):
    ...     layer.training
    False
    >>> layer.training
    True
    """
    # Set the flag directly, because the train() of some modules merges weights or refuses the call.
    modes = {module: module.training for module in model.modules()}
    tensors = [*model.parameters(), *model.buffers()]
    devices: dict[str, set[int]] = {}
    for device in {tensor.device for tensor in tensors if tensor.device.type not in ("cpu", "meta")}:
        devices.setdefault(device.type, set()).add(device.index or 0)
    python, array = random.getstate(), np.random.get_state()  # noqa: NPY002 - the stream that a model may use
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        for kind, indices in devices.items():
            stack.enter_context(torch.random.fork_rng(devices=sorted(indices), device_type=kind))
        try:
            for module in modes:
                module.training = False
            yield
        finally:
            for module, mode in modes.items():
                module.training = mode
            random.setstate(python)
            np.random.set_state(array)  # noqa: NPY002
