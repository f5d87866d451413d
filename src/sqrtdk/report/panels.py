"""Figures as data, independent of a renderer: panels of series with axes, reference lines and notes.

A `Figure` is plain data. Each renderer draws the same one, so the page and the PNG cannot disagree.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias, TypeVar

from sqrtdk.errors import InvalidValueError

T = TypeVar("T")
Numbers: TypeAlias = tuple[float, ...]
Dash: TypeAlias = Literal["solid", "dash", "dot", "dashdot"]
Symbol: TypeAlias = Literal["circle", "diamond", "cross", "square"]
ColourScale: TypeAlias = Literal["sequential", "diverging"]

# Dark to light; readable on white and on black and by colour-blind readers.
COLOUR_SCALES: dict[ColourScale, tuple[str, ...]] = {
    "sequential": ("#0b1f3f", "#14486e", "#1f7a8c", "#5aa786", "#b6c96b", "#fde74c"),
    "diverging": ("#0b5fa5", "#6aa5d6", "#dfe3e8", "#e8a070", "#c24f0a"),
}


def floats(values: Iterable[float | None]) -> Numbers:
    """Turn what a record holds (lists, arrays, None for "no number") into a tuple of floats.

    >>> floats([1, 2.5])
    (1.0, 2.5)
    """
    return tuple(math.nan if value is None else float(value) for value in values)


@dataclass(frozen=True)
class Line:
    """Line through points; `group` is its entry in the legend, None leaves it out."""

    x: Numbers
    y: Numbers
    colour: str
    group: str | None = None
    dash: Dash = "solid"
    width: float = 2.0
    opacity: float = 1.0

    def __post_init__(self) -> None:
        _require_equal_lengths("Line", x=self.x, y=self.y)


@dataclass(frozen=True)
class Points:
    """Markers, with error bars from `low` to `high` if given and a text for each if given."""

    x: Numbers
    y: Numbers
    colour: str
    group: str | None = None
    symbol: Symbol = "circle"
    size: float = 7.0
    low: Numbers | None = None
    high: Numbers | None = None
    text: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("low", "high", "text"):
            if getattr(self, name) is not None:
                _require_equal_lengths("Points", x=self.x, **{name: getattr(self, name)})
        if (self.low is None) != (self.high is None):
            raise InvalidValueError("Points", "must get low and high together, got one of them")
        _require_equal_lengths("Points", x=self.x, y=self.y)


@dataclass(frozen=True)
class Heatmap:
    """Matrix as colours, first row on top, with a text in each cell if given; its colour range is part of it.

    `ticks` names values on the colour bar, as those of logarithms. Dark cells of a sequential map are the sharp ones:
    `sharp` says whether those have low numbers (entropy ratios) or high ones (weights, logits).
    """

    z: tuple[Numbers, ...]
    low: float
    high: float
    colours: ColourScale = "sequential"
    text: tuple[tuple[str, ...], ...] | None = None
    colour_bar: bool = True
    ticks: tuple[tuple[float, str], ...] | None = None
    sharp: Literal["low", "high"] = "low"

    def __post_init__(self) -> None:
        if self.text is not None:
            _require_equal_lengths("Heatmap", z=self.z, text=self.text)
        if len({len(row) for row in self.z}) > 1:
            raise InvalidValueError("Heatmap", f"must have rows of one length, got {[len(row) for row in self.z]}")


def list_colours(heat: Heatmap) -> tuple[str, ...]:
    """Return the colours of a map from its low end to its high end."""
    colours = COLOUR_SCALES[heat.colours]
    return colours[::-1] if heat.colours == "sequential" and heat.sharp == "high" else colours


def shade(heat: Heatmap, value: float) -> str:
    """Return the colour of a value in a map.

    >>> shade(Heatmap(((0.0, 1.0),), 0.0, 1.0), 0.0) == shade(Heatmap(((0.0, 1.0),), 0.0, 1.0, sharp="high"), 1.0)
    True
    """
    colours = list_colours(heat)
    share = min(max((value - heat.low) / ((heat.high - heat.low) or 1.0), 0.0), 1.0) * (len(colours) - 1)
    at = min(int(share), len(colours) - 2)
    ends = [[int(colour[i : i + 2], 16) for i in (1, 3, 5)] for colour in colours[at : at + 2]]
    mixed = (round(low + (share - at) * (high - low)) for low, high in zip(*ends, strict=True))
    return "#" + "".join(f"{part:02x}" for part in mixed)


@dataclass(frozen=True)
class Area:
    """Shaded band between two curves; `group` ties it to the legend entry of its line."""

    x: Numbers
    low: Numbers
    high: Numbers
    colour: str
    group: str | None = None
    opacity: float = 0.18

    def __post_init__(self) -> None:
        _require_equal_lengths("Area", x=self.x, low=self.low, high=self.high)


Series: TypeAlias = Line | Points | Area | Heatmap


@dataclass(frozen=True)
class Axis:
    """Axis: its title, whether it is logarithmic, its range, and named ticks in place of numbers."""

    title: str = ""
    log: bool = False
    low: float | None = None
    high: float | None = None
    ticks: tuple[tuple[float, str], ...] | None = None

    def __post_init__(self) -> None:
        if (self.low is None) != (self.high is None):
            raise InvalidValueError("Axis", "must get low and high together, got one of them")
        if self.log and self.low is not None and self.low <= 0:
            raise InvalidValueError(f"a logarithmic Axis must start above 0, got {self.low}")


def name_ticks(values: Iterable[float], most: int = 10) -> tuple[tuple[float, str], ...]:
    """Return ticks at values, named by them; of many only some, the ends among them, so that names do not overlap.

    >>> name_ticks([4, 64])
    ((4.0, '4'), (64.0, '64'))
    >>> [name for _, name in name_ticks(range(1, 22), most=3)]
    ['1', '11', '21']
    """
    return tuple((float(value), f"{value:g}") for value in spread_out(sorted(set(values)), most))


def spread_out(values: Sequence[T], most: int) -> list[T]:
    """Return at most so many of the values, evenly over their order, the first and the last among them.

    >>> spread_out("abcdefg", 4)
    ['a', 'c', 'e', 'g']
    """
    if len(values) <= most:
        return list(values)
    return [values[round(index * (len(values) - 1) / (most - 1))] for index in range(most)]


@dataclass(frozen=True)
class ReferenceLine:
    """Thin dashed line across the panel at one value, with a few words at its end."""

    value: float
    label: str = ""
    direction: Literal["horizontal", "vertical"] = "horizontal"
    label_at: Literal["start", "end"] = "end"


@dataclass(frozen=True)
class Note:
    """Few words at a point of the panel, in data coordinates."""

    x: float
    y: float
    text: str
    side: Literal["right", "left", "above", "below"] = "right"


@dataclass(frozen=True)
class Panel:
    """One set of axes with what is drawn in it; pages fetch it from a figure by its name, with its own caption."""

    title: str
    x: Axis
    y: Axis
    series: tuple[Series, ...]
    lines: tuple[ReferenceLine, ...] = ()
    notes: tuple[Note, ...] = ()
    name: str = ""
    caption: str = ""


@dataclass(frozen=True)
class Figure:
    """Panels in reading order, so many in a row, under one title; `caption` says how to read it."""

    title: str
    panels: tuple[Panel, ...]
    columns: int = 3
    caption: str = ""
    panel_height: int = field(default=300)

    def legend(self) -> dict[str, Line | Points]:
        """Return the legend's entries: each group once, with the first series that carries it.

        >>> line = Line((0.0,), (1.0,), "#000000", group="none")
        >>> list(Figure("f", (Panel("p", Axis(), Axis(), (line, line)),)).legend())
        ['none']
        """
        entries: dict[str, Line | Points] = {}
        for panel in self.panels:
            for series in panel.series:
                if isinstance(series, Line | Points) and series.group is not None:
                    entries.setdefault(series.group, series)
        return entries

    def part(self, *names: str, columns: int) -> Figure:
        """Return the figure with the panels of these names alone, captioned by what is said about them."""
        panels = tuple(panel for panel in self.panels if panel.name in names)
        caption = " ".join(dict.fromkeys(panel.caption for panel in panels if panel.caption))
        return replace(self, panels=panels, columns=columns, caption=caption)

    def panel(self, name: str) -> Panel:
        """Return the one panel of this name.

        >>> Figure("f", (Panel("p", Axis(), Axis(), (), name="first"),)).panel("first").title
        'p'
        """
        (panel,) = self.part(name, columns=1).panels
        return panel


def one_panel(title: str, panel: Panel, caption: str, height: int = 330) -> Figure:
    """Return a figure of a single panel: the figure's title states the finding, so that the panel needs none.

    >>> line = Line((0.0,), (1.0,), "#000000")
    >>> one_panel("It is 1", Panel("y", Axis("x"), Axis("y"), (line,)), "n = 1").panels[0].title
    ''
    """
    return Figure(title, (replace(panel, title=""),), columns=1, caption=caption, panel_height=height)


def _require_equal_lengths(kind: str, **values: Sequence[object]) -> None:
    lengths = {name: len(value) for name, value in values.items()}
    if len(set(lengths.values())) > 1:
        raise InvalidValueError(kind, f"must get values of one length, got {lengths}")
