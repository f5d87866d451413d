"""Implementations of attention: list, inspect and force them; the only reader of environment variables.

A backend is a CPU level of the compiled kernel (`avx512_bf16`, `avx512`, `avx2`, `portable`) or `reference`, the
float64 NumPy operation that is always there. The best one that runs here is used unless `SQRTDK_BACKEND` or `use` names
another. The choice and the number of threads hold for the whole process; the environment is read at first use, not at
import.
"""

from __future__ import annotations

import builtins
import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import ModuleType, TracebackType
from typing import Any, NamedTuple

from sqrtdk import checks
from sqrtdk.compiled import load_kernel
from sqrtdk.errors import InvalidTypeError, InvalidValueError, unknown_name, warn
from sqrtdk.operation.call import FIELDS
from sqrtdk.operation.cpus import count_cpus
from sqrtdk.statistics import ROW_FIELDS

__all__ = ["REFERENCE", "Backend", "current", "inspect", "list", "threads", "use", "use_threads"]

REFERENCE = "reference"
MAX_THREADS = 256

_ABOUT = {
    "avx512_bf16": "as avx512, and bfloat16 by dot products of pairs",
    "avx512": "C++ with AVX-512 intrinsics: 16 float32 or 8 float64 in a vector",
    "avx2": "C++ with AVX2 and FMA intrinsics: 8 float32 or 4 float64 in a vector",
    "portable": "C++ with the compiler's own vectors of 16 bytes; the level of ARM and of old x86",
    REFERENCE: "NumPy in float64, a block of rows at a time: the definition of what is right",
}


@dataclass(frozen=True)
class Backend:
    """One implementation: name, whether it runs on this machine, the reason if it does not, and a description."""

    name: str
    runs_here: bool
    why_not: str | None
    about: str


class Plan(NamedTuple):
    """Settings of a call: the kernel's passes (None: the reference), its level, its threads, and whether the user asked
    for this backend by name."""

    forward: Callable[..., bool] | None
    backward: Callable[..., bool] | None
    level: str
    threads: int
    is_forced: bool


class _Choice:
    """The user's choice and its plan. A new choice is a new object: a plan that one thread makes from an old choice,
    while another thread chooses, stays with the old choice and is never used again."""

    __slots__ = ("backend", "plan", "threads")

    def __init__(self, backend: str | None = None, threads: int | None = None) -> None:
        self.backend, self.threads = backend, threads
        self.plan: Plan | None = None


_choice = _Choice()
_choosing = threading.Lock()
_warned = False


def list() -> builtins.list[Backend]:
    """Return every backend, best first.

    >>> [backend.name for backend in list()]
    ['avx512_bf16', 'avx512', 'avx2', 'portable', 'reference']
    >>> list()[-1].runs_here
    True
    """
    kernel, reason = _load_kernel()
    compiled = {} if kernel is None else dict(kernel.levels())
    found = []
    for name, about in _ABOUT.items():
        if name == REFERENCE or compiled.get(name):
            why_not = None
        elif kernel is None:
            why_not = reason
        else:
            why_not = "this CPU lacks its instructions" if name in compiled else "not compiled for this machine"
        found.append(Backend(name, why_not is None, why_not, about))
    return found


def inspect(name: str) -> Backend:
    """Return a backend by its name; an unknown name raises and lists the known ones.

    >>> inspect("reference").runs_here
    True
    """
    for backend in list():
        if backend.name == name:
            return backend
    raise unknown_name("backend", name, [*_ABOUT])


def current() -> str:
    """Return the name of the backend that `sqrtdk.attention` uses now.

    >>> with use("reference"):
    ...     current()
    'reference'
    """
    return plan().level


def threads() -> int:
    """Return how many threads a call of the kernel may use; results do not depend on it.

    It is the number given to `use_threads`, else OMP_NUM_THREADS, else the number of CPUs that this process may use, by
    its affinity and its cgroup's quota.
    """
    return plan().threads


def use(name: str | None) -> AbstractContextManager[None]:
    """Force a backend by name, None for the default: from now on, or as long as a `with` block lasts.

    Raises:
        InvalidValueError: the name is unknown (the message lists the known ones), or the backend does not run here.

    >>> with use("portable" if inspect("portable").runs_here else "reference"):
    ...     forced = current()
    >>> forced in ("portable", "reference")
    True
    """
    if name is not None:
        _require_running("name", name)
    before = _choose(backend=name).backend
    return _Restoring(lambda: _choose(backend=before))


def use_threads(count: int | None) -> AbstractContextManager[None]:
    """Set the number of threads, None for the default: from now on, or as long as a `with` block lasts.

    >>> with use_threads(1):
    ...     threads()
    1
    """
    count = None if count is None else checks.integer("count", count, 1, MAX_THREADS)
    before = _choose(threads=count).threads
    return _Restoring(lambda: _choose(threads=before))


def _choose(**asked: Any) -> _Choice:
    """Change the named parts of the choice and return the former choice."""
    global _choice
    with _choosing:
        before = _choice
        _choice = _Choice(**{"backend": before.backend, "threads": before.threads, **asked})
        return before


def plan() -> Plan:
    """Return the backend and threads of the next call; computed once, and again after `use` or `use_threads`."""
    choice = _choice
    made = choice.plan
    if made is None:
        made = choice.plan = _make_plan(choice)
    return made


def warn_without_kernel() -> None:
    """Warn once per process that attention runs in NumPy because the kernel is missing.

    The first call gives a `SqrtdkWarning`. A user who chooses the reference (`use("reference")`,
    `SQRTDK_BACKEND=reference`) gets no warning, so programs that turn warnings into errors run.
    """
    global _warned
    if _warned or _choice.backend is not None or os.environ.get("SQRTDK_BACKEND"):
        return
    _warned = True
    reason = _load_kernel()[1]
    if reason is not None:
        warn(
            f"sqrtdk runs without its kernel ({reason}): attention is computed in NumPy, right but slow. "
            "SQRTDK_BACKEND=reference silences this; `sqrtdk info` tells more."
        )


class _Restoring:
    """Context manager that `use` returns: restores the former choice at the end of a `with` block."""

    def __init__(self, restore: Callable[[], object]) -> None:
        self._restore = restore

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()


def _make_plan(choice: _Choice) -> Plan:
    name = choice.backend
    if name is None:
        name = os.environ.get("SQRTDK_BACKEND") or None
        if name is not None:
            _require_running("SQRTDK_BACKEND", name)
    kernel, _ = _load_kernel()
    is_forced = name is not None
    if name is None:
        levels = [] if kernel is None else kernel.levels()  # best first
        name = next((level for level, runs_here in levels if runs_here), REFERENCE)
    count = choice.threads if choice.threads is not None else _default_threads()
    if kernel is None or name == REFERENCE:
        return Plan(None, None, name, count, is_forced)
    return Plan(kernel.forward, kernel.backward, name, count, is_forced)


def _require_running(argument: str, name: Any) -> None:
    if not isinstance(name, str):
        raise InvalidTypeError(argument, f"must be a backend's name or None, got {name!r}")
    backend = inspect(name)
    if not backend.runs_here:
        here = ", ".join(other.name for other in list() if other.runs_here)
        raise InvalidValueError(argument, f"must be a backend that runs here ({here}), got {name!r}: {backend.why_not}")


def _load_kernel() -> tuple[ModuleType | None, str | None]:
    """Return the compiled kernel and None, or None and the reason why it is missing."""
    kernel, reason = load_kernel()
    if kernel is None:
        return None, reason
    # Arguments and statistics are passed by position: another order would give wrong numbers.
    if (tuple(FIELDS), ROW_FIELDS) != (kernel.CALL_FIELDS, kernel.ROW_FIELDS):
        return None, "it was compiled from other sources: its fields of a call or statistics of a row are not these"
    return kernel, None


def _default_threads() -> int:
    asked = _first_number(os.environ.get("OMP_NUM_THREADS", ""))
    if asked is not None:
        return min(asked, MAX_THREADS)
    return min(count_cpus(), MAX_THREADS)


def is_openmp_stack_default() -> bool:
    """Return whether OpenMP threads have the system's stack size; the kernel's tiles might not fit on a smaller one."""
    return not any(os.environ.get(name) for name in ("OMP_STACKSIZE", "GOMP_STACKSIZE", "KMP_STACKSIZE"))


def _first_number(text: str) -> int | None:
    # OpenMP allows a list, one number per nesting level; other text is ignored, as OpenMP ignores it.
    first = text.split(",")[0].strip()
    return int(first) if first.isdecimal() and int(first) > 0 else None
