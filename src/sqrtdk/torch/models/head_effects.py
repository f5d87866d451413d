"""Effects of single heads: loss and output of a model with one head switched off, or at another temperature."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sqrtdk import checks
from sqrtdk.errors import InvalidTypeError, InvalidValueError
from sqrtdk.records.json import PlainRecord
from sqrtdk.show.table import Shown, Table, count, name_layer
from sqrtdk.torch.models.evaluation import evaluating
from sqrtdk.torch.watch import watch
from sqrtdk.torch.watch.modules import LayerKey, name_layers
from sqrtdk.torch.watch.replace import FusedWatch
from sqrtdk.wording.numbers import write_number


@dataclass(frozen=True)
class HeadEffect(PlainRecord):
    """Effect of changing one head.

    Attributes:
        layer, head: layer name as in `watch`, and head number.
        loss_change: loss with the change − loss without; None if there is no loss.
        output_change: ‖changed − baseline‖ / ‖baseline‖ of the output.
        cosine_change: mean of 1 − cos between the vectors along the output's last axis.
    """

    layer: str
    head: int
    loss_change: float | None
    output_change: float
    cosine_change: float

    @property
    def size(self) -> float:
        """Return the sort key of heads: the signed change of the loss, else the change of the output."""
        return self.output_change if self.loss_change is None else self.loss_change


@dataclass(frozen=True, repr=False)
class HeadEffects(Shown, PlainRecord):
    """Effect of every head, largest first; `unreached` names layers whose code cannot be changed."""

    change: str
    baseline_loss: float | None
    effects: tuple[HeadEffect, ...]
    unreached: tuple[str, ...]

    def of(self, layer: str, head: int) -> HeadEffect:
        """Return the effect of one head.

        Raises:
            InvalidValueError: if the head was not measured.
        """
        for effect in self.effects:
            if (effect.layer, effect.head) == (layer, head):
                return effect
        raise InvalidValueError(f"head {head} of {layer!r} was not measured")

    def _table(self) -> Table:
        has_loss = self.baseline_loss is not None
        rows = [
            (
                name_layer(effect.layer),
                str(effect.head),
                *([f"{effect.loss_change:+.3g}"] if effect.loss_change is not None else []),
                write_number(effect.output_change, 3),
                write_number(effect.cosine_change, 3),
            )
            for effect in self.effects
        ]
        loss = f"; loss without it {write_number(self.baseline_loss, 5)}" if has_loss else ""
        missing = f"; not reached: {', '.join(self.unreached)}" if self.unreached else ""
        columns = ("layer", "head", *(["loss"] if has_loss else []), "output", "1 − cos")
        return Table(f"{count(len(rows), 'head')}, {self.change}{loss}{missing}", columns, rows, left=1)


def measure_heads(
    model: nn.Module,
    batch: Any,
    *,
    loss: Callable[[Any], Any] | None = None,
    output: Callable[[Any], Tensor] | None = None,
    heads: Sequence[tuple[str, int]] | None = None,
    temperature: float | None = None,
    progress: Callable[[str, float], object] | None = None,
) -> HeadEffects:
    """Return the change of loss and output when one head after another is switched off or gets another temperature.

    sqrtdk computes attention, also in the baseline, in evaluation mode and without gradients. Afterwards the model, its
    mode and the random streams are as before. A head that is switched off returns zeros. At temperature ∞ it returns
    the mean of its visible values. The measurement takes one forward pass per head.

    Args:
        model: any module that uses torch's attention operation, nn.MultiheadAttention or the transformers registry.
        batch: the input of the model: a tensor, a tuple or a dict of arguments.
        loss: returns the loss from the model's result; None uses its `.loss` if there is one.
        output: returns the tensor to compare; None uses `logits`, `last_hidden_state` or the first tensor.
        heads: pairs (layer, head) to measure, with layer names as in `watch`; None measures all.
        temperature: factor on the head's own temperature, above 0; None switches the head off.
        progress: called with the current activity and the finished share, such as `show` of a progress bar.

    Raises:
        InvalidTypeError, InvalidValueError: naming the argument, also if no attention can be reached.

    >>> torch.manual_seed(0) and None
    >>> attention = nn.MultiheadAttention(8, 2, batch_first=True)
    >>> x = torch.randn(1, 5, 8)
    >>> effects = measure_heads(attention, (x, x, x), loss=lambda result: result[0].square().mean())
    >>> len(effects.effects), effects.change
    (2, 'switched off')
    """
    if not isinstance(model, nn.Module):
        raise InvalidTypeError("model", f"must be a torch.nn.Module, got {type(model).__name__}")
    if temperature is not None:
        checks.number("temperature", temperature, above=0.0, finite=False, kind="None (switched off) or a number")
    with evaluating(model), torch.no_grad():
        run = _Run(model, batch, loss, output)
        with watch(model) as seen:
            run()
        changing = _ChangingWatch(model)
        with changing:
            baseline = run()
            names = name_layers(changing.reached)
            reached = {names[key]: (key, number) for key, number in changing.reached.items()}
            chosen = _choose(heads, {layer: number for layer, (_, number) in reached.items()})
            effects = []
            for done, (layer, head) in enumerate(chosen):
                if progress is not None:
                    progress(f"measuring head {head} of {layer or 'the model'}", done / len(chosen))
                changing.change = _Change(reached[layer][0], head, temperature)
                effects.append(_compare(layer, head, baseline, run()))
    effects.sort(key=lambda effect: -effect.size if math.isfinite(effect.size) else -math.inf)
    unreached = tuple(layer for layer in seen.layers if layer not in reached)
    said = "switched off" if temperature is None else f"at {temperature:g} times the temperature"
    return HeadEffects(said, baseline.loss, tuple(effects), unreached)


@dataclass(frozen=True)
class _Change:
    layer: LayerKey
    head: int
    temperature: float | None


@dataclass(frozen=True)
class _Outcome:
    loss: float | None
    output: Tensor


class _ChangingWatch(FusedWatch):
    """Watch that computes attention with sqrtdk and one head changed, and measures nothing."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.change: _Change | None = None
        self.reached: dict[LayerKey, int] = {}

    def _begin_call(self) -> None:
        pass

    def _replace_torch(self, original: Callable[..., Any]) -> Callable[..., Any]:
        fused = super()._replace_torch(original)

        def changed(query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Any:
            if not self._thread.frames or query.dim() < 3 or not query.is_floating_point() or query.is_nested:
                return fused(query, key, *args, **kwargs)
            return self._switch_off(fused(self._rescale(query), key, *args, **kwargs), axis=-3)

        return changed

    def _attend(self, module: nn.Module, query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Any:
        output, weights = super()._attend(module, self._rescale(query), key, *args, **kwargs)
        return self._switch_off(output, axis=-2), weights

    def _layer_here(self) -> LayerKey:
        number, path, _ = self._locate()[-1]
        return self._thread.counter.find(path, number)

    def _change_here(self) -> _Change | None:
        return self.change if self.change is not None and self.change.layer == self._layer_here() else None

    def _rescale(self, query: Tensor) -> Tensor:
        self.reached[self._layer_here()] = query.shape[-3]
        change = self._change_here()
        if change is None or change.temperature is None:
            return query
        factors = torch.ones(query.shape[-3], 1, 1, dtype=query.dtype, device=query.device)
        factors[change.head] = 1.0 / change.temperature
        return query * factors

    def _switch_off(self, output: Tensor, axis: int) -> Tensor:
        change = self._change_here()
        if change is None or change.temperature is not None:
            return output
        output = output.clone()
        output.select(axis, change.head).zero_()
        return output


class _Run:
    """Runs the model on the batch, from the same random state each time."""

    def __init__(self, model: nn.Module, batch: Any, loss: Any, output: Any) -> None:
        self._model, self._batch, self._loss, self._output = model, batch, loss, output
        self._random = torch.random.get_rng_state()

    def __call__(self) -> _Outcome:
        torch.random.set_rng_state(self._random)
        if isinstance(self._batch, Mapping):
            result = self._model(**self._batch)
        elif isinstance(self._batch, tuple | list):
            result = self._model(*self._batch)
        else:
            result = self._model(self._batch)
        loss = getattr(result, "loss", None) if self._loss is None else self._loss(result)
        tensor = _find_output(result) if self._output is None else self._output(result)
        if not isinstance(tensor, Tensor):
            raise InvalidTypeError("output", f"must give a tensor, got {type(tensor).__name__}")
        return _Outcome(None if loss is None else float(loss), tensor.detach().double())


def _find_output(result: Any) -> Tensor:
    for name in ("logits", "last_hidden_state"):
        if isinstance(getattr(result, name, None), Tensor):
            return getattr(result, name)  # type: ignore[no-any-return]
    items = result.values() if isinstance(result, Mapping) else result if isinstance(result, tuple | list) else [result]
    for item in items:
        if isinstance(item, Tensor) and item.is_floating_point():
            return item
    raise InvalidTypeError(
        f"the model returned {type(result).__name__} without a tensor; say with output= which to use"
    )


def _choose(heads: Sequence[tuple[str, int]] | None, reached: Mapping[str, int]) -> list[tuple[str, int]]:
    if not reached:
        raise InvalidValueError(
            "model has no attention that can be changed: torch's operation, nn.MultiheadAttention and the registry of "
            "transformers can be, attention in code of a model's own cannot"
        )
    known = [(path, head) for path, number in reached.items() for head in range(number)]
    if heads is None:
        return known
    for one in heads:
        if tuple(one) not in known:
            layers = ", ".join(f"{path!r} ({number})" for path, number in reached.items())
            raise InvalidValueError("heads", f"must be pairs (layer, head) of these layers: {layers}; got {one!r}")
    return [(path, head) for path, head in heads]


def _compare(layer: str, head: int, baseline: _Outcome, changed: _Outcome) -> HeadEffect:
    before, after = baseline.output, changed.output
    loss = None if baseline.loss is None or changed.loss is None else changed.loss - baseline.loss
    size = float(torch.linalg.vector_norm(before))
    difference = float(torch.linalg.vector_norm(after - before))
    cosine = torch.nn.functional.cosine_similarity(before, after, dim=-1) if before.dim() else torch.ones(())
    return HeadEffect(layer, head, loss, difference / size if size else math.nan, float((1.0 - cosine).mean()))
