"""Contenders in processes of their own, asked in turn through pipes, and stopped while they are not.

Idle threads of one library spin on the cores that the next one needs (those of onnxruntime beyond 0.1 s), and two
OpenMP runtimes in a process are in each other's way. A library that dies or hangs loses itself and nobody else.
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

from benchmarks.contender import Contender, NotForThisCaseError, PeerError, Run
from benchmarks.task import Answer
from benchmarks.timing import describe_error, time_run
from sqrtdk import backends

# Importing, compiling and the first call; then one timing.
PREPARING_SECONDS, TIMING_SECONDS = 300.0, 120.0
_ENDING_SECONDS = 5.0
_PR_SET_PDEATHSIG = 1
# Where a process looks its contender up: a module and a function in it.
FINDER = "benchmarks.contenders:find_contender"


class Guest:
    """One contender in a process of its own, which begins with the first case and ends with `close`.

    A process that died, or was ended because it did not answer in time, is not started again: every further case says
    what became of it.

    Args:
        name: of the contender.
        backend, threads: what sqrtdk and torch are set to over there.
        finder: where the contender is looked up, "module:function".
    """

    def __init__(self, name: str, backend: str, threads: int, finder: str = FINDER) -> None:
        self._name = name
        self._setting = (name, backend, threads, finder)
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self._lost: str | None = None

    def as_contender(self) -> Contender:
        """The contender as `measure` takes it; its runs are timed over there."""
        return Contender(self._name, (), self._prepare, lambda answer: answer)

    def close(self) -> None:
        """End the process."""
        if self._connection is not None:
            self._connection.close()  # it ends when it reads that
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
            call = "import sys; from benchmarks.apart import serve; serve(int(sys.argv[1]))"
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
        """What the process answers.

        Raises:
            NotForThisCaseError: it has no way to compute the case.
            PeerError: it failed, died, or did not answer in so many seconds and was ended.
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
        """End the process, and say why: for the reason given, or with how it ended and its last words."""
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
    """The run that a guest prepared last."""

    def __init__(self, guest: Guest) -> None:
        self._guest = guest

    def __call__(self) -> Answer:
        """Run it once and bring the answer."""
        answer: Answer = self._guest.ask(PREPARING_SECONDS, "run")
        return answer

    def time(self, repeats: int, warm_up: bool) -> float:
        """Seconds of one call, by the clock over there."""
        return float(self._guest.ask(TIMING_SECONDS, "time", repeats, warm_up))


def serve(number: int) -> None:
    """The guest's side: answer questions until the pipe ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who asks decides when it is over
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
            except Exception as error:  # whatever another library raises is told by who asked
                answer = ("failed", describe_error(error))
            connection.send(answer)


def _end_with_parent() -> None:
    """A process that is stopped would not notice that nobody asks any more."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))


class _Host:
    """What a guest can be asked; its run is the one prepared last."""

    def __init__(self, contender: Contender, threads: int) -> None:
        self._contender, self._threads = contender, threads
        self._run: Run = lambda: None

    def prepare(self, case: Any, inputs: Any) -> None:
        self._run = self._contender.prepare(case, inputs, self._threads)

    def run(self) -> Answer:
        return self._contender.read(self._run())

    def time(self, repeats: int, warm_up: bool) -> float:
        return time_run(self._run, repeats, warm_up)
