"""Measures families in guarded processes: one that hangs or dies loses itself and no other."""

from __future__ import annotations

import gc
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any

from sqrtdk.children import Child, ChildError, Serve, answer_questions

Answer = dict[str, Any]
_MOST_BYTES = 6 << 30
# No network, one thread each, nothing but errors on stderr.
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
}


def serve(connection: Connection) -> None:
    """Measure the families that are asked for, in a process of bounded memory."""
    with suppress(ImportError):  # not on Windows
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (_MOST_BYTES, _MOST_BYTES))
    os.environ.update(_ENVIRONMENT)
    import torch

    from sqrtdk.zoo.measure import measure

    torch.set_num_threads(1)

    def measure_alone(family: str) -> Answer:
        gc.collect()  # models hold on to themselves
        return measure(family)

    answer_questions(connection, measure_alone)


def measure_families(
    families: Sequence[str],
    workers: int,
    seconds: float,
    on_answer: Callable[[Answer], None],
    serve: Serve = serve,
) -> None:
    """Measure families in processes that run `serve`, each for so many seconds at most.

    `on_answer` gets each answer in the order in which they come.
    """
    waiting = deque(families)
    idle: list[Child] = []
    busy: dict[Child, str] = {}
    try:
        while waiting or busy:
            while waiting and len(busy) < workers:
                child = idle.pop() if idle else Child(serve, "sqrtdk-zoo", quiet=True)
                busy[child] = waiting.popleft()
                child.ask(busy[child], seconds)
            left = min(child.deadline for child in busy) - time.monotonic()
            ready = wait([child.connection for child in busy], max(left, 0.0))
            for child in [one for one in busy if one.connection in ready or one.deadline <= time.monotonic()]:
                family = busy.pop(child)
                try:
                    answer = child.answer()
                    idle.append(child)
                except ChildError as reason:
                    child.stop()
                    answer = {"family": family, "layers": None, "reasons": [str(reason)]}
                on_answer(answer)
    finally:
        for child in [*busy, *idle]:
            child.stop()
