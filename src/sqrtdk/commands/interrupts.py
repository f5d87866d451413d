"""Second Ctrl-C of a command: ends the process even while the main thread computes."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

INTERRUPTED = 130
"""Exit code after Ctrl-C."""

_SHOW_CURSOR = b"\x1b[?25h"


@contextmanager
def leaving_at_second_interrupt() -> Iterator[None]:
    """End the process at the second Ctrl-C, in the main thread of a command.

    Python handles signals between two of its own instructions. One operation of torch may take longer than a second,
    and the two signals that arrive meanwhile would count as one. Another thread therefore reads the bytes that Python
    writes for each signal as the signal arrives. Stores survive such an end as they survive a kill.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    thread = threading.Thread(target=_wait_for_two, args=(reader,), daemon=True, name="sqrtdk-interrupts")
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        writer.close()
        thread.join()


def _wait_for_two(reader: socket.socket) -> None:
    """Wait for two interrupts and end the process, or for the end of the command."""
    count = 0
    with reader:
        while received := reader.recv(64):
            count += received.count(signal.SIGINT)
            if count > 1:
                if sys.stderr.isatty():
                    os.write(sys.stderr.fileno(), _SHOW_CURSOR)  # progress bars hide it
                os._exit(INTERRUPTED)
