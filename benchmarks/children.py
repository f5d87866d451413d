"""Runs contenders in processes of their own, which answer through pipes and are stopped while others run.

Idle threads of one library spin on cores that the next library needs (onnxruntime: for more than 0.1 s), and two
OpenMP runtimes in one process disturb each other. A library that dies or hangs affects only its own process.
"""

from __future__ import annotations

import ctypes
import signal
import socket
import subprocess
import sys
import tempfile
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.contender import Contender, NotForThisCaseError, PeerError, TimedCall
from benchmarks.task import ContenderResult
from benchmarks.timing import describe_error, time_run
from sqrtdk import backends

# Limits for importing, compiling and the first call, and for one timing.
PREPARING_SECONDS, TIMING_SECONDS = 300.0, 120.0
_ENDING_SECONDS = 5.0
_PR_SET_PDEATHSIG = 1
# Module and function by which a process looks up its contender.
FINDER = "benchmarks.contenders:find_contender"


class Guest:
    """Contender in its own process, which starts with the first case and ends with `close`.

    A process that died, or was ended because it did not answer in time, is not started again. Every further case raises
    an error with the reason.

    Args:
        name: name of the contender.
        backend, threads: settings of sqrtdk and torch in the process.
        finder: function that looks up the contender, "module:function".
    """

    def __init__(self, name: str, backend: str, threads: int, finder: str = FINDER) -> None:
        self._name = name
        self._setting = (name, backend, threads, finder)
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self._lost: str | None = None

    def as_contender(self) -> Contender:
        """Return the contender in the form that `measure` takes; its runs are timed in the process."""
        return Contender(self._name, (), self._prepare, lambda answer: answer)

    def close(self) -> None:
        """End the process."""
        if self._connection is not None:
            self._connection.close()  # the process ends when it reads the closed pipe
            self._connection = None
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            try:
                self._process.wait(_ENDING_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None
        self._errors.close()

    def _prepare(self, case: Any, inputs: Any, threads: int) -> _GuestRun:
        if self._lost is not None:
            raise PeerError(self._lost)
        if self._process is None:
            self._start()
        self.ask(PREPARING_SECONDS, "prepare", case, inputs)
        return _GuestRun(self)

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            number = theirs.fileno()
            call = "import sys; from benchmarks.children import serve; serve(int(sys.argv[1]))"
            self._process = subprocess.Popen(
                [sys.executable, "-c", call, str(number)],
                pass_fds=[number],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
            )
        self._connection = Connection(ours.detach())
        self._connection.send(self._setting)

    def ask(self, seconds: float, *question: Any) -> Any:
        """Return the answer of the process to a question.

        Raises:
            NotForThisCaseError: if the contender cannot compute the case.
            PeerError: if the process failed, died, or was ended because it did not answer in time.
        """
        assert self._process is not None
        assert self._connection is not None
        self._process.send_signal(signal.SIGCONT)
        try:
            self._connection.send(question)
            if not self._connection.poll(seconds):
                self._end(f"did not answer within {seconds:.0f} s and was ended")
            kind, content = self._connection.recv()
        except (EOFError, OSError):
            self._end(None)
        self._process.send_signal(signal.SIGSTOP)
        if kind == "refused":
            raise NotForThisCaseError(content)
        if kind == "failed":
            raise PeerError(content)
        return content

    def _end(self, reason: str | None) -> None:
        """End the process and raise with the given reason, else with the exit status and the last line of stderr."""
        assert self._process is not None
        if reason is None:
            reason = _describe_end(self._process)
            self._errors.seek(0)
            words = self._errors.read().decode(errors="replace").strip().splitlines()[-1:]
            reason = ": ".join([reason, *words])
        self._process.kill()
        self._process.wait()
        self._lost = reason
        raise PeerError(reason)


def _describe_end(process: subprocess.Popen[bytes]) -> str:
    try:
        code = process.wait(_ENDING_SECONDS)
    except subprocess.TimeoutExpired:
        return "its process closed the pipe"
    return f"its process was ended by {signal.Signals(-code).name}" if code < 0 else f"its process ended with {code}"


class _GuestRun:
    """Run that a guest prepared last."""

    def __init__(self, guest: Guest) -> None:
        self._guest = guest

    def __call__(self) -> ContenderResult:
        """Run once and return the result."""
        answer: ContenderResult = self._guest.ask(PREPARING_SECONDS, "run")
        return answer

    def time(self, repeats: int, warm_up: bool) -> float:
        """Return the seconds of one call, by the clock of the process."""
        return float(self._guest.ask(TIMING_SECONDS, "time", repeats, warm_up))


def serve(number: int) -> None:
    """Answer questions in the guest's process until the pipe ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to end
    _end_with_parent()
    connection = Connection(number)
    name, backend, threads, finder = connection.recv()
    module, function = finder.split(":")
    contender: Contender = getattr(import_module(module), function)(name)
    if "torch" in contender.needs:
        import torch

        torch.set_num_threads(threads)
    host = _Host(contender, threads)
    with backends.use(backend), backends.use_threads(threads):
        while True:
            try:
                kind, *rest = connection.recv()
            except EOFError:
                return
            try:
                answer = ("done", getattr(host, kind)(*rest))
            except NotForThisCaseError as reason:
                answer = ("refused", str(reason))
            except Exception as error:  # the parent reports any error of another library
                answer = ("failed", describe_error(error))
            connection.send(answer)


def _end_with_parent() -> None:
    """Ask Linux to kill this process when the parent ends, because a stopped process would not notice."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))


class _Host:
    """Questions that a guest answers; they concern the run that was prepared last."""

    def __init__(self, contender: Contender, threads: int) -> None:
        self._contender, self._threads = contender, threads
        self._run: TimedCall = lambda: None

    def prepare(self, case: Any, inputs: Any) -> None:
        self._run = self._contender.prepare(case, inputs, self._threads)

    def run(self) -> ContenderResult:
        return self._contender.read(self._run())

    def time(self, repeats: int, warm_up: bool) -> float:
        return time_run(self._run, repeats, warm_up)
