"""Summaries of rows per head: moments and quantiles of row statistics, and the most attended keys."""

from sqrtdk.summary.heads import FARTHEST, SUMMARISED, HeadSummary, MaxKeys
from sqrtdk.summary.moments import BIN_EDGES, Moments

__all__ = ["BIN_EDGES", "FARTHEST", "SUMMARISED", "HeadSummary", "MaxKeys", "Moments"]
