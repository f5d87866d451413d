"""Threads of torch's own OpenMP runtime, for the kernel to run on.

After every torch operation the idle threads of its runtime spin for milliseconds, on the cores that other threads would
need. A layer of GPT-2 small (4 × 512 tokens, two cores) takes 5% less time with the kernel on
these threads than with the kernel on threads of its own.
"""

from __future__ import annotations

import ctypes
import os
import re
from pathlib import Path

import torch

from sqrtdk import backends

_FORKED_WITHOUT_EXEC = 0x40

_address: int | None = None
_imported_by = os.getpid()


def find_team() -> int:
    """Return the address of `GOMP_parallel` in torch's runtime; 0 without one, for the kernel's own threads.

    Looked for at the first call. In a forked child it is 0: threads that the parent may have started are not there, and
    the runtime would wait for them for ever.
    """
    global _address
    if _address is None:
        _address = _look_for_team()
        if _address:
            os.register_at_fork(after_in_child=_forget)
    return _address


def _forget() -> None:
    global _address
    _address = 0


def _is_forked() -> bool:
    """Return whether this process is a fork that has not started a program of its own.

    Linux keeps the flag PF_FORKNOEXEC for each process, so the parent need not have imported this module.
    """
    try:
        after_name = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        return os.getpid() != _imported_by or bool(int(after_name[6]) & _FORKED_WITHOUT_EXEC)
    except (OSError, IndexError, ValueError):  # not Linux
        return os.getpid() != _imported_by


def _look_for_team() -> int:
    if _is_forked() or not backends.is_openmp_stack_default() or "OpenMP" not in torch.__config__.parallel_info():
        return 0
    try:
        loaded = set(re.findall(r"\s(/\S*lib(?:gomp|omp|iomp5)\S*\.so\S*)", Path("/proc/self/maps").read_text()))
    except OSError:  # not Linux
        return 0
    # Among several runtimes in a process, the one beside torch's libraries is torch's.
    own = [path for path in loaded if Path(path).is_relative_to(Path(torch.__file__).parent.parent)]
    chosen = own if own else list(loaded)
    if len(chosen) != 1:
        return 0
    try:
        runtime = ctypes.CDLL(chosen[0], mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
        return ctypes.cast(runtime.GOMP_parallel, ctypes.c_void_p).value or 0
    except (OSError, AttributeError):
        return 0
