"""Monitor of a model in training: observes some steps, raises alerts from the trend, and clips heads if asked."""

from __future__ import annotations

import datetime
import math
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from typing import Any, Literal

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from sqrtdk import checks, errors
from sqrtdk.diagnosis import diagnose
from sqrtdk.diagnosis.alerts import Alert, Alerts, Trend
from sqrtdk.diagnosis.patterns import patterns
from sqrtdk.diagnosis.score_size import CauseSplit
from sqrtdk.diagnosis.trend_rules import spread_of_scores
from sqrtdk.errors import InvalidTypeError, InvalidValueError, SqrtdkError, unknown_name, warn
from sqrtdk.records.destinations import open_destination
from sqrtdk.records.json import plain
from sqrtdk.show.table import count
from sqrtdk.summary import HeadSummary
from sqrtdk.summary.heads import Array
from sqrtdk.torch.models.declared import declared_scale
from sqrtdk.torch.training.callbacks import StopTraining, make_lightning_callback, make_trainer_callback
from sqrtdk.torch.training.distributed import unite
from sqrtdk.torch.training.mesh import Ranks
from sqrtdk.torch.training.optimiser_copies import check_optimisers
from sqrtdk.torch.training.qk_clip import By, Clipping, check_rule, qk_clip_
from sqrtdk.torch.training.schedule import Schedule
from sqrtdk.torch.training.training_watch import Rows, TrainingWatch, check_rows
from sqrtdk.torch.watch.modules import name_modules
from sqrtdk.torch.watch.seen import Seen

# The monitor of each model.
_monitors: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Monitor]] = weakref.WeakKeyDictionary()

WAIT = datetime.timedelta(minutes=5)
"""Time that a rank waits for the others: below torch's default of 30 minutes, above the time to write a checkpoint."""


@dataclass(frozen=True)
class _Observation:
    """One observed step of all ranks: summaries, causes and scales by layer, and reasons for layers not understood."""

    step: int
    layers: Mapping[str, HeadSummary]
    causes: Mapping[str, CauseSplit]
    scales: Mapping[str, Mapping[str, Any]]
    unseen: Mapping[str, str]


class Monitor(AbstractContextManager["Monitor"]):
    """Observe selected training steps: report statistics per head, raise alerts, and clip heads if asked.

    Steps 0, 1, 2, 5, 10, 20 and 50 are observed, and every step whose number is a multiple of `every`. An observation
    passively watches all forward passes of that step in training mode with gradients, all micro-batches together.
    Outputs and gradients keep the same bits, and no hook remains between observations. (A compiled model runs eagerly
    in an observed step, so last digits may differ.) Each observation is written to `to` as a mapping

        {"run": an identifier, "restart": null, "resumed" or "rewound", "skipped": whether the optimiser did,
         "layers": {path: {"max_logit", "score_spread", "entropy_ratio", "saturation_index", "sink_weight", "rows",
                           "pattern", "query_norm", "key_spread", "alignment": [one entry per head]}},
         "unseen": {layer: why its attention was not understood},
         "alerts": [the fields of `Alert`], "clipped": what `qk_clip_` did, or null}

    and becomes a point of a bounded trend. `sqrtdk.diagnose` judges the trend: scores that pass 100 or soon will,
    collapsing entropy, NaN, scores that a dtype cannot hold, and undeclared scales. An alert is raised once per layer
    and rule, and once more if it becomes severe. An alert clears after three observations in which its heads have
    recovered.

    In your own training loop::

        with Monitor(model, to="heads.jsonl") as monitor:
            for batch in batches:
                loss(model(batch)).backward()
                optimiser.step()
                optimiser.zero_grad()
                monitor.step()

    With transformers: `Trainer(…, callbacks=[monitor.callback()])`; with Lightning: `monitor.callback("lightning")`.
    Put `trainer.train()` into the `with` block of a monitor, so that an exception closes the monitor.

    If torch.distributed is initialised, the observations of all ranks are combined. Every rank must have a monitor. All
    monitors raise alerts, and rank 0 writes.

    An error in `to` or `on_alert` causes one warning, and training continues. A model has one monitor: a second monitor
    closes the first and warns. A forward pass that fails ends its observation.

    Args:
        model: the model, with or without wrappers (DistributedDataParallel, torch.compile).
        to: a path (one JSON line per observation, appended), a TensorBoard `SummaryWriter`, a W&B or trackio run,
            MLflow, a Hugging Face Trainer (whose loggers get the numbers), a function of (step, mapping), or a list
            of these.
        every: observe each step whose number is a multiple of this.
        steps: (first, last): observe no step outside these; both are observed. Either may be None. With a callback, the
            last step is that of the Trainer, if it is known.
        first_step: number of the first step. To continue a run, give the number of steps already done.
        on_alert: function called with each `Alert` that is raised or cleared; None warns of raised alerts.
        stop_on: "severe" raises `StopTraining` at an alert of severity "error", "any" at every alert; None never.
        clip: threshold at which `qk_clip_` clips after each observed step; use `every=1` to clip after every step.
        clip_by: the rule of `qk_clip_`: "maximum" or "spread".
        optimiser: the optimiser, or a list of several, whose own copies of the weights `clip` changes too, as for
            `qk_clip_`. A transformers Trainer tells its optimiser by itself.
        rows: the rows to count among those that the attention mask leaves. None counts all of them. "labels" leaves out
            tokens whose own label is −100, in the model's argument `labels`. A function of the model's arguments, which
            are a mapping by name, returns a boolean mask `[B, L]`, or None for all. Layers with another B or L ignore
            the choice.
        mesh: the mesh that the model is spread over, with named dimensions, as for `all_reduce`.
        layers: pattern of the layers to report, such as "*.self_attn", or a list of patterns; None reports all.

    Raises:
        InvalidTypeError, InvalidValueError: naming the argument.

    >>> import torch
    >>> steps = []
    >>> model = nn.MultiheadAttention(8, 2, batch_first=True)
    >>> with Monitor(model, to=lambda step, entry: steps.append(step), every=4) as monitor:
    ...     for _ in range(9):
    ...         _ = model(*[torch.eye(8)[None]] * 3)
    ...         monitor.step()
    >>> steps
    [0, 1, 2, 4, 8]
    >>> monitor
    Monitor of a MultiheadAttention: closed at step 9, 5 observations, no alert stands
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        to: Any,
        every: int = 100,
        steps: tuple[int | None, int | None] | None = None,
        first_step: int = 0,
        on_alert: Callable[[Alert], object] | None = None,
        stop_on: Literal["severe", "any"] | None = None,
        clip: float | None = None,
        clip_by: By = "maximum",
        optimiser: Any = None,
        rows: Rows | None = None,
        mesh: DeviceMesh | None = None,
        layers: str | Sequence[str] | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise InvalidTypeError("model", f"must be a torch.nn.Module, got {type(model).__name__}")
        if on_alert is not None and not callable(on_alert):
            raise InvalidTypeError("on_alert", f"must be a function of an alert, got {type(on_alert).__name__}")
        if stop_on not in (None, "severe", "any"):
            raise unknown_name("stop_on", str(stop_on), ["severe", "any"])
        self._schedule = Schedule.of(every, steps)
        self._is_open_ended = self._schedule.last is None
        self._rows = check_rows(rows)
        self._next = checks.integer("first_step", first_step, 0)
        self._clip = None if clip is None else checks.number("clip", clip, above=0.0)
        self._clip_by = check_rule("clip_by", clip_by)
        self._patterns = (layers,) if isinstance(layers, str) else ("*",) if layers is None else tuple(layers)
        self._optimiser = optimiser
        check_optimisers(optimiser)
        self._write = open_destination(to, lambda alert: repr(Alert.from_json(alert)))
        self._model = model
        self._on_alert = _warn_of if on_alert is None else on_alert
        self._stop_on = stop_on
        self._watch: TrainingWatch | None = None
        self._pauses = 0
        self._mesh = mesh
        self._ranks: Ranks | None = None
        self._trend = Trend()
        self._alerts = Alerts()
        self._observed = 0
        # Scales as first observed for each layer: a learned scale may move away from 1/√dₖ.
        self._scales: dict[str, Mapping[str, Any]] = {}
        self._run = uuid.uuid4().hex[:8]
        self._restart = "resumed" if self._next else None
        self._said: set[str] = set()
        self._is_closed = self._is_between_runs = False
        self._replace_other()
        self._begin()

    @property
    def alerts(self) -> list[Alert]:
        """Return the standing alerts: raised and not cleared."""
        return self._alerts.standing

    def __repr__(self) -> str:
        state = f"{'closed at' if self._is_closed else 'in'} step {self._next}"
        observed, alerts = count(self._observed, "observation"), self.alerts
        stand = f"{count(len(alerts), 'alert')} stand{'s' if len(alerts) == 1 else ''}" if alerts else "no alert stands"
        lines = [f"Monitor of a {type(self._model).__name__}: {state}, {observed}, {stand}", *map(repr, alerts)]
        return "\n  ".join(lines)

    def step(self, *, skipped: bool = False) -> None:
        """End a training step and begin the next one. Call this after the optimiser's step.

        Args:
            skipped: whether a gradient scaler skipped the optimiser's step. The observation records this.

        Raises:
            InvalidValueError: after `close()`, or if the ranks observe different steps.
            StopTraining: at an alert that `stop_on` selects, after the observation was written.
        """
        if self._is_closed:
            raise InvalidValueError("step() was called after close(); make another Monitor with first_step")
        self._end(skipped)
        self._begin()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Ignore the model's calls inside the block, such as a probe, a reference model's pass or a second loss."""
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1

    def close(self) -> None:
        """Stop observing. An unfinished step is dropped, and `to` is not closed. Closing twice has no effect."""
        self._is_closed, self._is_between_runs = True, False
        self._leave_watch()

    def __exit__(self, *details: object) -> None:
        self.close()

    def state_dict(self) -> dict[str, Any]:
        """Return step, trend, alerts and first scales as plain JSON values, to be saved with a checkpoint."""
        return {
            "run": self._run,
            "step": self._next,
            "trend": self._trend.state_dict(),
            "alerts": self._alerts.state_dict(),
            "scales": plain(self._scales),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`: with its step, and with the alerts that an uninterrupted run would have.

        Raises:
            InvalidValueError: for anything that `state_dict` did not return.
        """
        trend, alerts = Trend(), Alerts()
        try:
            run, step = str(state["run"]), checks.integer("step of state", state["step"], 0)
            trend.load_state_dict(state["trend"])
            alerts.load_state_dict(state["alerts"])
            scales = {str(layer): dict(scale) for layer, scale in state.get("scales", {}).items()}
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise InvalidValueError("state", f"must be what state_dict() returned, got {error!r}") from None
        self._leave_watch()
        self._run, self._next, self._trend, self._alerts, self._restart = run, step, trend, alerts, "resumed"
        self._scales = dict(scales)
        self._begin()

    def callback(self, library: Literal["transformers", "lightning"] = "transformers") -> Any:
        """Return a callback for the Trainer of a library, which tells the monitor when steps begin and end.

        Step numbers are those of the Trainer, also in resumed runs. Calls between steps, such as evaluation, are
        ignored. The state is saved with each checkpoint and loaded when a run resumes from a checkpoint. `stop_on` ends
        the training. If the transformers Trainer makes the model itself (`model_init`), the monitor switches to that
        model. The monitor closes when training ends, and in Lightning also at an exception. A Trainer that runs again
        opens the monitor again.

        Raises:
            InvalidValueError: if the library is unknown.
            SqrtdkError: if the library is not installed.
        """
        makers = {"transformers": make_trainer_callback, "lightning": make_lightning_callback}
        if library not in makers:
            raise unknown_name("library", str(library), list(makers))
        return makers[library](self)

    def _replace_other(self) -> None:
        """Close the model's earlier monitor, for example after a notebook cell was run twice."""
        inner = next(iter(name_modules(self._model)))
        known = _monitors.get(inner)
        other = None if known is None else known()
        if other is not None and other is not self and not other._is_closed:
            other.close()
            self._say_once(f"another Monitor of this {type(inner).__name__} was open: it is closed and replaced")
        _monitors[inner] = weakref.ref(self)

    # Runs of a Trainer

    def _begin_run(self, model: nn.Module | None = None, last: int | None = None) -> None:
        """Observe a Trainer's run from its next step to its last, in the model that the Trainer made, if any.

        A Trainer may run again; a monitor that its user closed stays closed.
        """
        self._leave_watch()
        if self._is_between_runs:
            self._is_closed = self._is_between_runs = False
        if last is not None and self._is_open_ended:
            self._schedule = replace(self._schedule, last=last)
        if model is not None:
            self._model = model
        if not self._is_closed:
            self._replace_other()

    def _take_optimiser(self, optimiser: Any) -> None:
        if self._optimiser is None and (isinstance(optimiser, list) or hasattr(optimiser, "param_groups")):
            self._optimiser = optimiser

    def _end_run(self) -> None:
        was_open = not self._is_closed
        self.close()
        self._is_between_runs = was_open

    # One step

    def _is_due(self) -> bool:
        # A head that fell in the last observation is observed once more, because a single batch may be unusual.
        is_second = bool(self._trend.points) and self._trend.points[-1][0] == self._next - 1 and self._trend.is_suspect
        return self._schedule.is_due(self._next) or (is_second and self._schedule.includes(self._next))

    def _begin(self) -> None:
        if self._watch is None and not self._is_closed and self._is_due():
            self._watch = TrainingWatch(self._model, self._next, self._rows, lambda: self._pauses > 0, self._say_once)
            self._watch.__enter__()

    def _leave_watch(self) -> Seen | None:
        watch, self._watch = self._watch, None
        if watch is None:
            return None
        watch.__exit__(None, None, None)
        return watch.seen

    def _end(self, skipped: bool) -> None:
        step, self._next = self._next, self._next + 1
        seen = self._leave_watch()
        if seen is None:
            return
        observation = self._meet(step, seen)
        clipped = self._step_in(seen)
        alerts: list[Alert] = []
        self._guard(
            "looking at a step", lambda: alerts.extend(self._report(observation, seen, clipped, skipped)), is_ours=True
        )
        for alert in alerts:
            self._guard("on_alert", lambda alert=alert: self._on_alert(alert))  # type: ignore[misc]
        for alert in alerts:
            if alert.is_raised and (self._stop_on == "any" or (self._stop_on == "severe" and alert.is_severe)):
                raise StopTraining(alert)

    def _meet(self, step: int, seen: Seen) -> _Observation:
        """Return the combined observation of all ranks; scales and reasons come from the first rank that has them."""
        layers = {path: one for path, one in seen.layers.items() if self._is_chosen(path)}
        sums = {path: one for path, one in seen.cause_sums.items() if path in layers}
        scales = {
            one.layer: {"declared": declared_scale(self._model, one).value, "measured": one.effective, **one.as_json()}
            for one in seen.scales
            if one.layer in layers
        }
        unseen = {one.layer: one.reason for one in seen.unattributed if self._is_chosen(one.layer)}
        if dist.is_available() and dist.is_initialized():
            with _naming_the_monitor(step):
                if self._ranks is None:
                    self._ranks = _meet_apart(Ranks.of(None, self._mesh, self._model))
                layers, sums = unite(layers, sums, self._ranks, seen.paths, step)
                for others in reversed(self._ranks.gather((scales, unseen))):
                    scales, unseen = scales | others[0], unseen | others[1]
        causes = {path: sums[path].split(layers[path]) for path in sums if path in layers}
        return _Observation(step, layers, causes, scales, unseen)

    def _is_chosen(self, path: str) -> bool:
        return any(fnmatch(path, pattern) for pattern in self._patterns)

    def _step_in(self, seen: Seen) -> Clipping | None:
        if self._clip is None:
            return None
        try:
            return qk_clip_(
                self._model,
                seen,
                threshold=self._clip,
                by=self._clip_by,
                optimiser=self._optimiser,
                mesh=self._mesh,
            )
        except SqrtdkError as reason:
            self._say_once(f"clip={self._clip:g} could not be kept up: {reason}")
            return None

    def _report(self, observation: _Observation, seen: Seen, clipped: Clipping | None, skipped: bool) -> list[Alert]:
        """Judge an observation and write it; return the alerts that were raised or cleared."""
        step, layers, causes = observation.step, observation.layers, observation.causes
        self._observed += 1
        if not layers:
            self._say_once(_why_nothing(step, seen))
        if self._trend.points and step <= self._trend.points[-1][0]:
            self._restart = "rewound"
            self._alerts.rewind(step)
        self._trend.add(step, layers, causes)
        self._scales = {**observation.scales, **self._scales}
        findings = diagnose(
            layers,
            history=self._trend.points,
            causes=self._trend.causes,
            scales=[self._scales[path] for path in layers if path in self._scales],
            dtype={path: self._scales[path]["logits_dtype"] for path in layers if path in self._scales},
            is_clipped=self._clip is not None,
        )
        alerts = self._alerts.update(step, findings, layers)
        entry = {
            "run": self._run,
            "restart": self._restart,
            "skipped": skipped,
            "layers": {path: _write_layer(summary, causes.get(path)) for path, summary in layers.items()},
            "unseen": dict(observation.unseen),
            "alerts": [alert.as_json() for alert in alerts],
            "clipped": None if clipped is None else clipped.as_json(),
        }
        self._restart = None
        if self._ranks is None or dist.get_rank() == 0:
            self._guard("writing to `to`", lambda: self._write(step, entry))
        return alerts

    def _guard(self, doing: str, work: Callable[[], object], *, is_ours: bool = False) -> None:
        """Call a function that must not end a training run; warn once if the function raises."""
        try:
            work()
        except StopTraining:
            raise
        except Exception as error:
            if is_ours and errors.faults_are_raised:
                raise
            self._say_once(f"the monitor failed at {doing} and goes on: {type(error).__name__}: {error}", doing)

    def _say_once(self, message: str, about: str | None = None) -> None:
        if (about or message) not in self._said:
            self._said.add(about or message)
            with suppress(Warning):  # a filter may turn the warning into an error, which must not end a run
                warn(message)


def _meet_apart(ranks: Ranks) -> Ranks:
    """Return the ranks in a separate group, whose collectives match no others and wait at most `WAIT`."""
    if ranks.group is not None or not dist.is_gloo_available():
        return ranks
    return replace(ranks, group=dist.new_group(backend="gloo", timeout=WAIT))


@contextmanager
def _naming_the_monitor(step: int) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise InvalidValueError(
            f"the monitor of rank {dist.get_rank()} waited for the other ranks at step {step} in vain; every rank "
            f"needs one that observes the same steps ({error})"
        ) from error


def _warn_of(alert: Alert) -> None:
    if alert.is_raised:
        warn(repr(alert))


def _why_nothing(step: int, seen: Seen) -> str:
    if not seen.calls:
        return (
            f"the monitor saw no call of the model in training mode with gradients at step {step}; is it the model "
            "that trains?"
        )
    missed = "".join(f"; {one.layer or 'the model'}: {one.reason}" for one in seen.unattributed)
    return f"the monitor saw no attention in {seen.calls} calls of the model at step {step}{missed}"


def _write_layer(summary: HeadSummary, causes: CauseSplit | None) -> dict[str, list[Any]]:
    """Return the statistics of a layer's heads to five digits, NaN and infinities as None, and their patterns."""
    columns: dict[str, Array] = {
        "max_logit": summary["max_logit"].largest,
        "score_spread": spread_of_scores(summary),
        "entropy_ratio": summary["entropy_ratio"].mean,
        "saturation_index": summary["saturation_index"].mean,
        "sink_weight": summary["sink_weight"].mean,
    }
    if causes is not None:
        columns |= {name: getattr(causes, name) for name in ("query_norm", "key_spread", "alignment")}
    written: dict[str, list[Any]] = {
        name: [float(f"{value:.5g}") if math.isfinite(value) else None for value in values]
        for name, values in columns.items()
    }
    return {**written, "rows": summary.rows_seen.tolist(), "pattern": patterns(summary)}
