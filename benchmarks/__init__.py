"""Benchmarks: sqrtdk beside its peers, interleaved, with probes of the machine and errors beside every ratio."""

from benchmarks.benchmark import run_benchmark, write_raw
from benchmarks.suites import SUITES

__all__ = ["SUITES", "run_benchmark", "write_raw"]
