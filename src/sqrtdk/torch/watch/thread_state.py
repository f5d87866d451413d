"""Holds the state of a watch that each thread has separately."""

from __future__ import annotations

import threading
from typing import Any

from torch import nn

from sqrtdk.torch.watch.modules import CallCounter, Frame
from sqrtdk.torch.watch.recognise.recogniser import Recogniser
from sqrtdk.torch.watch.recognise.repeated import FusedOnly
from sqrtdk.torch.watch.uninvolved import CallRecord


class ThreadState(threading.local):
    """State of one thread while a watched model runs in it."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.calls = 0
        self.counter = CallCounter()
        self.recogniser: Recogniser | None = None
        self.is_on = False
        # Whether the call is a repeated one, its mode, and the number of running modules when the mode was entered.
        self.is_repeated = False
        self.fused_only: FusedOnly | None = None
        self.fused_from: int | None = None
        # Modules that this call does not follow, and whether the output of each has a lineage.
        self.uninvolved: dict[nn.Module, bool] = {}
        # Such a module while it runs.
        self.unfollowed: nn.Module | None = None
        # Record of a call that is followed fully, to find such modules.
        self.record: CallRecord | None = None
        # Whether torch's attention function runs.
        self.is_in_function = False
        # Collects requested weights; None if no weights are requested.
        self.wanted: list[Any] | None = None
