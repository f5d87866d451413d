"""Experiments: a spec becomes runs, runs become a record. torch loads only where something is trained."""

from sqrtdk.lab.ablation import ablate
from sqrtdk.lab.spec import INITS, AblationSpec, RunSpec
from sqrtdk.lab.store import RunRecord, Store
from sqrtdk.lab.swap import swap_scale
from sqrtdk.lab.sweep import Progress, run_all

__all__ = [
    "INITS",
    "AblationSpec",
    "Progress",
    "RunRecord",
    "RunSpec",
    "Store",
    "ablate",
    "run_all",
    "swap_scale",
]
