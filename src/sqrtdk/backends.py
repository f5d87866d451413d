"""Which implementations of attention are here: list, inspect, force them; the only reader of environment variables.

A backend is a CPU level of the compiled kernel (`avx512_bf16`, `avx512`, `avx2`, `portable`) or `reference`, the
float64 NumPy operation that is always there. The best one that runs here is used unless `SQRTDK_BACKEND` or `use` names
another. The choice and the number of threads hold for the whole process; the environment is read at first use, not at
import.
"""

from __future__ import annotations

import builtins
import math
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, NamedTuple

from sqrtdk.call import FIELDS
from sqrtdk.errors import InvalidTypeError, InvalidValueError, unknown_name, warn
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
    """One implementation: its name, whether it runs on this machine, why not if it does not, and what it is."""

    name: str
    runs_here: bool
    why_not: str | None
    about: str


class Plan(NamedTuple):
    """What a call of attention needs to know: the kernel's passes (None: the reference), its level, its threads, and
    whether somebody asked for this backend by name."""

    forward: Callable[..., bool] | None
    backward: Callable[..., bool] | None
    level: str
    threads: int
    is_forced: bool


class _Choice:
    """What the user asked for, and the plan made of it. Another choice is another object: a plan that one thread makes
    of an old choice while another thread chooses anew is kept with the old one, and never used again."""

    __slots__ = ("backend", "plan", "threads")

    def __init__(self, backend: str | None = None, threads: int | None = None) -> None:
        self.backend, self.threads = backend, threads
        self.plan: Plan | None = None


_choice = _Choice()
_choosing = threading.Lock()
_warned = False


def list() -> builtins.list[Backend]:
    """Every backend, best first.

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
    """One backend by its name; an unknown name raises and lists the known ones.

    >>> inspect("reference").runs_here
    True
    """
    for backend in list():
        if backend.name == name:
            return backend
    raise unknown_name("backend", name, [*_ABOUT])


def current() -> str:
    """The name of the backend that `sqrtdk.attention` uses now.

    >>> with use("reference"):
    ...     current()
    'reference'
    """
    return plan().level


def threads() -> int:
    """How many threads a call of the kernel may use; results do not depend on it.

    The number given to `use_threads`; else OMP_NUM_THREADS; else the CPUs this process may run on, by its affinity and
    its cgroup's quota.
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
    if count is not None:
        if isinstance(count, bool) or not isinstance(count, int):
            raise InvalidTypeError("count", f"must be an integer, got {count!r}")
        if not 1 <= count <= MAX_THREADS:
            raise InvalidValueError("count", f"must lie between 1 and {MAX_THREADS}, got {count}")
    before = _choose(threads=count).threads
    return _Restoring(lambda: _choose(threads=before))


def _choose(**asked: Any) -> _Choice:
    """Make another choice, what is not named as before, and give the former one."""
    global _choice
    with _choosing:
        before = _choice
        _choice = _Choice(**{"backend": before.backend, "threads": before.threads, **asked})
        return before


def plan() -> Plan:
    """The backend and threads of the next call; worked out once, and again after `use` or `use_threads`."""
    choice = _choice
    made = choice.plan
    if made is None:
        made = choice.plan = _make_plan(choice)
    return made


def warn_without_kernel() -> None:
    """Say once per process that attention runs in NumPy although nobody asked for it.

    A `SqrtdkWarning` at the first call. Choosing the reference (`use("reference")`, `SQRTDK_BACKEND=reference`) is
    asking for it: nothing is said then, and a program that turns warnings into errors runs.
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
    """The value of `use`: nothing to do at the start of a `with` block, the former choice at its end."""

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
        name = REFERENCE if kernel is None else kernel.best_level()
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
    """The compiled kernel, or why it is not there."""
    try:
        kernel = import_module("sqrtdk._kernel")
    except ImportError as error:
        # Not built is how it was installed; built and not loadable is a fault, and its own words say which.
        if isinstance(error, ModuleNotFoundError) and error.name == "sqrtdk._kernel":
            return None, "it was not compiled at installation"
        return None, f"it cannot be loaded: {error}"
    # Arguments and statistics cross by their place: another order would be other numbers.
    if (tuple(FIELDS), ROW_FIELDS) != (kernel.CALL_FIELDS, kernel.ROW_FIELDS):
        return None, "it was compiled from other sources: its fields of a call or statistics of a row are not these"
    return kernel, None


def _default_threads() -> int:
    asked = _first_number(os.environ.get("OMP_NUM_THREADS", ""))
    if asked is not None:
        return min(asked, MAX_THREADS)
    return min(count_cpus(), MAX_THREADS)


def count_cpus() -> int:
    """The CPUs this process may use, at least 1: by its affinity and its cgroup's quota.

    >>> 1 <= count_cpus() <= os.cpu_count()
    True
    """
    affinity = getattr(os, "sched_getaffinity", None)
    available = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    quota = read_cgroup_quota()
    return max(1, available if quota is None else min(available, math.ceil(quota)))


def is_openmp_stack_default() -> bool:
    """Whether threads of OpenMP have the system's stack: on a smaller one the kernel's tiles might not fit."""
    return not any(os.environ.get(name) for name in ("OMP_STACKSIZE", "GOMP_STACKSIZE", "KMP_STACKSIZE"))


def _first_number(text: str) -> int | None:
    # OpenMP allows a list, one number per nesting level; what it would not understand is ignored, as OpenMP does.
    first = text.split(",")[0].strip()
    return int(first) if first.isdecimal() and int(first) > 0 else None


def read_cgroup_quota(
    root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")
) -> float | None:
    """CPUs that this process's control groups (v2 or v1, the parents' too) allow it; None without a limit."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return None
    quotas = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        mount = root if not controllers else root / controllers
        quotas += [quota for group in _with_parents(mount, path) if (quota := _read_quota(group)) is not None]
    return min(quotas, default=None)


def _with_parents(mount: Path, path: str) -> Iterator[Path]:
    # Inside a container the path may name a group of the host; then only the mount itself is there to read.
    parts = [part for part in path.split("/") if part and part != ".."]
    for depth in range(len(parts) + 1):
        yield mount.joinpath(*parts[:depth])


def _read_quota(group: Path) -> float | None:
    try:
        if (group / "cpu.max").exists():
            quota, period = (group / "cpu.max").read_text().split()
        else:
            quota = (group / "cpu.cfs_quota_us").read_text().strip()
            period = (group / "cpu.cfs_period_us").read_text().strip()
        return None if quota in ("max", "-1") else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None
