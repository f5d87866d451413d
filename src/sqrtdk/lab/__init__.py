"""Experiments: a spec becomes runs, and runs become a record. torch loads only for training."""

from sqrtdk.lab.ablation import ablate
from sqrtdk.lab.grid import GridSpec, plan_grid, read_grid, train_grid
from sqrtdk.lab.laboratory import Executor, Lab, choose_executor
from sqrtdk.lab.processes import Processes
from sqrtdk.lab.ray_cluster import Ray
from sqrtdk.lab.spec import CONTROLS, INITS, STEPS, AblationSpec, Choice, RunSpec
from sqrtdk.lab.store import RunRecord, Store
from sqrtdk.lab.swap import swap_scale
from sqrtdk.lab.sweep import Progress

__all__ = [
    "CONTROLS",
    "INITS",
    "STEPS",
    "AblationSpec",
    "Choice",
    "Executor",
    "GridSpec",
    "Lab",
    "Processes",
    "Progress",
    "Ray",
    "RunRecord",
    "RunSpec",
    "Store",
    "ablate",
    "choose_executor",
    "plan_grid",
    "read_grid",
    "swap_scale",
    "train_grid",
]
