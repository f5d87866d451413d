"""Starts a server of the pages in its own process, and reads its use of the machine."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple


class Running(NamedTuple):
    process: subprocess.Popen[str]
    address: str

    @property
    def port(self) -> int:
        return int(re.search(r":(\d+)/", self.address)[1])  # type: ignore[index]

    def read(self, path: str, timeout: float = 30.0) -> bytes:
        with urllib.request.urlopen(self.address + path, timeout=timeout) as reply:
            return bytes(reply.read())

    def files(self) -> int:
        """Return the number of open file descriptors."""
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))

    def status(self, name: str) -> int:
        """Return a number from the kernel's status of the process, such as VmRSS in KiB or Threads."""
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(rf"^{name}:\s+(\d+)", text, re.MULTILINE)[1])  # type: ignore[index]


def start_serving(*arguments: str, program: Sequence[str] = (sys.executable, "-m", "sqrtdk")) -> subprocess.Popen[str]:
    command = [*program, "serve", "--port", "0", *arguments]
    # Background jobs of a shell ignore Ctrl-C, but the server must receive it.
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


@contextmanager
def serving(*arguments: Any, **options: Any) -> Iterator[Running]:
    """Yield a server that answers; Ctrl-C ends the server, which must exit cleanly. Options are `start_serving`'s."""
    process = start_serving(*map(str, arguments), **options)
    try:
        line = process.stdout.readline()  # type: ignore[union-attr]
        found = re.search(r"http://\S+", line)
        assert found, (line, process.communicate()[1])
        yield Running(process, found[0])
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=10)
        assert (process.returncode, told) == (0, ""), told
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdout, process.stderr):
            pipe.close()  # type: ignore[union-attr]
