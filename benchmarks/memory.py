"""Measures the peak memory of one call beyond its inputs and results, each in its own process.

The result is the rise of the process's peak resident memory (Linux, `VmHWM`) during the call. A call with a single
query and key runs first, so that libraries are loaded. Threads and scratch memory of the real call count.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cases import Case
from benchmarks.contender import Contender
from benchmarks.contenders import find_contender, why_too_large
from sqrtdk import backends

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_TIMEOUT_SECONDS = 600
D_K = 64


@dataclass(frozen=True)
class Peak:
    """Bytes beyond inputs and results at n queries and keys, or the reason why there is no number."""

    contender: str
    n: int
    extra_bytes: int | None
    why_not: str | None = None


def measure_peak(contender: Contender, n: int, threads: int) -> Peak:
    """Measure one contender at n queries and n keys of one head in a fresh process."""
    if not _can_reset():
        return Peak(contender.name, n, None, "peak memory cannot be read on this system")
    if (reason := why_too_large(contender.name, n)) is not None:
        return Peak(contender.name, n, None, reason)
    task = {"contender": contender.name, "n": n, "threads": threads, "backend": backends.current()}
    call = "import sys; from benchmarks.memory import print_peak; print_peak(sys.argv[1])"
    command = [sys.executable, "-c", call, json.dumps(task)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_SECONDS)
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or [f"ended with status {done.returncode}"]
        return Peak(contender.name, n, None, last[0])
    return Peak(contender.name, n, int(json.loads(done.stdout)["extra_bytes"]))


def print_peak(task: str) -> None:
    """Do the task in the measuring process and print the peak as JSON."""
    asked = json.loads(task)
    if "torch" in find_contender(asked["contender"]).needs:
        import torch

        torch.set_num_threads(asked["threads"])
    with backends.use(asked["backend"]), backends.use_threads(asked["threads"]):
        found = _rise_of_peak(find_contender(asked["contender"]), asked["n"], asked["threads"])
    print(json.dumps({"extra_bytes": found}))


def _rise_of_peak(contender: Contender, n: int, threads: int) -> int:
    rng = np.random.default_rng(0)
    runs = [
        contender.prepare(case, case.make_inputs(rng)[0], threads)
        for case in (Case("memory", "tiny", 1, 1, 1, D_K), Case("memory", "whole", 1, 1, n, D_K))
    ]
    runs[0]()
    _CLEAR.write_text("5")  # resets the peak to the present resident memory
    before = _read_status("VmHWM")
    result = runs[1]()
    return max(0, _read_status("VmHWM") - before - _count_bytes(result))


def _count_bytes(result: Any) -> int:
    """Return the bytes of all arrays and tensors in a contender's result."""
    if hasattr(result, "nbytes"):
        return int(result.nbytes)
    if is_dataclass(result):
        return sum(_count_bytes(getattr(result, item.name)) for item in fields(result))
    if isinstance(result, dict):
        return sum(map(_count_bytes, result.values()))
    return sum(map(_count_bytes, result)) if isinstance(result, Sequence) and not isinstance(result, str) else 0


def _read_status(name: str) -> int:
    """Return a field of the process's status in bytes."""
    found = re.search(rf"^{name}:\s+(\d+) kB", _STATUS.read_text(), re.MULTILINE)
    assert found is not None
    return int(found.group(1)) * 1024


def _can_reset() -> bool:
    return os.access(_CLEAR, os.W_OK) and "VmHWM" in _STATUS.read_text()
