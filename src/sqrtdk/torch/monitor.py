"""Watches a model while it trains: numbers per head now and then, alerts from their trend, and clipping if asked."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from typing import Any

import torch.distributed as dist
from torch import nn

from sqrtdk.alerts import Alert, Alerts, Trend
from sqrtdk.causes import CauseSplit
from sqrtdk.destinations import open_destination
from sqrtdk.diagnosis import diagnose
from sqrtdk.errors import InvalidTypeError, InvalidValueError, SqrtdkError, missing_extra, warn
from sqrtdk.findings import Finding
from sqrtdk.patterns import patterns
from sqrtdk.summary import Array, HeadSummary
from sqrtdk.torch.distributed import all_reduce, same_layers
from sqrtdk.torch.qk_clip import Clipping, qk_clip_
from sqrtdk.torch.watch.modules import name_modules
from sqrtdk.torch.watch.seen import Seen
from sqrtdk.torch.watch.session import Watch

# The monitor of each model that is watched in training.
_monitors: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Monitor]] = weakref.WeakKeyDictionary()


class _TrainingWatch(Watch):
    """Looks at calls in training mode alone: an evaluation between two steps is none of them.

    A call that fails ends it: a trainer that is left by an exception tells nobody.
    """

    def _begin_call(self) -> None:
        if self._model.training:
            super()._begin_call()

    def _end_call(self, has_failed: bool) -> None:
        super()._end_call(has_failed)
        if has_failed:
            self.__exit__()


class Monitor(AbstractContextManager["Monitor"]):
    """Look at one training step in every `every`: what each head does, whether a trend is bad; and step in if asked.

    A look is a passive watch of all forward passes in training mode of that step, micro-batches together: outputs and
    gradients stay the same bits, and between looks there is not even a hook. Each look is written to `to` as a mapping

        {"layers": {path: {"max_logit", "entropy_ratio", "saturation_index", "pattern", "query_norm", "key_spread",
                           "alignment": [one entry per head]}},
         "alerts": [rule, severity, layer, head, state "raised" or "cleared", evidence, cause, remedy, …],
         "clipped": what `qk_clip_` did, or null}

    and becomes a point of a bounded trend, which `sqrtdk.diagnose` judges: growing logits, collapsing entropy, NaN. An
    alert is raised once; it is cleared, and may be raised again, after three looks in a row without its finding.

    In a loop of one's own::

        with Monitor(model, to="heads.jsonl") as monitor:
            for batch in batches:
                loss(model(batch)).backward()
                optimiser.step()
                optimiser.zero_grad()
                monitor.step()

    With transformers: `Trainer(…, callbacks=[monitor.callback()])`. With torch.distributed initialised the looks of all
    ranks are put together; every rank must have a monitor, and only the first one writes and alerts.

    What goes wrong in `to` or `on_alert` is warned of once, and training goes on. A model has one monitor: a second one
    closes the first, with a warning. A forward pass that fails ends the look it is in.

    Args:
        model: the model; wrappers (DistributedDataParallel, torch.compile) may be around it or not.
        to: a path (a line of JSON per look, appended), a TensorBoard `SummaryWriter`, or a function of (step, mapping).
        every: a step whose number is a multiple of it is looked at.
        first_step: the number of the first step: continue a run with the number of steps it has done.
        on_alert: called with an `Alert` that is raised or cleared; None warns of those that are raised.
        clip: after a step that was looked at, clip with `qk_clip_` at this threshold. `every=1` clips after each.

    Raises:
        InvalidTypeError, InvalidValueError: naming the argument.

    >>> import torch
    >>> looks = []
    >>> model = nn.MultiheadAttention(8, 2, batch_first=True)
    >>> with Monitor(model, to=lambda step, entry: looks.append(step), every=2) as monitor:
    ...     for _ in range(5):
    ...         _ = model(*[torch.eye(8)[None]] * 3)
    ...         monitor.step()
    >>> looks
    [0, 2, 4]
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        to: Any,
        every: int = 100,
        first_step: int = 0,
        on_alert: Callable[[Alert], object] | None = None,
        clip: float | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise InvalidTypeError("model", f"must be a torch.nn.Module, got {type(model).__name__}")
        for name, number, least in (("every", every, 1), ("first_step", first_step, 0)):
            if isinstance(number, bool) or not isinstance(number, int):
                raise InvalidTypeError(name, f"must be an integer, got {number!r}")
            if number < least:
                raise InvalidValueError(name, f"must be at least {least}, got {number}")
        if on_alert is not None and not callable(on_alert):
            raise InvalidTypeError("on_alert", f"must be a function of an alert, got {type(on_alert).__name__}")
        if clip is not None and (isinstance(clip, bool) or not isinstance(clip, int | float) or not clip > 0):
            raise InvalidValueError("clip", f"must be a threshold above 0, got {clip!r}")
        self._write = open_destination(to)
        self._model = model
        self._every = every
        self._on_alert = _warn_of if on_alert is None else on_alert
        self._clip = clip
        self._next = first_step
        self._watch: _TrainingWatch | None = None
        self._trend = Trend()
        self._alerts = Alerts()
        self._said: set[str] = set()
        self._is_closed = False
        self._replace_other()
        self._begin()

    @property
    def alerts(self) -> list[Finding]:
        """The findings that stand: raised and not cleared."""
        return self._alerts.standing

    def step(self) -> None:
        """Say that a training step has ended, after the optimiser's step; the next one begins.

        Raises:
            InvalidValueError: after `close()`.
        """
        if self._is_closed:
            raise InvalidValueError("step() was called after close(); make another Monitor with first_step")
        self._end()
        self._begin()

    def close(self) -> None:
        """Stop; a step that has not ended is forgotten, and `to` stays as it is. Closing twice does nothing."""
        self._is_closed = True
        self._leave_watch()

    def __exit__(self, *details: object) -> None:
        self.close()

    def callback(self) -> Any:
        """A `transformers.TrainerCallback` that says when steps begin and end; the monitor closes with the training.

        Steps are the trainer's, of its resumed runs as well; what is done between them, as evaluation is, is not seen.

        Raises:
            MissingExtraError: without transformers.
        """
        try:
            from transformers import TrainerCallback
        except ImportError:
            raise missing_extra("transformers", "hf") from None
        monitor = self

        class MonitorCallback(TrainerCallback):  # type: ignore[misc]
            def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                monitor._leave_watch()

            def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                monitor._next = int(state.global_step)
                monitor._begin()

            def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                monitor._end()

            def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                monitor.close()

        return MonitorCallback()

    def _replace_other(self) -> None:
        """Close the monitor that the model has, as after a notebook's cell was run twice."""
        inner = next(iter(name_modules(self._model)))
        known = _monitors.get(inner)
        other = None if known is None else known()
        if other is not None and not other._is_closed:
            other.close()
            self._say_once(f"another Monitor of this {type(inner).__name__} was open: it is closed and replaced")
        _monitors[inner] = weakref.ref(self)

    # One step

    def _begin(self) -> None:
        if self._watch is None and self._next % self._every == 0:
            self._watch = _TrainingWatch(self._model, None, 1)
            self._watch.__enter__()

    def _leave_watch(self) -> Seen | None:
        watch, self._watch = self._watch, None
        if watch is None:
            return None
        watch.__exit__(None, None, None)
        return watch.seen

    def _end(self) -> None:
        step, self._next = self._next, self._next + 1
        seen = self._leave_watch()
        if seen is None:
            return
        clipped = self._step_in(seen)
        layers, causes = seen.layers, seen.causes
        if dist.is_available() and dist.is_initialized():
            layers = {path: all_reduce(layers[path]) for path in same_layers(layers)}
            if dist.get_rank() != 0:
                return
        self._guard("looking at a step", lambda: self._report(step, seen, layers, causes, clipped))

    def _step_in(self, seen: Seen) -> Clipping | None:
        if self._clip is None:
            return None
        try:
            return qk_clip_(self._model, seen, threshold=self._clip)
        except SqrtdkError as reason:
            self._say_once(f"clip={self._clip:g} could not be kept up: {reason}")
            return None

    def _report(
        self,
        step: int,
        seen: Seen,
        layers: Mapping[str, HeadSummary],
        causes: Mapping[str, CauseSplit],
        clipped: Clipping | None,
    ) -> None:
        if not layers:
            self._say_once(_why_nothing(step, seen))
        self._trend.add(step, layers, causes)
        findings = diagnose(layers, history=self._trend.points, causes=self._trend.causes) if layers else []
        alerts = self._alerts.update(step, findings)
        entry = {
            "layers": {path: _write_layer(summary, causes.get(path)) for path, summary in layers.items()},
            "alerts": [alert.as_json() for alert in alerts],
            "clipped": None if clipped is None else clipped.as_json(),
        }
        self._guard("writing to `to`", lambda: self._write(step, entry))
        for alert in alerts:
            self._guard("on_alert", lambda alert=alert: self._on_alert(alert))  # type: ignore[misc]

    def _guard(self, doing: str, work: Callable[[], object]) -> None:
        """Do something that must not end a training run: what it raises is said once."""
        try:
            work()
        except Exception as error:
            self._say_once(f"the monitor failed at {doing} and goes on: {type(error).__name__}: {error}", doing)

    def _say_once(self, message: str, about: str | None = None) -> None:
        if (about or message) not in self._said:
            self._said.add(about or message)
            with suppress(Warning):  # turned into an error: it ends no training run
                warn(message)


def _warn_of(alert: Alert) -> None:
    if alert.is_raised:
        warn(repr(alert))


def _why_nothing(step: int, seen: Seen) -> str:
    if not seen.calls:
        return f"the monitor saw no call of the model in training mode at step {step}; is it the model that trains?"
    missed = "".join(f"; {one.layer or 'the model'}: {one.reason}" for one in seen.unattributed)
    return f"the monitor saw no attention in {seen.calls} calls of the model at step {step}{missed}"


def _write_layer(summary: HeadSummary, causes: CauseSplit | None) -> dict[str, list[Any]]:
    """The numbers of a layer's heads to five digits, NaN and infinities as null, and their patterns."""
    columns: dict[str, Array] = {
        "max_logit": summary["max_logit"].largest,
        "entropy_ratio": summary["entropy_ratio"].mean,
        "saturation_index": summary["saturation_index"].mean,
    }
    if causes is not None:
        columns |= {name: getattr(causes, name) for name in ("query_norm", "key_spread", "alignment")}
    written: dict[str, list[Any]] = {
        name: [float(f"{value:.5g}") if math.isfinite(value) else None for value in values]
        for name, values in columns.items()
    }
    return {**written, "pattern": patterns(summary)}
