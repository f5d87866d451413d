"""CPUs that this process may use, by its affinity and its control groups."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path


def count_cpus() -> int:
    """Return the number of CPUs this process may use, at least 1, by its affinity and its cgroup's quota.

    >>> 1 <= count_cpus() <= os.cpu_count()
    True
    """
    affinity = getattr(os, "sched_getaffinity", None)
    available = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    quota = read_cgroup_quota()
    return max(1, available if quota is None else min(available, math.ceil(quota)))


def read_cgroup_quota(
    root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")
) -> float | None:
    """Return the CPUs that this process's control groups and their parents (v2 or v1) allow; None without a limit."""
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
