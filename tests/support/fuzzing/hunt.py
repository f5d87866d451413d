"""Runs cases in a separate process. If a call kills the process, the next process starts after that call."""

from __future__ import annotations

import faulthandler
import json
import subprocess
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from sqrtdk.errors import FallbackWarning

_LONGEST = 120  # seconds; a longer case counts as a hang


@dataclass(frozen=True)
class Found:
    """Mismatches of a case by name, and how to repeat it."""

    seed: int
    case: int
    call: str
    mismatches: dict[str, str]

    def __str__(self) -> str:
        lines = [f"python -m tests.support.fuzzing --seed {self.seed} --case {self.case}", self.call]
        return "\n    ".join([*lines, *(f"{name}: {text}" for name, text in self.mismatches.items())])


_WORKER = (sys.executable, "-m", "fuzzing", "--stream")


def hunt(seed: int, first: int, count: int, worker_command: Sequence[str] = _WORKER) -> Iterator[Found]:
    """Yield all mismatches and crashes of these cases of a seed."""
    end = first + count
    while first < end:
        command = [*worker_command, "--seed", str(seed), "--first", str(first), "--cases", str(end - first)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=_TESTS) as worker:
            assert worker.stdout is not None
            assert worker.stderr is not None
            begun, call = first - 1, "before the first call"
            for line in worker.stdout:
                event = json.loads(line)
                begun, call = event["case"], event["call"]
                if event["mismatches"]:
                    yield Found(seed, begun, call, event["mismatches"])
            complaint = worker.stderr.read()
        if worker.returncode:
            reason = " / ".join(complaint.strip().splitlines()[-12:])[-600:]
            yield Found(seed, begun, call, {f"dies with {worker.returncode}": reason})
            if begun < first:  # the process died before its first call
                return
        first = begun + 1


_TESTS = str(Path(__file__).resolve().parent.parent)


def serve(seed: int, first: int, count: int) -> None:
    """Run cases in the worker. Every call is reported before it runs, so a crash belongs to the last reported call."""
    from sqrtdk import backends

    from .check import check
    from .draw import draw_case

    faulthandler.enable()
    warnings.simplefilter("error")
    warnings.simplefilter("ignore", FallbackWarning)  # levels are forced on calls that only torch computes
    warnings.filterwarnings("ignore", "`torch.jit.", DeprecationWarning)  # torch's own decompositions use scripts
    levels = tuple(backend.name for backend in backends.list() if backend.runs_here)
    for index in range(first, first + count):
        faulthandler.dump_traceback_later(_LONGEST, exit=True)
        case = draw_case(seed, index, levels)
        _tell({"case": index, "call": case.describe(), "mismatches": {}})
        mismatches = {mismatch.name: mismatch.text for mismatch in check(case)}
        if mismatches:
            _tell({"case": index, "call": case.describe(), "mismatches": mismatches})
    faulthandler.cancel_dump_traceback_later()


def _tell(event: dict) -> None:
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()
