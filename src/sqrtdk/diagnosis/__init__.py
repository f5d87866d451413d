"""From head summaries to findings: facts from a snapshot, the rest with a trend or a backward pass."""

from sqrtdk.diagnosis.findings import Finding, Threshold
from sqrtdk.diagnosis.judge import diagnose
from sqrtdk.diagnosis.patterns import pattern_of, patterns

__all__ = ["Finding", "Threshold", "diagnose", "pattern_of", "patterns"]
