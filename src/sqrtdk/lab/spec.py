"""What to train, as data: one run, and the grid of runs that makes an ablation. Loads no torch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from sqrtdk import scales
from sqrtdk.errors import InvalidTypeError, InvalidValueError, unknown_name
from sqrtdk.lab import tasks
from sqrtdk.records import spec_hash

INITS = ("unit", "torch", "xavier", "absorbed")

# Part of every run's hash: raise it when the code changes what a run leaves, so that old runs are not reused.
REVISION = 4


def _require_count(name: str, value: object, least: int = 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidTypeError(f"{name} must be an integer, got {type(value).__name__} {value!r}")
    if value < least:
        raise InvalidValueError(f"{name} must be at least {least}, got {value}")


def _require_scale(name: str, value: object) -> None:
    if not isinstance(value, str):
        raise InvalidTypeError(f"{name} must be the name of a scaling policy, got {type(value).__name__}")
    if value in scales.LEARNABLE:
        return
    known = {*scales.names(), *scales.LEARNABLE}
    if value.partition(":")[0] not in known:
        raise unknown_name("scaling policy", value, list(known))
    scales.resolve(value)


@dataclass(frozen=True)
class RunSpec:
    """One training run. Equal specs give equal numbers; runs that differ only in `scale` see the same data.

    Args:
        task: ``"recall"`` or ``"text"``.
        scale: a registered scaling policy by name, parameters as in ``"fixed:10"``, or one that learns:
            ``"learned"``, ``"query"``, ``"position"``, ``"qk_norm"`` (``"qk_norm:1"`` has a fixed gain of 1).
        d_k: length of a head's queries and keys; values have length d_model / heads whatever d_k is.
        seed: draws the weights and the order of the data.
        init: how W_q and W_k begin: ``"unit"``, ``"torch"``, ``"xavier"`` or ``"absorbed"``.
        lr: learning rate of Adam.
        steps: updates, `start_steps` not counted.
        batch: sequences per update.
        layers: blocks of the transformer.
        d_model: width of the residual stream.
        heads: attention heads per block.
        feedforward: hidden width of each block's feed-forward part; 0 leaves it out (attention only).
        task_parameters: what the task takes (`pairs` and `symbols`, or `context`).
        record_every: steps from one point of the curves to the next.
        start_scale: train with this policy for `start_steps` first, then swap to `scale`; None: no swap.
        start_steps: updates before the swap.

    >>> RunSpec(scale="sqrt").key == RunSpec(scale="sqrt", seed=1).key
    False
    """

    task: str = "recall"
    scale: str = "sqrt"
    d_k: int = 64
    seed: int = 0
    init: str = "unit"
    lr: float = 1e-3
    steps: int = 600
    batch: int = 16
    layers: int = 2
    d_model: int = 64
    heads: int = 1
    feedforward: int = 0
    task_parameters: Mapping[str, Any] = field(default_factory=dict)
    record_every: int = 10
    start_scale: str | None = None
    start_steps: int = 0

    def __post_init__(self) -> None:
        tasks.get(self.task, self.task_parameters)
        _require_scale("scale", self.scale)
        for name in ("d_k", "steps", "batch", "layers", "d_model", "heads", "record_every"):
            _require_count(name, getattr(self, name))
        for name in ("seed", "feedforward", "start_steps"):
            _require_count(name, getattr(self, name), least=0)
        if self.init not in INITS:
            raise unknown_name("init", self.init, list(INITS))
        if isinstance(self.lr, bool) or not isinstance(self.lr, int | float):
            raise InvalidTypeError(f"lr must be a number, got {type(self.lr).__name__}")
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise InvalidValueError(f"lr must be positive and finite, got {self.lr!r}")
        if self.d_model % self.heads:
            raise InvalidValueError(f"d_model must be a multiple of heads ({self.heads}), got {self.d_model}")
        if (self.start_scale is None) != (self.start_steps == 0):
            raise InvalidValueError(
                f"start_scale and start_steps go together, got {self.start_scale!r} and {self.start_steps}"
            )
        if self.start_scale is not None:
            _require_scale("start_scale", self.start_scale)

    @property
    def total_steps(self) -> int:
        """All updates, those before a swap included."""
        return self.start_steps + self.steps

    def make_task(self) -> tasks.Task:
        """The task with its parameters."""
        return tasks.get(self.task, self.task_parameters)

    def as_dict(self) -> dict[str, Any]:
        """The fields as plain values, the task's parameters complete."""
        return {**asdict(self), "lr": float(self.lr), "task_parameters": asdict(self.make_task())}

    @property
    def key(self) -> str:
        """The run's name in a store: a hash of all that decides its numbers."""
        return spec_hash({**self.as_dict(), "revision": REVISION, "data": self.make_task().data_hash})


@dataclass(frozen=True)
class AblationSpec:
    """A grid of runs: every scale × d_k × init × learning rate, each with every seed.

    Args:
        task, steps, batch, layers, d_model, heads, feedforward, task_parameters, record_every: as in `RunSpec`.
        scales: scaling policies by name, those that learn included.
        d_ks: lengths of queries and keys.
        seeds: how many seeds (0, 1, …), or the seeds themselves.
        lrs: learning rates; give three or more to compare each policy at its own best.
        inits: how W_q and W_k begin.
        also: further (scale, init) pairs beside the grid, such as the control ``("none", "absorbed")``.

    >>> len(AblationSpec(scales=("none", "sqrt"), seeds=3).runs())
    6
    """

    task: str = "recall"
    scales: Sequence[str] = ("none", "sqrt", "inverse")
    d_ks: Sequence[int] = (64,)
    seeds: int | Sequence[int] = 8
    steps: int = 600
    lrs: Sequence[float] = (1e-3,)
    inits: Sequence[str] = ("unit",)
    also: Sequence[tuple[str, str]] = ()
    heads: int = 1
    layers: int = 2
    d_model: int = 64
    batch: int = 16
    feedforward: int = 0
    task_parameters: Mapping[str, Any] = field(default_factory=dict)
    record_every: int = 10

    def __post_init__(self) -> None:
        for name in ("scales", "d_ks", "lrs", "inits"):
            _require_distinct(name, getattr(self, name))
        list_seeds(self.seeds)
        self.runs()

    def runs(self) -> list[RunSpec]:
        """The runs, seed by seed, so that a sweep broken off leaves whole pairs to compare."""
        settings = [(scale, init) for init in self.inits for scale in self.scales]
        settings += [setting for setting in self.also if setting not in settings]
        grid = itertools.product(list_seeds(self.seeds), self.d_ks, self.lrs, settings)
        return [
            RunSpec(
                task=self.task,
                scale=scale,
                d_k=d_k,
                seed=seed,
                init=init,
                lr=lr,
                steps=self.steps,
                batch=self.batch,
                layers=self.layers,
                d_model=self.d_model,
                heads=self.heads,
                feedforward=self.feedforward,
                task_parameters=self.task_parameters,
                record_every=self.record_every,
            )
            for seed, d_k, lr, (scale, init) in grid
        ]

    def as_dict(self) -> dict[str, Any]:
        """The fields as plain values, seeds and the task's parameters listed in full."""
        task = tasks.get(self.task, self.task_parameters)
        plain = {name: list(getattr(self, name)) for name in ("scales", "d_ks", "lrs", "inits")}
        return {**asdict(self), **plain, "seeds": list_seeds(self.seeds), "task_parameters": asdict(task)}


def list_seeds(seeds: int | Sequence[int]) -> list[int]:
    """The seeds that a number of seeds, or a list of them, stands for.

    >>> list_seeds(3), list_seeds((7, 9))
    ([0, 1, 2], [7, 9])
    """
    if isinstance(seeds, int):
        _require_count("seeds", seeds)
        return list(range(seeds))
    _require_distinct("seeds", seeds)
    for seed in seeds:
        _require_count("seed", seed, least=0)
    return list(seeds)


def _require_distinct(name: str, values: object) -> None:
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise InvalidTypeError(f"{name} must be a sequence, got {type(values).__name__} {values!r}")
    if not values:
        raise InvalidValueError(f"{name} must name at least one value, got none")
    if len(set(values)) != len(values):
        raise InvalidValueError(f"{name} must not repeat a value, got {list(values)}")
