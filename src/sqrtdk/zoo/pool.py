"""Guarded processes for families: one that hangs or dies loses itself and no other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

Answer = dict[str, Any]
WORKER = (sys.executable, "-m", "sqrtdk.zoo.worker")
# No network, one thread each, nothing but errors on stderr.
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
}


class _Process:
    """One worker, started when it is needed and again after it was lost."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self._process: subprocess.Popen[str] | None = None

    def ask(self, family: str, seconds: float) -> Answer:
        """What the worker answers; where it does not, why."""
        if self._process is None:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env=os.environ | _ENVIRONMENT,
            )
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        is_late = threading.Event()

        def end_late() -> None:
            is_late.set()
            process.kill()

        clock = threading.Timer(seconds, end_late)
        clock.start()
        try:
            process.stdin.write(family + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except (BrokenPipeError, ValueError):  # it has ended, or was stopped from another thread
            line = ""
        finally:
            clock.cancel()
        if line.endswith("\n"):
            answer: Answer = json.loads(line)
            return answer
        self.stop()
        code = process.wait()
        reason = f"not finished within {seconds:.0f} s" if is_late.is_set() else f"its process ended with code {code}"
        return {"family": family, "layers": None, "reasons": [reason]}

    def stop(self) -> None:
        """End the worker, if one runs."""
        if self._process is not None:
            process, self._process = self._process, None
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    with suppress(BrokenPipeError):  # what it did not read any more
                        stream.close()


def measure_families(
    families: Sequence[str],
    workers: int,
    seconds: float,
    on_answer: Callable[[Answer], None],
    command: Sequence[str] = WORKER,
) -> None:
    """Measure families in processes of `command`, each for so many seconds at most.

    `on_answer` gets each answer, in the calling thread, in the order in which they come.
    """
    waiting: SimpleQueue[str] = SimpleQueue()
    answers: SimpleQueue[Answer] = SimpleQueue()
    for family in families:
        waiting.put(family)
    processes = [_Process(command) for _ in range(min(workers, len(families)))]

    def serve(process: _Process) -> None:
        while True:
            try:
                family = waiting.get_nowait()
            except Empty:
                break
            answers.put(process.ask(family, seconds))
        process.stop()

    threads = [threading.Thread(target=serve, args=(process,), daemon=True) for process in processes]
    for thread in threads:
        thread.start()
    try:
        for _ in families:
            on_answer(answers.get())
    finally:
        while not waiting.empty():
            try:
                waiting.get_nowait()
            except Empty:
                break
        for process in processes:
            process.stop()
