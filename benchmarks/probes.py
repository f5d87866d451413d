"""Probes of the machine's present speed: multiply-adds, reading, and a matrix product.

A shared or throttled machine changes its speed while a benchmark runs. Probes run before and after every round, and a
round between two different probes is not counted.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np

from sqrtdk import backends

# A round counts if the slower of its two neighbouring probes reaches these shares of the faster one. The matrix product
# also depends on the state of the caches, so its limit is wider.
LEAST_SHARES = {"multiply_adds": 0.9, "gemm": 0.8}
_GEMM_SIZE = 768
# Idle threads of the last contender's OpenMP runtime spin for some milliseconds on cores that the next one needs.
_SETTLING_SECONDS = 0.01


class Probe(NamedTuple):
    """Speed of the machine per second: float32 multiply-adds, multiply-adds in a matrix product, bytes read.

    A value is None if it was not probed. Without the kernel only the matrix product is probed.
    """

    multiply_adds: float | None
    gemm: float
    bytes_read: float | None


class Prober:
    """Probes the machine with the threads and the CPU level of the benchmark, and keeps every result."""

    def __init__(self, level: str, threads: int) -> None:
        self._level = level
        self._threads = threads
        self._kernel = None if level == backends.REFERENCE else import_module("sqrtdk._kernel")
        self._multiply_matrices = _make_product()
        self.results: list[Probe] = []

    def probe(self, *, reading: bool = False) -> Probe:
        """Probe now and return the result; reading takes longer and is probed only on request."""
        self.settle()
        rate, read = None, None
        if self._kernel is not None:
            rate = float(self._kernel.probe_fma(self._level, self._threads))
            read = float(self._kernel.probe_read(self._level, self._threads)) if reading else None
        found = Probe(rate, self._probe_gemm(), read)
        self.results.append(found)
        return found

    @staticmethod
    def settle() -> None:
        """Wait until the threads of the last contender are asleep."""
        time.sleep(_SETTLING_SECONDS)

    def _probe_gemm(self) -> float:
        self._multiply_matrices()
        began = time.perf_counter()
        self._multiply_matrices()
        return _GEMM_SIZE**3 / (time.perf_counter() - began)


def best_of(probes: Sequence[Probe]) -> Probe:
    """Return the best value of each quantity.

    >>> best_of([Probe(None, 1.0, None), Probe(None, 3.0, 2.0)])
    Probe(multiply_adds=None, gemm=3.0, bytes_read=2.0)
    """
    columns = [[value for value in column if value is not None] for column in zip(*probes, strict=True)]
    multiply_adds, gemm, bytes_read = (max(column, default=None) for column in columns)
    return Probe(multiply_adds, gemm or 0.0, bytes_read)


def is_steady(before: Probe, after: Probe) -> bool:
    """Return whether the machine was about as fast after a round as before it.

    >>> is_steady(Probe(89.0, 100.0, None), Probe(100.0, 100.0, None))
    False
    >>> is_steady(Probe(50.0, 60.0, None), Probe(52.0, 55.0, None))
    True
    """
    for name, share in LEAST_SHARES.items():
        one, other = getattr(before, name), getattr(after, name)
        if one is not None and other is not None and min(one, other) < share * max(one, other):
            return False
    return True


def _make_product() -> Callable[[], Any]:
    """Return a float32 matrix product by torch, which respects the number of threads; by NumPy without torch."""
    shape = (2, _GEMM_SIZE, _GEMM_SIZE)
    a, b = np.random.default_rng(0).standard_normal(shape, dtype=np.float32)
    if importlib.util.find_spec("torch") is None:
        return lambda: a @ b
    import torch

    left, right = torch.from_numpy(a), torch.from_numpy(b)
    return lambda: left @ right
