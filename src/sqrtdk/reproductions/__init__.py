"""Results of the literature on attention's scale, computed again: each states what it expects before it runs."""

from sqrtdk.reproductions import exact as exact  # these three add their reproductions to the list
from sqrtdk.reproductions import lab_runs as lab_runs
from sqrtdk.reproductions import small_models as small_models
from sqrtdk.reproductions.reproduction import REPRODUCTIONS, Reproduction, list_expectations, reproduce

__all__ = ["REPRODUCTIONS", "Reproduction", "list_expectations", "reproduce"]
