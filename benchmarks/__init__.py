"""Benchmarks of sqrtdk against its peers: interleaved timings, machine probes, and an error beside every ratio."""

from benchmarks.benchmark import run_benchmark, write_raw
from benchmarks.suites import SUITES

__all__ = ["SUITES", "run_benchmark", "write_raw"]
