"""Specifications of training as data: one run, and the grid of runs that makes an ablation. Loads no torch."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from sqrtdk import checks, scales
from sqrtdk.errors import InvalidTypeError, InvalidValueError, unknown_name
from sqrtdk.lab import tasks
from sqrtdk.records.record import spec_hash

INITS = ("unit", "torch", "xavier", "rescaled", "grown")

_POWERS = {"unit": 0.0, "rescaled": -0.25, "grown": 0.25}
STEPS = tuple(_POWERS)

SELECTION_SEED = 1000
"""The first of the seeds on which learning rates are chosen."""

# Part of every run's hash: raise it when the code changes the numbers of a run, so that old runs are not reused. A new
# curve changes none: a run that was stored before lacks the curve, and figures leave the run out there.
REVISION = 6


def query_key_factor(name: str, d_k: int) -> float:
    """Return the factor on a start or a step of W_q and W_k: 1 (`unit`), dₖ^−¼ (`rescaled`) or dₖ^¼ (`grown`).

    >>> [query_key_factor(name, 16) for name in STEPS]
    [1.0, 0.5, 2.0]
    """
    return float(d_k ** _POWERS[name])


def _require_scale(name: str, value: object) -> None:
    if not isinstance(value, str):
        raise InvalidTypeError(name, f"must be the name of a scaling policy, got {type(value).__name__}")
    if value in scales.LEARNABLE:
        return
    known = {*scales.names(), *scales.LEARNABLE}
    if value.partition(":")[0] not in known:
        raise unknown_name("scaling policy", value, list(known), "scale")
    scales.resolve(value)


@dataclass(frozen=True)
class RunSpec:
    """One training run. Equal specs give equal numbers; runs that differ only in `scale` see the same data.

    Args:
        task: ``"recall"``, ``"text"`` or ``"digits"``.
        scale: a registered scaling policy by name, parameters as in ``"fixed:10"``, or one that learns:
            ``"learned"``, ``"query"``, ``"position"``, ``"qk_norm"`` (``"qk_norm:1"`` has a fixed gain of 1).
        d_k: length of a head's queries and keys; values have length d_model / heads whatever d_k is.
        seed: seed of the weights and of the order of the data.
        init: how W_q and W_k begin: ``"unit"``, ``"torch"``, ``"xavier"``, ``"rescaled"`` (unit × dₖ^−¼) or
            ``"grown"`` (unit × dₖ^¼).
        qk_step: the step of W_q and W_k beside that of the other weights: ``"unit"`` (the same learning rate),
            ``"rescaled"`` (× dₖ^−¼) or ``"grown"`` (× dₖ^¼). With the init's own factor W_q and W_k begin and move as
            if the factor stood outside them.
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
        stop_above: end the run as diverged when the training loss of a point exceeds so many times the loss of a
            guess; None: only when a loss is not finite.

    >>> RunSpec(scale="sqrt").key == RunSpec(scale="sqrt", seed=1).key
    False
    """

    task: str = "recall"
    scale: str = "sqrt"
    d_k: int = 64
    seed: int = 0
    init: str = "unit"
    qk_step: str = "unit"
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
    stop_above: float | None = None

    def __post_init__(self) -> None:
        tasks.get(self.task, self.task_parameters)
        _require_scale("scale", self.scale)
        for name in ("d_k", "steps", "batch", "layers", "d_model", "heads", "record_every"):
            object.__setattr__(self, name, checks.integer(name, getattr(self, name), 1))
        for name in ("seed", "feedforward", "start_steps"):
            object.__setattr__(self, name, checks.integer(name, getattr(self, name), 0))
        object.__setattr__(self, "lr", checks.number("lr", self.lr, above=0.0))
        if self.stop_above is not None:
            object.__setattr__(self, "stop_above", checks.number("stop_above", self.stop_above, above=1.0))
        if self.init not in INITS:
            raise unknown_name("init", self.init, list(INITS))
        if self.qk_step not in STEPS:
            raise unknown_name("qk_step", self.qk_step, list(STEPS))
        if self.d_model % self.heads:
            raise InvalidValueError(
                "d_model", f"must be a multiple of heads ({self.heads}), got {self.d_model}", "heads"
            )
        if (self.start_scale is None) != (self.start_steps == 0):
            raise InvalidValueError(
                f"start_scale and start_steps go together, got {self.start_scale!r} and {self.start_steps}"
            )
        if self.start_scale is not None:
            _require_scale("start_scale", self.start_scale)

    @property
    def total_steps(self) -> int:
        """Return all updates, those before a swap included."""
        return self.start_steps + self.steps

    def make_task(self) -> tasks.Task:
        """Return the task with its parameters."""
        return tasks.get(self.task, self.task_parameters)

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as plain values, the task's parameters complete; without `stop_above` where it is None."""
        return _leave_out_none({**asdict(self), "task_parameters": asdict(self.make_task())})

    @property
    def key(self) -> str:
        """Return the run's name in a store: a hash of all that decides its numbers."""
        return spec_hash({**self.as_dict(), "revision": REVISION, "data": self.make_task().data_hash})


class Choice(NamedTuple):
    """Setting whose learning rate is chosen: all that its runs have in common but the rate."""

    scale: str
    d_k: int
    init: str = "unit"
    qk_step: str = "unit"


CONTROLS = (
    ("none", "rescaled", "unit"),
    ("none", "unit", "rescaled"),
    ("none", "rescaled", "rescaled"),
    ("inverse", "grown", "unit"),
)
"""No scaling with rescaled init, with rescaled step, with both; and 1/dₖ with rescaled init."""


@dataclass(frozen=True)
class AblationSpec:
    """Grid of settings: every scale × init beside the pairs of `also`, at every d_k, each trained with every seed.

    With several learning rates each setting has the one that is best on the selection seeds, which are none of `seeds`;
    only that one is trained with `seeds`.

    Args:
        task, steps, batch, layers, d_model, heads, feedforward, task_parameters, record_every, stop_above: as in
            `RunSpec`.
        scales: scaling policies by name, those that learn included.
        d_ks: lengths of queries and keys.
        seeds: how many seeds (0, 1, …), or the seeds themselves.
        lrs: learning rates to choose from.
        inits: how W_q and W_k begin.
        also: further (scale, init) or (scale, init, qk_step) beside the grid, such as `CONTROLS`.
        selection: how many seeds (1000, 1001, …) choose among several learning rates.
        rates: learning rates that were chosen before, by setting, in place of `lrs`.

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
    also: Sequence[tuple[str, ...]] = ()
    heads: int = 1
    layers: int = 2
    d_model: int = 64
    batch: int = 16
    feedforward: int = 0
    task_parameters: Mapping[str, Any] = field(default_factory=dict)
    record_every: int = 10
    stop_above: float | None = None
    selection: int = 4
    rates: Mapping[Choice, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("scales", "d_ks", "lrs", "inits"):
            checks.distinct(name, getattr(self, name))
        object.__setattr__(self, "selection", checks.integer("selection", self.selection, 1))
        clash = set(list_seeds(self.seeds)) & set(self.selection_seeds)
        if clash:
            raise InvalidValueError("seeds", f"must not be among those that choose the learning rate, got {min(clash)}")
        for also in self.also:
            if not 2 <= len(also) <= 3:
                raise InvalidValueError("also", f"must hold (scale, init) or (scale, init, qk_step), got {also!r}")
        self.selection_runs()
        self.runs()

    @property
    def selection_seeds(self) -> list[int]:
        """Return the seeds that choose the learning rates; none where there is nothing to choose."""
        return list(range(SELECTION_SEED, SELECTION_SEED + self.selection)) if len(self.lrs) > 1 else []

    def choices(self) -> list[Choice]:
        """Return the settings of the grid, d_k by d_k."""
        grid = [(scale, init, "unit") for init in self.inits for scale in self.scales]
        also = [(scale, init, *(step or ("unit",))) for scale, init, *step in self.also]
        settings = dict.fromkeys([*grid, *also])
        return [Choice(scale, d_k, init, step) for d_k in self.d_ks for scale, init, step in settings]

    def selection_runs(self) -> list[RunSpec]:
        """Return the runs that choose learning rates: every rate with every selection seed; none for a single rate."""
        open_choices = [choice for choice in self.choices() if choice not in self.rates]
        grid = itertools.product(self.selection_seeds, self.lrs, open_choices)
        return [self._run(choice, seed, lr) for seed, lr, choice in grid]

    def runs(self, rates: Mapping[Choice, float] | None = None) -> list[RunSpec]:
        """Return the reported runs, seed by seed, so that a sweep broken off leaves whole pairs to compare.

        Args:
            rates: the learning rates that were chosen; a setting that is not named has the first of `lrs`.
        """
        known = {**self.rates, **(rates or {})}
        grid = itertools.product(list_seeds(self.seeds), self.choices())
        return [self._run(choice, seed, known.get(choice, self.lrs[0])) for seed, choice in grid]

    def _run(self, choice: Choice, seed: int, lr: float) -> RunSpec:
        shared = {name: getattr(self, name) for name in _SHARED}
        return RunSpec(**choice._asdict(), seed=seed, lr=lr, **shared)

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as plain values, seeds and the task's parameters listed in full."""
        task = tasks.get(self.task, self.task_parameters)
        plain = {name: list(getattr(self, name)) for name in ("scales", "d_ks", "lrs", "inits", "also")}
        return _leave_out_none(
            {
                **{name: getattr(self, name) for name in _SHARED},
                **plain,
                "seeds": list_seeds(self.seeds),
                "selection_seeds": self.selection_seeds,
                "rates": [{**choice._asdict(), "lr": lr} for choice, lr in self.rates.items()],
                "task_parameters": asdict(task),
            }
        )


_SHARED = (
    *("task", "steps", "heads", "layers", "d_model", "batch", "feedforward", "task_parameters", "record_every"),
    "stop_above",
)


def _leave_out_none(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a spec without `stop_above` where it is None: rows and records stay as they were."""
    return {name: value for name, value in fields.items() if name != "stop_above" or value is not None}


def list_seeds(seeds: int | Sequence[int]) -> list[int]:
    """Return the seeds that a number of seeds, or a list of them, stands for.

    >>> list_seeds(3), list_seeds((7, 9))
    ([0, 1, 2], [7, 9])
    """
    if not isinstance(seeds, Sequence):
        return list(range(checks.integer("seeds", seeds, 1, kind="an integer or a sequence of integers")))
    checks.distinct("seeds", seeds)
    return [checks.integer("seed", seed, 0) for seed in seeds]
