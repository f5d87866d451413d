"""Peak memory of one call beyond its inputs and results, each measured in a process of its own.

The number is the rise of the process's peak resident memory (Linux, `VmHWM`) during the call. One call with a single
query and key goes before, so that libraries are loaded; threads and scratch memory of the real call count.
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
from benchmarks.contenders import MATRICES, find_contender
from sqrtdk import backends

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
# Contenders that hold the n×n matrix hold it about so often: logits, weights and temporaries, in float32.
_COPIES = 6
_TIMEOUT_SECONDS = 600
D_K = 64


@dataclass(frozen=True)
class Peak:
    """Bytes beyond inputs and results at n queries and keys, or why there is no number."""

    contender: str
    n: int
    extra_bytes: int | None
    why_not: str | None = None


def measure_peak(contender: Contender, n: int, threads: int) -> Peak:
    """Measure one contender at n queries and n keys of one head in a fresh process."""
    if not _can_reset():
        return Peak(contender.name, n, None, "peak memory cannot be read on this system")
    needed = _COPIES * 4 * n * n
    if contender.name in MATRICES and needed > _free_bytes():
        return Peak(contender.name, n, None, f"needs about {needed / 2**30:.0f} GiB, more than is free")
    task = {"contender": contender.name, "n": n, "threads": threads, "backend": backends.current()}
    call = "import sys; from benchmarks.memory import print_peak; print_peak(sys.argv[1])"
    command = [sys.executable, "-c", call, json.dumps(task)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_SECONDS)
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or [f"ended with status {done.returncode}"]
        return Peak(contender.name, n, None, last[0])
    return Peak(contender.name, n, int(json.loads(done.stdout)["extra_bytes"]))


def print_peak(task: str) -> None:
    """Run in the measuring process: do the task and print the peak as JSON."""
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
    _CLEAR.write_text("5")  # from here on the peak is what is resident now
    before = _read_status("VmHWM")
    result = runs[1]()
    return max(0, _read_status("VmHWM") - before - _count_bytes(result))


def _count_bytes(result: Any) -> int:
    """Bytes of all arrays and tensors in what a contender returns."""
    if hasattr(result, "nbytes"):
        return int(result.nbytes)
    if is_dataclass(result):
        return sum(_count_bytes(getattr(result, item.name)) for item in fields(result))
    if isinstance(result, dict):
        return sum(map(_count_bytes, result.values()))
    return sum(map(_count_bytes, result)) if isinstance(result, Sequence) and not isinstance(result, str) else 0


def _read_status(name: str) -> int:
    """A field of the process's status in bytes."""
    found = re.search(rf"^{name}:\s+(\d+) kB", _STATUS.read_text(), re.MULTILINE)
    assert found is not None
    return int(found.group(1)) * 1024


def _can_reset() -> bool:
    return os.access(_CLEAR, os.W_OK) and "VmHWM" in _STATUS.read_text()


def _free_bytes() -> int:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
