"""Replay of training: the loss curves of runs, and the attention map of one example at the same steps.

`replay.js` draws the same in the report and on the Runs page, where a slider or the button Play chooses the step.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from sqrtdk.records.json import round_numbers
from sqrtdk.records.maps import count_right, unpack
from sqrtdk.records.record import Record
from sqrtdk.report.palette import policy_colour
from sqrtdk.report.panels import Axis, Line, Panel, ReferenceLine, floats
from sqrtdk.report.svg_renderer import draw_panel
from sqrtdk.wording.names import name_policy
from sqrtdk.wording.numbers import write_number, write_setting

__all__ = ["choose_runs", "draw_map", "read_replay", "render_replay", "render_replay_view", "say_run"]

Run = Mapping[str, Any]
"""A run as `replay.js` takes it: `name`, `colour`, `total` updates, curves `step` and `loss`, and `maps`."""

_SHOWN = ("none", "sqrt", "inverse")


def choose_runs(record: Record) -> list[Run]:
    """Return the first seed's runs of no scaling, 1/√dₖ and 1/dₖ at the largest dₖ of an ablation that has their maps.

    Each has the learning rate of the ablation; fewer, or none, where maps of them were not recorded.
    """
    maps = record.curves.get("maps", ())
    d_k = max((one["d_k"] for one in maps), default=0)
    same = ("scale", "seed", "init", "qk_step", "lr", "d_k")
    curves = {tuple(run.get(name, "unit") for name in same): run for run in record.curves["runs"]}
    runs = []
    for one in maps:
        run = curves.get(tuple(one.get(name, "unit") for name in same))
        if one["d_k"] == d_k and one["scale"] in _SHOWN and run is not None and run["step"]:
            runs.append((_SHOWN.index(one["scale"]), _describe(one, run)))
    return [run for _, run in sorted(runs, key=lambda ranked: ranked[0])]


def _describe(maps: Mapping[str, Any], curves: Mapping[str, Any]) -> Run:
    return {
        "name": f"{name_policy(maps['scale'])}, learning rate {write_setting(maps['lr'])}",
        "policy": name_policy(maps["scale"]),
        "seed": maps["seed"],
        "colour": policy_colour(maps["scale"]),
        "total": max(curves["step"][-1], maps["steps"][-1]),
        "step": list(curves["step"]),
        "loss": round_numbers(list(curves["loss"])),
        "maps": {name: maps[name] for name in ("tokens", "first", "right", "chance_loss", "steps", "weights")},
    }


def say_run(run: Run, step: int) -> str:
    """Return the line below a run's map at a step; `replay.js` writes the same."""
    losses = [loss for at, loss in zip(run["step"], run["loss"], strict=True) if at <= step and loss is not None]
    said = f"loss {write_number(losses[-1] if losses else None, 3)}"
    right = run["maps"]["right"]
    if not right:
        return said
    at = _find(run["maps"], step)
    return f"{said}, right value: {0 if at is None else count_right(run['maps'], at)} of {len(right)} queries"


def _find(maps: Mapping[str, Any], step: int) -> int | None:
    """Return the place of the last map that is not after a step."""
    places = [place for place, one in enumerate(maps["steps"]) if one <= step]
    return places[-1] if places else None


def read_replay(runs: Sequence[Run]) -> str:
    """State from which step on every query looks at the right value, or what the queries look at in the end."""
    return " ".join(_read_run(run) for run in runs if run["maps"]["right"])


def _read_run(run: Run) -> str:
    maps, total = run["maps"], len(run["maps"]["right"])
    counts = [count_right(maps, at) for at in range(len(maps["steps"]))]
    since = next((at for at in range(len(counts)) if min(counts[at:]) == total), None)
    name = run["policy"]
    if since is not None:
        return f"With {name} all {total} queries look at the right value from step {maps['steps'][since]} on."
    verb = "looks" if counts[-1] == 1 else "look"
    said = f"With {name} {counts[-1]} of {total} queries {verb} at the right value at step {maps['steps'][-1]}"
    alike = _count_alike(maps)
    return f"{said}, and {alike} of {total} look at one and the same key." if 2 * alike > total else f"{said}."


def _count_alike(maps: Mapping[str, Any]) -> int:
    """Return how many queries of the last map have their largest weight on the key that most of them have it on."""
    rows = unpack(maps, -1).tolist()
    largest = Counter(row.index(max(row)) for row in rows if row.count(max(row)) == 1)
    return max(largest.values(), default=0)


def draw_map(maps: Mapping[str, Any], at: int, colour: str, label: str) -> str:
    """Draw one map as SVG: the very elements that `heat` of `svg_chart.js` makes."""
    rows, tokens, first, right = unpack(maps, at).tolist(), maps["tokens"], maps["first"], maps["right"]
    left, top, cell, tall = 40, 18, 300 / len(tokens), 12.5

    def place(key: int, row: int, span: int) -> str:
        across = f'x="{left + key * cell:.1f}" y="{top + row * tall:.1f}" width="{span * cell:.1f}"'
        return f'<rect {across} height="{tall}"'

    parts = []
    if cell >= 11:
        parts += [
            f'<text x="{left + (key + 0.5) * cell:.1f}" y="13" text-anchor="middle">{escape(token)}</text>'
            for key, token in enumerate(tokens)
        ]
    for row, values in enumerate(rows):
        asked = tokens[first + row] + (f"→{tokens[right[row]]}" if right else "")
        parts.append(
            f'<text x="{left - 5}" y="{top + row * tall + 10:.1f}" text-anchor="end">{escape(asked)}</text>'
            f'{place(0, row, first + row + 1)} class="seen"/>'
        )
        parts += [
            f'{place(key, row, 1)} fill="{colour}" fill-opacity="{value / 255:.3f}"/>'
            for key, value in enumerate(values)
            if value
        ]
    parts += [f'{place(key, row, 1)} class="mark"/>' for row, key in enumerate(right)]
    size = f"0 0 340 {top + len(rows) * tall + 4:g}"
    return (
        f'<svg class="small-chart replay-map" viewBox="{size}" role="img" aria-label="{escape(label)}">'
        f"{''.join(parts)}</svg>"
    )


def _draw_losses(runs: Sequence[Run]) -> list[str]:
    losses = [loss for run in runs for loss in (*run["loss"], run["maps"]["chance_loss"]) if loss]
    low, high = 10.0 ** math.floor(math.log10(min(losses))), 1.15 * max(losses)
    charts = []
    for run in runs:
        line = Line(floats(run["step"]), floats(math.nan if y is None else y for y in run["loss"]), run["colour"])
        x, y = Axis("training step", low=0.0, high=float(run["total"])), Axis("", log=True, low=low, high=high)
        chance = ReferenceLine(run["maps"]["chance_loss"], "chance")
        label = f"Training loss of {run['name']}"
        charts.append(draw_panel(Panel("", x, y, (line,), (chance,)), 340, 200, "replay-loss", label))
    return charts


def render_replay_view(still: str = "", controls: str = "", last: int = 0, step: int = 0) -> str:
    """Render the view that `replay.js` fills, with what stands there where no script runs.

    Args:
        still: the figures at the last step; none where the script makes them.
        controls: further classes of the controls.
        last: the last place of the slider.
        step: the step there.
    """
    return (
        f'<div class="replay" data-screen><div class="replay-controls {controls}">'
        '<button type="button" data-do="play" aria-pressed="false">Play</button>'
        f'<label for="replay-step">training step</label><output for="replay-step">{step}</output>'
        f'<input type="range" id="replay-step" min="0" max="{last}" step="1" value="{last}"></div>'
        f'<div class="replay-runs">{still}</div>'
        f"<template>{_render_run('', _EMPTY.format('loss'), _EMPTY.format('map'), '')}</template></div>"
    )


_EMPTY = '<svg class="small-chart replay-{}" role="img"></svg>'


def _render_run(name: str, loss: str, map_of_weights: str, says: str) -> str:
    return (
        f"<figure><figcaption>{escape(name)}</figcaption>{loss}{map_of_weights}"
        f'<p class="replay-says">{escape(says)}</p></figure>'
    )


def render_replay(runs: Sequence[Run]) -> str:
    """Render the replay of these runs with its data; the last step is a picture without a script and on paper."""
    steps = sorted({step for run in runs for step in run["maps"]["steps"]})
    figures = []
    for run, loss in zip(runs, _draw_losses(runs), strict=True):
        said = say_run(run, steps[-1])
        drawn = draw_map(run["maps"], -1, run["colour"], f"Attention map of {run['name']}: {said}")
        figures.append(_render_run(run["name"], loss, drawn, said))
    data = json.dumps(runs, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    view = render_replay_view("".join(figures), "controls", len(steps) - 1, steps[-1])
    return f'{view}<script type="application/json" id="recorded-replay">{data}</script>'
